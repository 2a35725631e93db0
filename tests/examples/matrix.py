"""The README's matrix of what is captured, made from what the examples' tests prove.

    python -m tests.examples.matrix

A cell names a program; the test of that name fails if the program does not show it.
"""

from tests.examples.programs import BY_HAND, CLIENTS, COLUMNS, LITELLM, PROGRAMS

_ALL = (*PROGRAMS, *CLIENTS)

NOT_APPLICABLE = {
    ("openai", "agent"): "¹",
    ("LangGraph", "tools"): "as LangChain",
    ("langchain-anthropic", "agent"): "as LangChain",
    **{(source, "agent"): "¹" for source in (LITELLM, BY_HAND, "anthropic", "google-genai")},
    **{(s, "token ids"): "²" for s in ("anthropic", "langchain-anthropic", "google-genai")},
}
"""Cells without a program, and what stands there instead."""


def cell(source: str, column: str) -> str:
    """The first program that proves it, as a link; a dash if there is none."""
    names = [p.name for p in _ALL if p.source == source and column in p.shows]
    if not names:
        return NOT_APPLICABLE.get((source, column), "–")
    return f"[✓](examples/{names[0]}.py)"


def table() -> str:
    """The whole matrix in Markdown."""
    sources = dict.fromkeys(program.source for program in _ALL)
    rows = [("source", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
    rows += [(source, *(cell(source, column) for column in COLUMNS)) for source in sources]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201

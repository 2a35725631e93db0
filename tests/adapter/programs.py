"""A strategy for what agents really do: several at once, nested, retried, judged and told twice.

``forests.py`` draws spans that no program would make; here a program is drawn, in the language of
``forest.py``: so calls overlap, children outlive parents, and links name what was there.
"""

from hypothesis import strategies as st
from tests.adapter.forest import draw

from lightning_otel.types import Span

ACTS = (
    *("agent", "chain", "tool", "call", "call", "open call", "retry", "close", "close"),
    *("reward", "reward", "action", "seen", "twice within", "twice beside", "attempt", "rollout"),
)
LINKS = ("none", "span", "response", "gone", "unknown", "inside", "named twice")
JUDGEMENTS = (*LINKS, "steps", "steps", "ticket", "ticket")
Act = tuple[str, int, int]


def drawing_of(acts: list[Act], links: tuple[str, ...] = LINKS) -> str:
    """The program that does these acts in turn; what it does not close stays open."""
    words: list[str] = []
    opened: list[str] = []
    calls = ["gone"]
    rollout, attempt, begun = 0, 0, 0

    def add(word: str, name: str, *, is_open: bool = False) -> None:
        words.append(f"{'+' if is_open else ''}{inside}{word}")
        if is_open:
            opened.append(name)

    for number, (kind, one, two) in enumerate([("attempt", 0, 0), *acts]):
        name, others = f"n{number}", f"m{number}"
        inside = f"{opened[-1 - one % len(opened)]}/" if opened and one < 6 else ""
        # Every third call asks and answers what another one may have asked as well.
        answer = "x" if two % 3 == 0 else f"answer{number}"
        flags = f"@id=r{number}" * (two % 2) + "@exact" * (two % 4 == 0) + f"@ticket=T{two % 3}"
        talk = "<" + "|".join(["x"] * (two % 4 + 1))
        make = one % 2 if kind.startswith("twice") else 0
        call = f"@as={name}{flags}@scope=make{make}{talk}"
        if kind in ("attempt", "rollout") and begun < 15:
            begun += 1
            rollout, attempt = (rollout + 1, 1) if kind == "rollout" else (rollout, attempt + 1)
            ids = f"rollout=rollout-{rollout},attempt={attempt},trace={begun:x},process=p{begun}"
            words.append(f"#{ids},tick={1000 * begun}")
            opened, calls = [], ["gone"]
        elif kind == "agent":
            add(f"agent{two % 3}@as={name}@lightning.task=t{two % 2}[", name, is_open=True)
        elif kind == "chain":
            add(f"chain@as={name}@ticket=T{two % 3}(", name, is_open=True)
        elif kind == "tool":
            words.append(f"+{inside}tool@as={name}( -{name}")
        elif kind in ("call", "open call", "retry"):
            if kind == "retry":
                words.append(f"{inside}lost@error@scope=make0{talk}")
            add(f"{answer}{call}", name, is_open=kind == "open call")
            calls.append(name)
        elif kind == "close" and opened:
            words.append(f"-{opened.pop(-1 - one % len(opened))}")
        elif kind in ("action", "seen"):
            words.append(f"{inside}{'do' if kind == 'action' else 'see'}:{kind}")
        elif kind.startswith("twice"):
            # Two instrumentors' records of one request.
            above = f"{name}/" if kind == "twice within" else inside
            other = f"@as={others}{flags}@scope=make{1 - make}{talk}"
            words.append(f"+{inside}{answer}{call} +{above}{answer}{other} -{others} -{name}")
        elif kind == "reward":
            link, target = links[one % len(links)], calls[two % len(calls)]
            above = f"{target}/" if link == "inside" and target != "gone" else inside
            value = f"name{two % 2}={number}" + f",second={number}.5" * (link == "named twice")
            ends = {
                "span": f"@span={target}",
                "response": f"@id=r{target[1:]}",
                "gone": "@span=gone",
                "unknown": "@session=s",
                "ticket": f"@ticket=T{two % 4}",
            }
            numbers = f":{number},-,{two}" if link == "steps" else value
            words.append(f"{above}!{numbers}{ends.get(link, '')}")
    return " ".join(words)


def spans_drawn(drawing: str) -> list[Span]:
    return draw(drawing).spans


_acts = st.tuples(st.sampled_from(ACTS), st.integers(0, 7), st.integers(0, 7))
programs = st.lists(_acts, max_size=30).map(drawing_of).map(spans_drawn)
"""Spans of programs: several agents, attempts and rollouts, each span with an id of its own."""

_judged = st.tuples(st.sampled_from(ACTS), st.integers(0, 10), st.integers(0, 7))
judged_programs = (
    st.lists(_judged, max_size=30).map(lambda acts: drawing_of(acts, JUDGEMENTS)).map(spans_drawn)
)
"""The same, with rewards that link by attributes, and with a number for each step."""

"""Token ids of calls that plainly go straight on: read and checked, a few at a time, none kept."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from lightning_otel.adapter import facts
from lightning_otel.adapter.exactness import Tally
from lightning_otel.store.gist import TOKENS
from lightning_otel.store.layout import Layout
from lightning_otel.store.reader import Reader

if TYPE_CHECKING:
    pass

FETCH: Final = 2048
_FEW: Final = f"""
CREATE OR REPLACE TABLE few AS
SELECT chosen.rowid AS spot, said.number, chosen.trace_id, chosen.span_id, chosen.start_ns,
  chosen.output_tokens, call_facts.place
FROM chosen JOIN said ON said.spot = chosen.rowid
  JOIN (FROM judged WHERE is_plain) AS judged ON judged.number = said.number
  JOIN call_facts ON call_facts.agent = said.agent AND call_facts.facts = said.facts
WHERE gist_kind & {TOKENS} > 0"""
_READ: Final = """
SELECT spot, place, few.output_tokens, prompt_token_ids, response_token_ids, response_logprobs
FROM spans JOIN few ON few.trace_id = spans.trace_id AND few.span_id = spans.span_id
  AND few.start_ns = spans.start_ns
WHERE spans.start_ns BETWEEN ? AND ?"""


@contextlib.contextmanager
def flowing(con: Reader) -> Iterator[None]:
    """Within, spans flow past a few rows that are held.

    Else DuckDB may hold the spans, bodies and all, and look up each row in them.
    """
    con.execute("SET disabled_optimizers = 'build_side_probe_side'")
    try:
        yield
    finally:
        con.execute("RESET disabled_optimizers")


def check_tokens(con: Reader, layout: Layout, calls: Sequence[facts.CallFacts]) -> Tally:
    """Make the table ``tokens``: of each call that has some, whether they are exact, or why not.

    It is empty if one cannot be read in the memory allowed, or is gone.

    Args:
        con: A connection with the tables of :class:`plain.Plain`.
        layout: The store's paths.
        calls: What calls say, by their place in ``call_facts``.

    Returns:
        The tally of the calls in the table.
    """
    con.execute("CREATE OR REPLACE TABLE tokens (spot BIGINT, capture VARCHAR, inexact VARCHAR)")
    con.execute(_FEW)
    ((few, low, high),) = con.execute(
        "SELECT count(*), min(start_ns), max(start_ns) FROM few"
    ).fetchall()
    made = con.answered(lambda: _read(con, calls, (low, high))) if few else []
    if len(made) != few:
        made = []
    spots, captures, reasons = ([each[at] for each in made] for at in range(3))
    con.execute(
        "INSERT INTO tokens SELECT unnest(?::BIGINT[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[])",
        [spots, captures, reasons],
    )
    return Tally(
        captures.count("exact"),
        dict(Counter(each[2] for each in made if each[1] != "exact")),
        dict(Counter(note for each in made for note in each[3])),
    )


def _read(
    con: Reader, calls: Sequence[facts.CallFacts], times: tuple[int, int]
) -> list[tuple[int, str, str, Sequence[str]]]:
    import duckdb

    found: list[tuple[int, str, str, Sequence[str]]] = []
    cursor = con.cursor()
    with flowing(con):
        try:
            cursor.execute(_READ, times)
            while rows := cursor.fetchmany(FETCH):
                for spot, place, output_tokens, *texts in rows:
                    found.append((spot, *facts.token_facts(texts, calls[place], output_tokens)))
        except duckdb.OutOfMemoryException:
            return []
    return found

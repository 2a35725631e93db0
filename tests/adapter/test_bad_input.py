"""Bad input: a result for everything sound, a reason for everything else, and no exception."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
from tests.adapter.bad_input import CASES, REASONS, asking, changed
from tests.adapter.forest import draw, steps_of
from tests.adapter.forests import ODD

from lightning_otel import Store, adapter
from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import Credit, Dropped, Report, Span, Transition
from lightning_otel.types import conventions as c


class Kept(NamedTuple):
    """What came out of a pass over some spans."""

    steps: list[Transition]
    dropped: list[Dropped]
    report: Report


def adapted(spans: Iterable[Span], rule: Credit = "previous") -> Kept:
    found = TripletAdapter(rule).explain(spans)
    return Kept(steps_of(found), list(found.report.dropped), found.report)


def adds_up(report: Report) -> bool:
    """Whether nothing is counted twice or not at all."""
    nouns = Counter(each.noun for each in report.dropped)
    return (
        report.calls == report.transitions + nouns["call"]
        and report.rewards == report.rewards_placed + nouns["reward"]
    )


def every_span() -> list[Span]:
    return [span for case in CASES.values() for span in case.spans]


@pytest.fixture(scope="module")
def together() -> Kept:
    """All cases in one pass of the adapter."""
    return adapted(every_span())


@pytest.fixture(scope="module")
def bad_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store on disk with all cases: of each some spans settled, the others in a live segment."""
    store = Store(tmp_path_factory.mktemp("bad") / "traces.duckdb")
    store.add(every_span()[::2])
    store.writer().seal()
    store.settle()
    store.add(every_span()[1::2])
    yield store
    store.writer().seal()


@pytest.fixture(scope="module")
def stored(bad_store: Store) -> Kept:
    """All cases as the store gives them back."""
    table = bad_store.transitions(include_incomplete=True)
    report = table.report()
    return Kept(list(table), list(report.dropped), report)


@pytest.mark.parametrize("how", ["together", "stored"])
@pytest.mark.parametrize("name", CASES)
def test_a_case_comes_to_its_outcome(name: str, how: str, request: Any) -> None:
    """Among all others, and written, half of it settled, and read back."""
    case = CASES[name]

    found: Kept = request.getfixturevalue(how)

    own = {case.names.get((s.trace_id, s.span_id)): s.reward for s in found.steps}
    reasons = {text: short for short, text in REASONS.items()}
    lost = Counter(
        f"{case.names[each.trace_id, each.span_id]} {reasons.get(each.reason, each.reason)}"
        for each in found.dropped
        if (each.trace_id, each.span_id) in case.names
    )
    told = [
        f"{n}={'-' if own[n] is None else format(own[n], 'g')}" for n in sorted(own.keys() - {None})
    ]
    words = " ".join([*told, *(["! " + ", ".join(sorted(lost))] if lost else [])])
    # A store keeps what JSON has no number for as text, which is no number.
    is_text = how == "stored" and case.outcome.endswith("infinite")
    assert words == (case.outcome.replace("infinite", "no number") if is_text else case.outcome)
    assert max(lost.values(), default=1) == 1
    assert adds_up(found.report)


def test_all_cases_add_up(together: Kept, stored: Kept, bad_store: Store) -> None:
    """The funnels of the adapter and of the store count every call and reward once."""
    report = bad_store.report(include_incomplete=True)
    assert replace(report, dropped=()) == replace(stored.report, dropped=())
    assert Counter(report.dropped) == Counter(stored.report.dropped)
    assert stored.report.spans == together.report.spans


# --- the ways out --------------------------------------------------------------------------------


@pytest.mark.parametrize("noun", ["spans", "triplets"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_exports_take_all_cases(
    bad_store: Store, stored: Kept, tmp_path: Path, noun: str, kind: str
) -> None:
    """``export`` writes every span and every transition, and says why others are left out."""
    out = tmp_path / f"out.{kind}"
    options = ["--incomplete"] if noun == "triplets" else []

    # In a process of its own: a group run without its parent keeps that for the tests after it.
    words = ["-m", "lightning_otel", "export", noun, "-o", str(out), "--store", bad_store.name]
    done = subprocess.run(
        [sys.executable, *words, *options], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    reader = "read_parquet" if kind == "parquet" else "read_json_objects"
    with duckdb.connect() as con:
        (count,) = con.sql(f"SELECT count(*) FROM {reader}('{out}')").fetchall()[0]
    assert count == (stored.report.spans if noun == "spans" else stored.report.transitions)
    if noun == "triplets":
        for reason, number in stored.report.reasons().items():
            assert f"left out: {number} × {reason}" in done.stderr


# --- size ----------------------------------------------------------------------------------------


def test_a_message_of_10_megabytes(tmp_path: Path) -> None:
    """The adapter takes it whole; a store, which cuts it, says so, and keeps the others."""
    one, other = draw("a b").spans
    spans = [one, changed(other, asking({"type": "text", "content": "x" * (10 << 20)}))]
    store = Store(tmp_path / "traces.duckdb")
    store.add(spans)
    store.writer().seal()

    table = store.transitions()

    assert len(adapted(spans).steps) == 2
    assert [step.span_id for step in table] == [one.span_id]
    assert [(each.span_id, each.reason) for each in table.report().dropped] == [
        (other.span_id, "cut: the messages were too large to keep whole")
    ]


# --- attributes of any type ----------------------------------------------------------------------

OWN_KEYS = sorted(
    {
        *(value for name, value in vars(c).items() if name.isupper() and isinstance(value, str)),
        *(f"{c.REWARD_PREFIX}.{index}.{field}" for index in (0, 1) for field in ("name", "value")),
        *(
            f"{c.LINK_PREFIX}.{index}.{field}_match"
            for index in (0, 1)
            for field in ("key", "value")
        ),
        *(f"{c.TAG_PREFIX}.0",),
    }
)
READERS = Path(adapter.__file__).parent / "readers"
FOREIGN_KEYS = sorted(
    {
        found
        for file in READERS.glob("*.py")
        for found in re.findall(r'"([a-z_]+(?:\.[a-z_0-9]+)+)"', file.read_text(encoding="utf-8"))
    }
)
FOREIGN_CALLS: tuple[dict[str, Any], ...] = (
    {"openinference.span.kind": "LLM", "output.value": "{}"},
    {"agentops.span.kind": "llm", "gen_ai.prompt.0.role": "user", "gen_ai.system": "x"},
    {"llm.request.type": "chat", "gen_ai.completion.0.content": "hi"},
    {"traceloop.span.kind": "tool"},
    {"llm.openai.choices": "[{'message': {'role': 'assistant', 'content': 'hi'}}]"},
    {"tool.call.type": "function", "prompt_token_ids": [1], "response_token_ids": [2]},
)


NO_OUTPUT = "no output: the model answered nothing"
UNREADABLE = "unreadable: the messages are not the JSON they should be"


def expected(key: str, value: object) -> str | None:
    """The reason that a call with an attribute of a wrong type is lost for; None if it is not."""
    if key == c.ABANDONED and value:
        return "abandoned: the program left the stream before its end"
    if key == c.TRACK_ONLY and isinstance(value, (str, list)) and value != "":
        return "not tracked: the agent is not in track_only"
    if key not in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        return None
    if value is None:
        return None if key == c.INPUT_MESSAGES else NO_OUTPUT
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return UNREADABLE
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        return UNREADABLE
    has_parts = any(item.get("parts") for item in messages)
    return None if key == c.INPUT_MESSAGES or has_parts else NO_OUTPUT


def draw_apart(name: str, drawing: str, changes: dict[str, Any]) -> list[Span]:
    """The spans of a rollout of that name, each of them changed."""
    spans = draw(drawing, rollout_id=name, process=f"{name} ").spans
    return [replace(changed(span, changes), trace_id=name) for span in spans]


@pytest.mark.parametrize("key", OWN_KEYS)
def test_an_attribute_of_any_type(key: str) -> None:
    """A wrong value under any key of ours costs its own span at most, and then with its reason."""
    spans, lost = draw("a !1").spans, {}
    for number, value in enumerate(ODD):
        spans += draw_apart(f"odd{number}", "b !1 do:act", {key: value})
        lost[f"odd{number}"] = expected(key, value)

    found = adapted(spans)

    kept = {step.trace_id: step.reward for step in found.steps}
    assert kept["a" * 32] == 1.0
    assert adds_up(found.report)
    assert found.report.spans == len(spans)
    if key != c.OPERATION:
        reasons = {each.trace_id: each.reason for each in found.dropped if each.noun == "call"}
        assert reasons == {k: reason for k, reason in lost.items() if reason}
        assert {k for k, reason in lost.items() if not reason} <= set(kept)


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_an_attribute_of_any_type_in_other_conventions(key: str) -> None:
    """A wrong value under a key of any reader's convention keeps no other span from being read."""
    spans = draw("a !1").spans
    for index, base in enumerate(FOREIGN_CALLS):
        for number, value in enumerate(ODD):
            spans += draw_apart(f"odd{index}.{number}", "b( )", {**base, key: value})

    found = adapted(spans)

    assert {s.reward for s in found.steps if s.trace_id == "a" * 32} == {1.0}
    assert adds_up(found.report)
    assert found.report.spans == len(spans)


def test_attributes_of_any_type_through_a_store(tmp_path: Path) -> None:
    """A wrong value under any key is stored, and keeps no transition from being read."""
    spans = draw("a !1").spans
    for index, key in enumerate(OWN_KEYS):
        for number, value in list(enumerate(ODD))[index % 9 :: 9]:  # every value under some keys
            spans += draw_apart(f"odd{index}.{number}", "b", {key: value})
    store = Store(tmp_path / "traces.duckdb")
    store.add(spans)
    store.writer().seal()
    store.settle()

    table = store.transitions()
    rows = list(table.dicts())

    assert {row["reward"] for row in rows if row["trace_id"] == "a" * 32} == {1.0}
    assert adds_up(table.report())
    assert table.report().spans == len(spans)
    assert len(rows) == table.report().transitions

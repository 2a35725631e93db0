"""Bad input: a result for everything sound, a reason for everything else, and no exception."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
from tests.adapter.bad_input import BEGAN_NS, CASES, Case, Scene
from tests.adapter.forest import SECOND, Forest, call_attributes, said
from tests.adapter.forests import ODD

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, calls, rewards
from lightning_otel.cli.export import parsed
from lightning_otel.store.writer import writer_if_any
from lightning_otel.types import Credit, Dropped, Report, Span, Transition

DEPTH = int(os.environ.get("LIGHTNING_TEST_DEPTH", "2000"))
"""Of chains of spans; ``test_adapter.py`` always has one of 100,000."""
PROGRAM = (sys.executable, "-m", "lightning_otel")
RULES: tuple[Credit, ...] = ("next", "last", "sibling", "discounted")

# A store keeps what JSON has no number for as text, which is no number.
KEPT_OTHERWISE = {rewards.NOT_FINITE: rewards.NOT_A_NUMBER}


class Kept(NamedTuple):
    """What came out of a pass over all the cases, by span id."""

    steps: dict[str, Transition]
    dropped: list[Dropped]
    report: Report


def of(case: Case, found: Kept) -> tuple[dict[str, float | None], dict[str, str]]:
    """The transitions of a case with their rewards, and its reasons, each said once."""
    own = f"{case.name}/"
    kept = {k: step.reward for k, step in found.steps.items() if step.trace_id.startswith(own)}
    lost = [each for each in found.dropped if each.trace_id.startswith(own)]
    assert len({each.span_id for each in lost}) == len(lost)
    return kept, {each.span_id: each.reason for each in lost}


def adapted(spans: Iterable[Span], rule: Credit = "next") -> Kept:
    """What the adapter makes of spans."""
    found = TripletAdapter(rule).explain(spans)
    steps = {step.span_id: step for path in found.trajectories for step in path.transitions}
    return Kept(steps, list(found.report.dropped), found.report)


def adds_up(report: Report) -> bool:
    """Whether nothing is counted twice or not at all."""
    nouns = Counter(each.noun for each in report.dropped)
    return (
        report.calls == report.transitions + nouns["call"]
        and report.rewards == report.rewards_placed + nouns["reward"]
    )


@pytest.fixture(scope="module")
def together() -> Kept:
    """All cases in one pass of the adapter."""
    return adapted(span for case in CASES.values() for span in case.spans)


@pytest.fixture(scope="module")
def bad_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store on disk with all cases: of each some spans settled, the others in a live segment."""
    store = Store(tmp_path_factory.mktemp("bad") / "traces.duckdb")
    store.add(span for case in CASES.values() for span in case.spans[::2])
    store.writer().seal()
    store.settle()
    store.add(span for case in CASES.values() for span in case.spans[1::2])
    yield store
    assert store.layout is not None
    writer = writer_if_any(store.layout)
    assert writer is not None
    writer.seal()


@pytest.fixture(scope="module")
def stored(bad_store: Store) -> Kept:
    """All cases as the store gives them back."""
    table = bad_store.transitions(include_incomplete=True)
    steps = {step.span_id: step for step in table}
    report = table.report()
    return Kept(steps, list(report.dropped), report)


@pytest.mark.parametrize("name", CASES)
def test_a_case_alone(name: str) -> None:
    """What is sound becomes transitions with their rewards, everything else has its reason."""
    case = CASES[name]

    found = adapted(case.spans)

    assert of(case, found) == (case.kept, case.lost)
    assert adds_up(found.report)


@pytest.mark.parametrize("name", CASES)
def test_a_case_among_all_others(name: str, together: Kept) -> None:
    """No case changes what becomes of another one in the same batch."""
    case = CASES[name]

    assert of(case, together) == (case.kept, case.lost)


@pytest.mark.parametrize("name", CASES)
def test_a_case_through_a_store(name: str, stored: Kept) -> None:
    """Written, half of it settled, and read back, a case comes to the same."""
    case = CASES[name]

    lost = {key: KEPT_OTHERWISE.get(reason, reason) for key, reason in case.lost.items()}
    assert of(case, stored) == (case.kept, lost)


def test_all_cases_add_up(together: Kept, stored: Kept, bad_store: Store) -> None:
    """The funnels of the adapter and of the store count every call and reward once."""
    assert adds_up(together.report)
    assert adds_up(stored.report)
    assert bad_store.report(include_incomplete=True) == stored.report
    assert stored.report.spans == together.report.spans


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_raises(rule: Credit) -> None:
    """Whatever the rule of credit, all cases are adapted and add up."""
    found = adapted((span for case in CASES.values() for span in case.spans), rule)

    assert set(found.steps) == {key for case in CASES.values() for key in case.kept}
    assert adds_up(found.report)


# --- the ways out --------------------------------------------------------------------------------


def test_transitions_become_rows_lines_and_files(
    bad_store: Store, stored: Kept, tmp_path: Path
) -> None:
    """No row keeps the others from any form: JSON of every line, Arrow, and a Parquet file."""
    table = bad_store.transitions(include_incomplete=True)

    rows = list(table.dicts())
    table.to_parquet(tmp_path / "rows.parquet")

    assert {row["span_id"] for row in rows} == set(stored.steps)
    for row in map(parsed, rows):
        json.dumps(row["action"], allow_nan=False)
        json.dumps(row["observation"], allow_nan=False)
    with duckdb.connect() as con:
        (count,) = con.sql(f"SELECT count(*) FROM '{tmp_path / 'rows.parquet'}'").fetchall()[0]
    assert count == len(rows)


@pytest.mark.parametrize("noun", ["spans", "triplets"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_exports_take_all_cases(
    bad_store: Store, stored: Kept, tmp_path: Path, noun: str, kind: str
) -> None:
    """``export`` writes every span and every transition, and says why others are left out."""
    out = tmp_path / f"out.{kind}"
    options = ["--incomplete"] if noun == "triplets" else []

    # In a process of its own: a group run without its parent keeps that for the tests after it.
    done = subprocess.run(
        [*PROGRAM, "export", noun, "-o", str(out), "--store", bad_store.name, *options],
        capture_output=True,
        text=True,
        timeout=60,
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


def chain(depth: int, every: int) -> list[Span]:
    """Spans nested so deep, among them calls, each followed by a reward within what is around."""
    forest = Forest(rollout_id="chain", trace_id="c" * 32)
    parent = None
    opened = []
    for level in range(depth):
        parent = (
            forest.open_call(f"answer {level}", parent=parent)
            if level % every == 0
            else forest.open(parent=parent)
        )
        opened.append(parent)
    forest.call("deepest", parent=parent)
    forest.reward(1.0, parent=parent)
    forest.close(*reversed(opened))
    return forest.spans


def test_a_deep_chain_of_calls_and_spans() -> None:
    """Of nested spans every hundredth is a call: all are found, and the reward at the bottom."""
    spans = chain(DEPTH, 100)

    found = adapted(spans)

    assert len(found.steps) == DEPTH // 100 + 1
    assert (found.report.rewards_placed, adds_up(found.report)) == (1, True)


def test_a_deep_chain_through_a_store(tmp_path: Path) -> None:
    """A chain deeper than any stack is written, read back and adapted."""
    store = Store(tmp_path / "traces.duckdb")
    store.add(chain(DEPTH, 100))
    store.writer().seal()

    report = store.report()

    assert (report.spans, report.transitions) == (DEPTH + 2, DEPTH // 100 + 1)
    assert report.rewards_placed == 1


def test_a_message_of_10_megabytes(tmp_path: Path) -> None:
    """The adapter takes it whole; a store, which cuts it, says so, and keeps the others."""
    scene = Scene("huge")
    scene.call("a")
    scene.call("b", {c.INPUT_MESSAGES: json.dumps([said("user", "x" * (10 << 20))])})
    store = Store(tmp_path / "traces.duckdb")
    store.add(scene.spans)
    store.writer().seal()

    table = store.transitions()

    assert set(adapted(scene.spans).steps) == {"huge:a", "huge:b"}
    assert [step.span_id for step in table] == ["huge:a"]
    assert [(each.span_id, each.reason) for each in table.report().dropped] == [
        ("huge:b", calls.CUT)
    ]


# --- ids -----------------------------------------------------------------------------------------


def test_a_store_counts_spans_with_the_ids_of_others(tmp_path: Path) -> None:
    """Of spans that share their ids one is stored, and the others are rejected with a reason."""
    store = Store(tmp_path / "traces.duckdb")
    store.add(
        Span(
            "0" * 32,
            "0" * 16,
            None,
            "chat",
            BEGAN_NS + number * SECOND,
            BEGAN_NS + number * SECOND + 1,
            attributes=call_attributes("go on", f"answer {number}"),
        )
        for number in range(3)
    )
    store.writer().seal()

    assert store.report().transitions == 1
    assert store.accounting().rejected == {"conflict": 2}


def test_a_span_given_twice_is_no_other_span() -> None:
    """The same span once more, or its start without its end, is neither counted nor reported."""
    scene = Scene("twice")
    scene.call("a")
    scene.reward("r")
    begun = [
        Span(s.trace_id, s.span_id, s.parent_span_id, s.name, s.start_ns, None) for s in scene.spans
    ]

    found = TripletAdapter().explain([*scene.spans, *begun, *scene.spans])

    assert found == TripletAdapter().explain(scene.spans)
    assert found.report.dropped == ()


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
READERS = Path(calls.__file__).parent / "readers"
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


def expected(key: str, value: object) -> str | None:
    """Why a call with an attribute of a wrong type is lost; None if it is not."""
    if key == c.ABANDONED and value:
        return calls.ABANDONED
    if key == c.TRACK_ONLY and isinstance(value, (str, list)) and value != "":
        return calls.NOT_TRACKED
    if key not in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        return None
    if value is None:
        return None if key == c.INPUT_MESSAGES else calls.NO_OUTPUT
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return calls.UNREADABLE
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        return calls.UNREADABLE
    has_parts = any(item.get("parts") for item in messages)
    return None if key == c.INPUT_MESSAGES or has_parts else calls.NO_OUTPUT


@pytest.mark.parametrize("key", OWN_KEYS)
def test_an_attribute_of_any_type(key: str) -> None:
    """A wrong value under any key of ours costs its own span at most, and then with its reason."""
    scene = Scene("sound")
    scene.call("a")
    scene.reward("r")
    spans, lost = list(scene.spans), {}
    for number, value in enumerate(ODD):
        wrong = Scene(f"odd {number}")
        wrong.call("c", {key: value})
        wrong.reward("r", changes={key: value})
        wrong.add("m", {c.OBJECT_LITERAL: "act", key: value}, name=c.SPAN_ACTION)
        spans += wrong.spans
        lost[wrong.id("c")] = expected(key, value)

    found = adapted(spans)

    assert found.steps["sound:a"].reward == 1.0
    assert adds_up(found.report)
    assert found.report.spans == len(spans)
    if key != c.OPERATION:
        reasons = {each.span_id: each.reason for each in found.dropped if each.noun == "call"}
        assert reasons == {k: reason for k, reason in lost.items() if reason}
        assert {k for k, reason in lost.items() if not reason} <= set(found.steps)


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_an_attribute_of_any_type_in_other_conventions(key: str) -> None:
    """A wrong value under a key of any reader's convention keeps no other span from being read."""
    scene = Scene("sound")
    scene.call("a")
    scene.reward("r")
    spans = list(scene.spans)
    for index, base in enumerate(FOREIGN_CALLS):
        for number, value in enumerate(ODD):
            scene = Scene(f"odd {index} {number}")
            scene.add("c", {**base, key: value})
            spans += scene.spans

    found = adapted(spans)

    assert found.steps["sound:a"].reward == 1.0
    assert adds_up(found.report)
    assert found.report.spans == len(spans)


def test_attributes_of_any_type_through_a_store(tmp_path: Path) -> None:
    """A wrong value under any key is stored, and keeps no transition from being read."""
    scene = Scene("sound")
    scene.call("a")
    scene.reward("r")
    spans = list(scene.spans)
    for index, key in enumerate(OWN_KEYS):
        for number, value in list(enumerate(ODD))[index % 9 :: 9]:  # every value under some keys
            wrong = Scene(f"{index} {number}")
            wrong.call("c", {key: value})
            spans += wrong.spans
    store = Store(tmp_path / "traces.duckdb")
    store.add(spans)
    store.writer().seal()
    store.settle()

    table = store.transitions()
    rows = {row["span_id"]: row["reward"] for row in table.dicts()}

    assert rows["sound:a"] == 1.0
    assert adds_up(table.report())
    assert table.report().spans == len(spans)
    assert len(rows) == table.report().transitions

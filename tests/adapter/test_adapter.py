"""The adapter as a whole: its settings, its funnel, duplicates, and what it may not do."""

import subprocess
import sys
from typing import Any

import pytest
from tests.adapter.forest import Forest, paths, token_attributes

from lightning_otel import conventions as c
from lightning_otel.adapter import DUPLICATE, TripletAdapter
from lightning_otel.errors import ConfigError
from lightning_otel.types import Dropped, Report


def test_adapter_refuses_an_unknown_rule() -> None:
    """A rule that does not exist is refused by name, with those that do."""
    with pytest.raises(ConfigError, match=r"'first'.*previous, last, sibling, discounted"):
        TripletAdapter("first")  # type: ignore[arg-type]  # what a user may mistype


def test_the_old_name_of_the_rule_previous_is_understood() -> None:
    """Both names are one rule."""
    assert TripletAdapter("next") == TripletAdapter("previous") == TripletAdapter()


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_adapter_refuses_a_discount_outside_0_and_1(gamma: float) -> None:
    """A discount that would make returns grow without bound is refused."""
    with pytest.raises(ConfigError, match="between 0 and 1"):
        TripletAdapter("discounted", gamma)


def test_adapt_makes_nothing_of_nothing() -> None:
    """No spans, no trajectories, an empty report."""
    assert TripletAdapter().adapt([]) == []
    assert TripletAdapter().explain([]).report == Report()


def test_adapt_reads_its_spans_once() -> None:
    """Any iterable will do, also one that can be read only once."""
    forest = Forest()
    forest.call("answer")

    assert paths(TripletAdapter().adapt(iter(forest.spans))) == [["answer"]]


# --- duplicates ----------------------------------------------------------------------------------


def test_overlapping_calls_with_one_response_id_are_one() -> None:
    """A request recorded by two instrumentors is one transition, the outer one of equals."""
    forest = Forest()
    outer = forest.open_call("answer", response_id="chatcmpl-1")
    inner = forest.call("answer", response_id="chatcmpl-1", parent=outer)
    forest.close(outer)

    found = TripletAdapter().explain(forest.spans)

    assert [step.span_id for step in found.trajectories[0].transitions] == [outer]
    assert found.report.dropped == (Dropped(inner, forest.trace_id, "call", DUPLICATE),)
    assert (found.report.calls, found.report.transitions) == (2, 1)


@pytest.mark.parametrize("exact", [0, 1, 2])
def test_of_duplicates_the_one_with_token_ids_stays(exact: int) -> None:
    """Of three records of one request the one that holds the server's ids is kept."""
    forest = Forest()
    parent = None
    for level in range(3):
        parent = forest.open_call("answer", response_id="chatcmpl-1", parent=parent)
        if level == exact:
            forest._made[parent].attributes.update(token_attributes([1], [2]))
            wanted = parent
    forest.close(*reversed([span.span_id for span in forest.spans]))

    found = TripletAdapter().explain(forest.spans)

    assert [step.span_id for path in found.trajectories for step in path.transitions] == [wanted]
    assert found.report.exact == 1
    assert found.report.reasons() == {DUPLICATE: 2}


def test_records_within_one_request_are_its_duplicates() -> None:
    """Two records in turn, both within a third of the same response, are one with it."""
    forest = Forest()
    outer = forest.open_call("answer", response_id="chatcmpl-1")
    for _ in range(2):
        forest.call("answer", response_id="chatcmpl-1", parent=outer)
    forest.close(outer)

    found = TripletAdapter().explain(forest.spans)

    assert [step.span_id for step in found.trajectories[0].transitions] == [outer]
    assert found.report.reasons() == {DUPLICATE: 2}


def test_calls_in_turn_with_one_response_id_all_stay() -> None:
    """A server that repeats its ids answers one call after the other: none is a duplicate."""
    forest = Forest()
    for index in range(3):
        forest.call(f"answer {index}", response_id="chatcmpl-same")

    found = TripletAdapter().explain(forest.spans)

    assert paths(found.trajectories) == [["answer 0", "answer 1", "answer 2"]]
    assert found.report.dropped == ()


def test_overlapping_calls_without_a_response_id_all_stay() -> None:
    """Without an id nothing says that two concurrent calls are one."""
    forest = Forest()
    forest.close(*[forest.open_call(f"answer {index}") for index in range(3)])

    assert TripletAdapter().explain(forest.spans).report.transitions == 3


def test_a_response_id_that_is_no_text_makes_no_duplicates() -> None:
    """Ids of another type are as good as none, and break nothing."""
    forest = Forest()
    calls = [forest.open_call(f"answer {index}") for index in range(2)]
    for call in calls:
        forest._made[call].attributes[c.RESPONSE_ID] = ["a", "list"]
    forest.close(*calls)

    assert TripletAdapter().explain(forest.spans).report.transitions == 2


# --- the funnel ----------------------------------------------------------------------------------


def test_report_adds_up() -> None:
    """Calls are transitions or dropped, rewards are placed or dropped, nothing is counted twice."""
    forest = Forest()
    with forest.inside("root"):
        forest.make("chat", {**token_call("exact"), **token_attributes([1], [2])})
        forest.reward(1.0)
        forest.reward(2.0)
        forest.call("text")
        forest.call("failed", status="ERROR")
        forest.make("embedding", {c.OPERATION: c.EMBEDDINGS})
        forest.make(c.SPAN_ANNOTATION, {c.REWARD_VALUE: "NaN"})
    with forest.agent("hand"):
        forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: "act"})

    report = TripletAdapter().explain(forest.spans).report

    nouns = [each.noun for each in report.dropped]
    assert (report.spans, report.rollouts) == (10, 1)
    assert (report.calls, report.transitions, nouns.count("call")) == (5, 3, 2)
    assert (report.rewards, report.rewards_placed, nouns.count("reward")) == (3, 1, 2)
    assert (report.exact, report.rewarded) == (1, 1)


def token_call(answer: str) -> dict[str, Any]:
    """Attributes of a call that answers."""
    forest = Forest()
    forest.call(answer)
    return dict(forest.spans[0].attributes)


def test_report_counts_attempts_of_one_rollout_as_one() -> None:
    """Two attempts are one rollout, and a shared step one transition."""
    first, second = Forest(attempt_id="1"), Forest(attempt_id="2", trace_id="b" * 32)
    for forest in (first, second):
        forest.call("plan")
        forest.close(*[forest.open_call(f"part {index}") for index in range(2)])

    report = TripletAdapter().explain([*first.spans, *second.spans]).report

    assert (report.rollouts, report.calls, report.transitions) == (1, 6, 6)


def test_report_total_adds_every_field() -> None:
    """Reports of disjoint parts add up, number by number, with all that was dropped."""
    gone = Dropped("s", "t", "call", "why")
    one = Report(1, 2, 3, 4, 5, 6, 7, 8, (gone,))

    assert one + one == Report(2, 4, 6, 8, 10, 12, 14, 16, (gone, gone))
    assert Report.total([]) == Report()
    assert Report.total([one, one, one]).reasons() == {"why": 3}


# --- what it may not do --------------------------------------------------------------------------


def test_adapter_imports_nothing_but_the_standard_library_and_a_parser() -> None:
    """The adapter is pure: it loads a JSON parser, and nothing that opens files or connections."""
    script = """
import sys
before = set(sys.modules)
import lightning_otel.adapter
from lightning_otel.types import Span
lightning_otel.adapter.TripletAdapter().adapt([Span("t", "s", None, "x", 1, 2)])
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
foreign = loaded - set(sys.stdlib_module_names) - {"lightning_otel", "orjson"}
assert not foreign, foreign
assert not loaded & {"socket", "sqlite3", "subprocess", "random", "secrets"}, loaded
"""

    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, timeout=30)

    assert done.returncode == 0, done.stderr.decode()


def test_adapter_takes_a_hundred_thousand_nested_spans() -> None:
    """A chain far deeper than any stack, with a call at its end, is adapted."""
    forest = Forest()
    parent = None
    for _ in range(100_000):
        parent = forest.open(parent=parent)
    forest.call("deep", parent=parent)
    forest.reward(1.0)

    found = TripletAdapter().explain(forest.spans)

    assert paths(found.trajectories) == [["deep"]]
    assert found.report.rewards_placed == 1

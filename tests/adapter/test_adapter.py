"""The adapter as a whole: its settings, its funnel, and what it may not do."""

import subprocess
import sys

import pytest
from tests.adapter.forest import Forest, draw, paths

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
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


# --- the funnel ----------------------------------------------------------------------------------


def test_report_adds_up() -> None:
    """Calls are transitions or dropped, rewards are placed or dropped, nothing is counted twice."""
    drawing = f"root( a@exact !1 !2 b d@error e@{c.OPERATION}=embeddings !NaN ) hand[ do:act ]"

    report = TripletAdapter().explain(draw(drawing).spans).report

    nouns = [each.noun for each in report.dropped]
    assert (report.spans, report.rollouts) == (10, 1)
    assert (report.calls, report.transitions, nouns.count("call")) == (5, 3, 2)
    assert (report.rewards, report.rewards_placed, nouns.count("reward")) == (3, 1, 2)
    assert (report.exact, report.rewarded) == (1, 1)


def test_report_counts_attempts_of_one_rollout_as_one() -> None:
    """Two attempts are one rollout, and a shared step one transition."""
    once = "plan +a +b -a -b"

    report = TripletAdapter().explain(draw(f"{once} #attempt=2,trace=b {once}").spans).report

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

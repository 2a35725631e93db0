"""What is said of one rollout: steps, credit, totals, cost, and what stands out."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from tests.adapter.forest import SECOND, Forest, call_attributes, said, token_attributes
from tests.test_picture import ATTACKS

from lightning_otel import Store, analyze_episode
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.messages import message, tool_call_part
from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c
from lightning_otel.views.analysis import Analysis, analyze
from lightning_otel.views.trace import make_trace


def of(forest: Forest, **options: Any) -> Analysis:
    return analyze(make_trace(forest.spans), **options)


def told(found: Analysis) -> dict[str, list[str]]:
    """What stands out, by its kind."""
    kinds: dict[str, list[str]] = {}
    for each in found.findings:
        kinds.setdefault(each.kind, []).append(each.text)
    return kinds


def usage(tokens_in: int, tokens_out: int, model: str = "m-large") -> dict[str, Any]:
    return {c.INPUT_TOKENS: tokens_in, c.OUTPUT_TOKENS: tokens_out, c.RESPONSE_MODEL: model}


def called(tool: str, **arguments: Any) -> dict[str, Any]:
    answer = message("assistant", [tool_call_part("c1", tool, arguments)])
    return {**call_attributes("go on", ""), c.OUTPUT_MESSAGES: json.dumps([answer])}


def test_steps_say_what_was_seen_done_and_earned() -> None:
    """One a call: in short, with its tokens, time and what its reward came from."""
    forest = Forest()
    with forest.agent("planner"):
        forest.tag(forest.call("first", "hello"), **token_attributes([1, 2, 3], [4, 5], [-1, -2]))
        forest.reward(0.5)
        last = forest.call("second " * 100, [said("user", "hello"), said("assistant", "first")])
    forest.reward(("correct", 1.0), span_id=last)

    found = of(forest)

    one, two = found.steps
    assert (one.label, one.observation, one.action, one.reward) == ("#0", "hello", "first", 0.5)
    assert (one.input_tokens, one.output_tokens, one.capture, one.duration_s) == (3, 2, "exact", 1)
    assert (one.credit, two.credit) == (("0.5 by previous",), ("1 by link",))
    assert len(two.action) <= 200
    assert two.action.endswith("…")
    assert [(each.name, each.value, each.steps) for each in found.rewards] == [
        ("", 0.5, ("#0",)), ("correct", 1.0, ("#1",)),
    ]  # fmt: skip
    assert (found.totals.calls, found.totals.duration_s, found.totals.model_s) == (2, 7, 2)
    assert told(found) == {
        "inexact": ["1 of 2 steps not exact: no token ids: none were recorded"],
        "uncounted": ["nothing says how many tokens 1 call took"],
    }


def test_cost_is_counted_at_the_prices_given() -> None:
    """The first pattern that fits counts; what has no price is told, and is not nought."""
    forest = Forest()
    forest.tag(forest.call("a", "one"), **usage(1000, 100))
    forest.tag(forest.call("b", "two"), **usage(10, 10, "other"))

    free = of(forest)
    found = of(forest, prices={"m-*": (2.0, 10.0), "m-large": (9.0, 9.0)})
    every = of(forest, prices={"*": (1.0, 0.0)})

    assert (free.totals.cost, free.steps[0].cost) == (None, None)
    assert found.steps[0].cost == pytest.approx(0.003)
    assert found.totals.cost == pytest.approx(0.003)
    assert told(found)["unpriced"] == ["1 call not in the cost: no price"]
    assert every.totals.cost == pytest.approx(0.00101)
    assert "unpriced" not in told(every)
    assert "cost 0.00101" in every.headline()


@pytest.mark.parametrize("pair", [(-1.0, 1.0), (float("nan"), 1.0), (1.0,), "ab", None])
def test_a_price_is_two_numbers(pair: Any) -> None:
    """Anything else is refused, with what was given."""
    with pytest.raises(ConfigError, match="the price of 'm' is"):
        of(Forest(), prices={"m": pair})


def test_an_error_is_told_where_it_began() -> None:
    """Not once more for each span around it; a failed call is in no step, and said to be."""
    forest = Forest()
    outer = forest.open("agent", status="ERROR", status_message="boom")
    inner = forest.open("tool", {c.OPERATION: c.EXECUTE_TOOL}, parent=outer)
    forest.make("search", {c.ERROR_TYPE: "Timeout"}, parent=inner, status="ERROR",
                status_message="after 3 s")  # fmt: skip
    forest.close(inner, outer)

    found = told(of(forest))

    assert found["error"] == ["search: Timeout after 3 s"]


def test_an_exception_is_told_with_its_type_and_message() -> None:
    """A tool's span may tell of it in an event alone."""
    forest = Forest()
    raised = {c.EXCEPTION_TYPE: "KeyError", c.EXCEPTION_MESSAGE: "'city'"}
    forest.make("tool", status="ERROR", events=(Event("exception", 1, raised),))

    assert told(of(forest))["error"] == ["tool: KeyError 'city'"]


def test_many_of_a_kind_are_one_finding() -> None:
    """Errors of the same words, and rewards lost for the same reason, with their number."""
    forest = Forest()
    forest.call("a")
    for number in range(300):
        forest.make("search", status="ERROR", status_message="no")
        forest.reward(float(number), span_id="f" * 16)

    found = of(forest)

    assert told(found)["error"] == ["search: no, 300 times"]
    assert [text[:28] for text in told(found)["uncredited"]] == ["300 rewards are in no step: "]
    assert len(found.findings[0].span_ids) == 300


def test_what_repeats_is_told_once() -> None:
    """The same tool with the same arguments in any order of keys, and the same words."""
    forest = Forest()
    with forest.agent("calc"):
        for attributes in (
            called("add", a=1, b=2), called("add", b=2, a=1), called("add", a=1, b=3),
        ):  # fmt: skip
            forest.make("chat", attributes)
        forest.call("I do not know")
        forest.call("I do not know")

    assert told(of(forest))["repeated"] == [
        'add({"a": 1, "b": 2}), 2 times: #0, #1',
        "“I do not know”, 2 times: #3, #4",
    ]


def test_what_is_lost_is_told_with_its_reason() -> None:
    """No reward, a reward that judges nothing, answers cut off, spans that never ended."""
    none, lost = Forest(), Forest()
    none.tag(none.call("a"), **{c.FINISH_REASONS: ["length"]})
    none.open("work")
    lost.call("a")
    lost.reward(2.0, span_id="f" * 16)

    nothing = told(analyze(make_trace([])))

    assert told(of(none))["no_reward"] == ["nobody gave it a reward"]
    assert told(of(none))["cut_off"] == ["cut off at their length: #0"]
    assert told(of(none))["incomplete"] == ["1 span never ended"]
    (uncredited,) = told(of(lost))["uncredited"]
    assert uncredited.startswith("a reward of 2.0 is in no step: its link")
    assert nothing == {
        "no_steps": ["there is no step to learn from"],
        "no_reward": ["nobody gave it a reward"],
    }


def test_a_step_that_takes_most_of_the_time_is_told() -> None:
    """Of three steps or more, and of seconds."""
    spans = [
        Span("t", f"{number:016x}", None, "chat", start * SECOND, end * SECOND,
             attributes=call_attributes(f"{number}", f"{number}"))
        for number, (start, end) in enumerate([(0, 1), (1, 2), (2, 8)])
    ]  # fmt: skip

    assert told(analyze(make_trace(spans)))["slow"] == ["#2 took 6.0 s, 75% of it all"]


@pytest.mark.parametrize(
    ("end_ns", "words"),
    [(15_200_000, "15 ms"), (1_500_000_000, "1.5 s"), (5400 * SECOND, "90 min")],
)
def test_how_long_it_took_is_said_as_people_would(end_ns: int, words: str) -> None:
    """In one unit, whatever its size."""
    span = Span("t", f"{1:016x}", None, "chat", 0, end_ns, attributes=call_attributes("a", "b"))

    assert f" · {words}, {words} of it in models" in analyze(make_trace([span])).headline()


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_nothing_in_it_moves_the_cursor(attack: str) -> None:
    """Whatever a name, message, error or reward says, each is one line of harmless text."""
    forest = Forest(rollout_id=attack)
    marked: Mapping[str, Any] = {c.ERROR_TYPE: attack, c.OPERATION_NAME: attack, c.TASK: attack}
    with forest.agent(attack):
        forest.call(attack, attack)
        forest.call(attack, attack)
        forest.make(attack, marked, status="ERROR", status_message=attack)
        forest.reward((attack, 0.5))

    found = of(forest)

    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u2028]", str(found))
    assert len(str(found).splitlines()) == 1 + len(found.steps) + 1 + len(found.findings)


def test_an_episode_is_found_in_a_store(store: Store) -> None:
    """By the beginning of its id; its advantage is over its group, or it is said why not."""
    for number, reward in enumerate((0.0, 1.0)):
        forest = Forest(rollout_id=f"rollout-{number}", trace_id=f"{number + 1:032x}",
                        process=f"p{number}")  # fmt: skip
        with forest.inside(c.SPAN_ROLLOUT, **{c.TASK: '"sum"'}):
            forest.tag(forest.call("a"), **usage(10, 5))
            forest.reward(reward)
        store.add(forest.spans)
    alone = Forest(rollout_id="alone", trace_id="9" * 32, process="p9")
    alone.call("a")
    alone.reward(1.0)
    store.add(alone.spans)

    found = analyze_episode("rollout-1", store, advantage="rloo", prices={"*": (1, 1)})
    lonely = analyze_episode("alone", store, advantage="grpo")

    assert (found.rollout_id, found.task) == ("rollout-1", '"sum"')
    assert found.steps[0].advantage == 1.0
    assert found.totals.cost == pytest.approx(15e-6)
    assert "no_advantage" not in told(found)
    assert told(lonely)["no_advantage"] == [
        "no advantage: nothing says which task its rollout is about"
    ]
    assert json.loads(json.dumps(found.as_json()))["steps"][0]["credit"] == ["1 by previous"]
    with pytest.raises(NotFoundError):
        analyze_episode("nobody", store)

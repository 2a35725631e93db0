"""What makes a transition of a call, why nothing does, and which of them a selection wants."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import call_attributes, draw, said, text_of, token_attributes

from lightning_otel import TripletAdapter
from lightning_otel.adapter import agent_patterns, tokens
from lightning_otel.adapter.calls import HistoryParser
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.errors import ConfigError
from lightning_otel.messages import parse_messages
from lightning_otel.types import Span, Transition
from lightning_otel.types import conventions as c

CALL = Span(
    *("t", "s", None, "chat", 1, 2),  # type: ignore[arg-type]  # by position
    attributes={**call_attributes("question", "answer"), c.AGENT_NAME: "planner"},
)
ASKED, ANSWERED, CUT = c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, {c.CUT: "{}"}
NO_TEXT = {ASKED: None, ANSWERED: None}
FAILED = {"status": "ERROR"}


def read(attributes: dict[str, Any], **fields: Any) -> Transition | str | None:
    """What becomes of the call with attributes changed: None takes one away, and is no call."""
    held = {**CALL.attributes, **attributes}
    span = replace(CALL, attributes={k: v for k, v in held.items() if v is not None}, **fields)
    found = TripletAdapter().explain([span])
    assert found.report.calls == len(found.trajectories) + len(found.report.dropped)
    if found.trajectories:
        return found.trajectories[0].transitions[0]
    return next(iter(found.report.reasons()), None)


@pytest.mark.parametrize(
    ("attributes", "fields", "expected"),
    [
        ({c.ERROR_TYPE: "RateLimitError"}, FAILED, "failed: RateLimitError"),
        ({}, {**FAILED, "status_message": "slow down"}, "failed: slow down"),
        ({c.TRACK_ONLY: ["critic"]}, {}, "not tracked: the agent is not in track_only"),
        ({**NO_TEXT, **token_attributes([1], [2, 3], [-1.0])}, {}, tokens.LENGTHS),
        *[
            ({c.OPERATION: other}, {}, None)
            for other in ("execute_tool", "invoke_agent", "", ["chat"], 5)
        ],
    ],
    ids=lambda value: f"{value}"[:60],
)
def test_a_call_that_cannot_be_learned_from_has_a_reason(
    attributes: dict[str, Any], fields: dict[str, Any], expected: str | None
) -> None:
    """What is no call at all has none; ``bad_input.py`` has the reasons that messages give."""
    assert read(attributes, **fields) == expected


@pytest.mark.parametrize(
    ("attributes", "fields", "expected"),
    [
        *[
            ({c.OPERATION: operation}, {}, "question > answer")
            for operation in ("chat", "text_completion", "generate_content")
        ],
        ({c.FINISH_REASONS: ["stop"]}, FAILED, "question > answer"),  # its client could not use it
        ({c.TRACK_ONLY: ["planner"]}, {}, "question > answer"),
        (
            {c.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": "be brief"}])},
            {},
            "be brief question > answer",
        ),
        (
            {ANSWERED: json.dumps([{"role": "assistant", "parts": []}, said("assistant", "two")])},
            {},
            "question > two",
        ),
        (
            {ANSWERED: json.dumps([said("assistant", "\ud83d\ude00 and \ud800")])},
            {},
            "question > \U0001f600 and ?",
        ),
        ({ASKED: "[", ANSWERED: "[", **CUT, **token_attributes([1], [2])}, {}, ">"),
    ],
)
def test_a_call_is_what_was_asked_and_answered(
    attributes: dict[str, Any], fields: dict[str, Any], expected: str
) -> None:
    """Instructions come first, every choice is kept, and text is whole."""
    found = read(attributes, **fields)

    assert isinstance(found, Transition)
    assert f"{text_of(found.observation)} > {text_of(found.action)}".strip() == expected
    assert found.agent == "planner"


def test_a_call_takes_the_ids_of_the_first_choice() -> None:
    """Of several choices the ids and logprobs of the first one count; tools are kept."""
    found = read(
        {
            c.PROMPT_TOKEN_IDS: encode_ids([[1]]),
            c.RESPONSE_TOKEN_IDS: encode_ids([[2, 3], [4]]),
            c.RESPONSE_LOGPROBS: encode_logprobs([[-1.0, -2.0], [-3.0]]),
            c.TOOL_DEFINITIONS: json.dumps([{"type": "function", "name": "add"}]),
        }
    )

    assert isinstance(found, Transition)
    assert (list(found.response_ids), list(found.logprobs)) == ([2, 3], [-1.0, -2.0])
    assert [tool["name"] for tool in found.tools] == ["add"]


ONE, TWO, THREE = (json.dumps(said("user", text)) for text in ("one", "two", "three"))


@pytest.mark.parametrize(
    "inputs",
    [
        [f"[{ONE}]", f"[{ONE},{TWO}]", f"[{ONE},{TWO},{THREE}]"],
        [f"[{ONE},{TWO}]", f"[{ONE}]", f"[{ONE}, {THREE}]", f"[{TWO}]"],
        [f"[{ONE}]", f"[{ONE},{TWO}", f"[{ONE},1]", f"[{ONE},]", f"[{ONE}],{TWO}]"],
        [f"[{ONE}] ", f"[{ONE}],{TWO}]", "[]", f"[{ONE}]"],
        ["[]", "[,]", f"[,{ONE}]", None, f"[{ONE},{TWO}]"],
    ],
)
def test_a_history_that_goes_on_is_as_one_that_is_parsed_whole(inputs: list[str | None]) -> None:
    """Whatever came before, and also where a text is damaged."""
    history = HistoryParser()

    assert list(map(history.read_messages, inputs)) == list(map(parse_messages, inputs))


def test_a_program_that_changes_a_step_changes_no_later_reading() -> None:
    """Instructions come again with every call, and are parsed once for all of them."""
    told = {c.SYSTEM_INSTRUCTIONS: '[{"type":"text","content":"be brief"}]'}
    first = read(told)
    assert isinstance(first, Transition)
    before = json.dumps(first.observation)

    for message in first.observation:
        message["parts"][0]["content"] = "changed"

    second = read(told)
    assert isinstance(second, Transition)
    assert json.dumps(second.observation) == before


@pytest.mark.parametrize(
    ("agents", "wanted"),
    [
        ("planner", ["planner"]),
        ("plan*", ["planner", "planner-draft"]),
        ("re:^(plan|wri)", ["planner", "planner-draft", "writer"]),
        (["writer", "planner"], ["planner", "writer"]),
        (["!planner-draft", "plan*"], ["planner"]),
        (["plan*", "!planner-draft"], ["planner", "planner-draft"]),
        (["planner-draft", "!plan*", "*"], ["planner-draft", "writer", ""]),
        ("!plan*", ["writer", ""]),
        ("Planner", []),
        ([], ["planner", "planner-draft", "writer", ""]),
    ],
)
def test_the_first_pattern_that_matches_an_agent_decides(agents: Any, wanted: list[str]) -> None:
    """Names, globs, regular expressions and those left out are asked in their order."""
    selection = StepSelection.of({"agents": agents})

    found = [
        each for each in ("planner", "planner-draft", "writer", "") if selection.wants_agent(each)
    ]

    assert found == wanted


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"agent": "x"}, "has no option .agent.; did you mean .agents."),
        ({"agents": "re:("}, "agents names 're:\\('"),
        ({"agents": ["!"]}, "an empty pattern means nobody"),
        ({"agents": [1]}, "agents is .1.; it must be str, or Iterable.str."),
        ({"until": True}, "until is True; it must be"),
        ({"capture": "best"}, "capture is 'best'; it must be one of exact"),
    ],
)
def test_what_cannot_be_understood_is_refused(wanted: Any, message: str) -> None:
    """The error names the keyword, what was given and what may be."""
    with pytest.raises(ConfigError, match=message):
        StepSelection.of(wanted)


def _is_chatty(span: Span) -> bool | None:
    return False if span.attributes.get("chatty") else None


def test_a_call_matcher_decides_before_the_rules_do() -> None:
    """What it refuses is no call, what it claims is one, and None leaves it to the rules."""
    mine = f"mine@{c.OPERATION}=null@name=my-client"
    spans = draw(f"kept other@chatty=1 {mine}").spans

    plain = TripletAdapter().explain(spans).report
    refused = TripletAdapter(is_call=_is_chatty).explain(spans).report
    claimed = TripletAdapter(is_call=lambda span: "name" in span.attributes or None)

    assert (plain.calls, plain.transitions) == (2, 2)
    assert (refused.calls, refused.transitions, refused.dropped) == (1, 1, ())
    assert claimed.explain(spans).report.transitions == 3


def test_a_reward_matcher_decides_before_the_rules_do() -> None:
    """What it refuses is no reward; what it claims and has no number is reported."""
    spans = draw("answer !.5 work@my.score=3( )").spans

    refused = TripletAdapter(is_reward=lambda span: False).explain(spans).report
    claimed = TripletAdapter(is_reward=lambda span: "my.score" in span.attributes or None)
    report = claimed.explain(spans).report

    assert (refused.rewards, refused.dropped) == (0, ())
    assert (report.rewards, report.rewards_placed) == (2, 1)
    assert [each.reason for each in report.dropped] == ["the reward's value is not a number"]


@pytest.mark.parametrize(
    ("names", "agent", "is_tracked"),
    [
        (None, "anyone", True),
        (["planner"], "planner", True),
        (["planner"], "planner2", False),
        (("plan*", "critic"), "planner", True),
        (["*critic"], "the critic", True),
        (["*"], "", True),
        (["planner"], "", False),
        ([], "planner", False),
        ("planner", "planner", True),
        ("planner", "critic", False),
        (["Planner"], "planner", False),
        (["agent[1]"], "agent[1]", True),
        (["agent[1]"], "agent1", True),
        (["re:^exec"], "executor", True),
        (["re:^exec"], "an executor", False),
        (["re:or$", "x"], "executor", True),
        (["re:(?i)PLAN"], "planner", True),
        (["re:("], "re:(", True),
        (["re:("], "anyone", False),
        (["re:(", "anyone"], "anyone", True),
        ([3, None], "3", False),
    ],
)
def test_is_tracked_by_name_glob_or_expression(names: object, agent: str, is_tracked: bool) -> None:
    """Without a list all agents count; with one, those that a pattern of it means."""
    assert agent_patterns.is_tracked(agent, names) == is_tracked


@given(agent=st.text(), patterns=st.lists(st.text(), max_size=3))
def test_an_exact_name_always_counts(agent: str, patterns: list[str]) -> None:
    """Whatever characters it has, and whatever stands beside it."""
    assert agent_patterns.is_tracked(agent, [*patterns, agent])


@given(agent=st.text(), patterns=st.lists(st.text().map("re:{}".format), max_size=3))
def test_patterns_read_from_spans_never_raise(agent: str, patterns: list[str]) -> None:
    """Those that were not refused in time mean nobody."""
    valid = []
    for pattern in patterns:
        try:
            valid += agent_patterns.check_patterns(pattern)
        except ConfigError as exc:
            assert repr(pattern) in str(exc)  # noqa: PT017  # of some patterns it is raised

    assert agent_patterns.is_tracked(agent, patterns) == agent_patterns.is_tracked(
        agent, [*valid, *(pattern for pattern in patterns if pattern == agent)]
    )


def test_resources_of_an_agent_are_the_first_named() -> None:
    """Of each resource, those named inside before those outside; others' are not its own."""
    outer = agent_patterns.resources_text(
        {"*": {"model": "m", "prompt": "v1"}, "a": {"prompt": "v2"}}
    )
    inner = agent_patterns.resources_text(
        {"re:^plan": {"prompt": "v3"}, "planner": {"prompt": "v4", "x": "y"}}, outer
    )

    agent_patterns.resources_of("planner", inner).clear()  # each caller's own
    found = {
        name: agent_patterns.resources_of(name, inner) for name in ("planner", "plan", "a", "b")
    }

    assert json.loads(inner)["a"] == {"prompt": "v2"}
    assert found == {
        "planner": {"model": "m", "prompt": "v3", "x": "y"},
        "plan": {"model": "m", "prompt": "v3"},
        "a": {"model": "m", "prompt": "v1"},
        "b": {"model": "m", "prompt": "v1"},
    }


@pytest.mark.parametrize("stamped", [None, 3, "", "{", "[]", '{"a": 3}', '{"a": []}', "null"])
def test_resources_that_cannot_be_read_are_none(stamped: object) -> None:
    """Spans are read whoever wrote them."""
    assert agent_patterns.resources_of("a", stamped) == {}


@pytest.mark.parametrize(
    ("resources", "version"),
    [({}, None), ({"b": "2", "a": "1"}, "a@1,b@2"), ({"prompt": "v3"}, "prompt@v3")],
)
def test_one_version_names_them_all(resources: dict[str, str], version: str | None) -> None:
    """In order of their names."""
    assert agent_patterns.join_versions(resources) == version

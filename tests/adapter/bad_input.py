"""What broken tracers, servers and users leave behind, each with what has to come of it.

A case is one rollout (or a few): its spans, the calls that are sound, and the reason for everything
else, by span id. The same cases go through the adapter and through a store on disk.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.adapter.forest import (
    SECOND,
    call_attributes,
    reward_attributes,
    said,
    token_attributes,
)

from lightning_otel import conventions as c
from lightning_otel.adapter import WAITING, calls, credit
from lightning_otel.adapter import rewards as rewarding
from lightning_otel.types import Span

BEGAN_NS: Final = 1_700_000_000 * SECOND
DEEP: Final = 5000


def nested(depth: int) -> str:
    """JSON of lists in lists."""
    return "[" * depth + "]" * depth


@dataclass
class Scene:
    """Spans of one rollout, an instant apart; every id begins with the scene's name."""

    name: str
    spans: list[Span] = field(default_factory=list)
    rollout_id: str | None = ""
    now: int = 0

    def add(
        self,
        label: str,
        attributes: Mapping[str, Any],
        *,
        parent: str | None = None,
        trace: str = "",
        rollout_id: str | None = None,
        **fields: Any,
    ) -> None:
        """Put one span after the others."""
        self.now += 1
        rollout = rollout_id if rollout_id is not None else f"rollout {self.name}"
        start_ns = BEGAN_NS + self.now * SECOND
        held: dict[str, Any] = {
            "trace_id": f"{self.name}/{trace}",
            "span_id": self.id(label),
            "parent_span_id": None if parent is None else self.id(parent),
            "name": "chat",
            "start_ns": start_ns,
            "end_ns": start_ns + SECOND // 2,
            "attributes": {c.ROLLOUT_ID: rollout, **attributes},
        }
        self.spans.append(Span(**{**held, **fields}))

    def id(self, label: str) -> str:
        """The id of the span with a label."""
        return f"{self.name}:{label}"

    def call(self, label: str, changes: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """A call, with some attributes changed; one that is changed to ... is left out."""
        changed = {**call_attributes("go on", f"{label} answered"), **(changes or {})}
        attributes = {key: value for key, value in changed.items() if value is not ...}
        self.add(label, attributes, **fields)

    def work(self, label: str, **fields: Any) -> None:
        """A span that is neither call nor reward."""
        self.add(label, {}, **{"name": "work", **fields})

    def reward(self, label: str, value: Any = 1.0, **fields: Any) -> None:
        """A reward; ``span_id`` and ``response_id`` link it, ``changes`` changes its attributes."""
        links = {key: fields.pop(key) for key in ("span_id", "response_id") if key in fields}
        changed = {**reward_attributes(value, **links), **fields.pop("changes", {})}
        attributes = {key: held for key, held in changed.items() if held is not ...}
        self.add(label, attributes, name=c.SPAN_ANNOTATION, **fields)


@dataclass(frozen=True)
class Case:
    """What goes in, and what has to come out, by label.

    Attributes:
        kept: Calls that become transitions, each with the reward it gets.
        lost: The reason for everything else.
    """

    name: str
    spans: list[Span]
    kept: Mapping[str, float | None]
    lost: Mapping[str, str]


CASES: dict[str, Case] = {}
Found = tuple[Mapping[str, float | None], Mapping[str, str]]


def case(make: Callable[[Scene], Found]) -> Callable[[Scene], Found]:
    """Keep what a function makes as a case of its name."""
    scene = Scene(make.__name__.strip("_").replace("_", " "))
    kept, lost = make(scene)
    CASES[scene.name] = Case(
        scene.name,
        scene.spans,
        {scene.id(label): reward for label, reward in kept.items()},
        {scene.id(label): reason for label, reason in lost.items()},
    )
    return make


def damaged(name: str, changes: Mapping[str, Any], reason: str) -> None:
    """Keep a case: a call with changed attributes has a reason, the one before it its reward."""
    scene = Scene(name)
    scene.call("sound")
    scene.call("bad", changes)
    scene.reward("r")
    # A reward that names no call is of the latest one that is there.
    CASES[name] = Case(name, scene.spans, {scene.id("sound"): 1.0}, {scene.id("bad"): reason})


def odd(name: str, changes: Mapping[str, Any]) -> None:
    """Keep a case: a call with changed attributes is sound all the same."""
    scene = Scene(name)
    scene.call("odd", changes)
    scene.reward("r", 0.5)
    CASES[name] = Case(name, scene.spans, {scene.id("odd"): 0.5}, {})


# --- shapes of trees -----------------------------------------------------------------------------


@case
def _cycle(scene: Scene) -> Found:
    scene.call("a", parent="c")
    scene.work("b", parent="a")
    scene.call("c", parent="b")
    scene.reward("r", parent="b")
    return {"a": None, "c": 1.0}, {}


@case
def _cycle_of_two(scene: Scene) -> Found:
    scene.call("a", parent="b")
    scene.call("b", parent="a")
    return {"a": None, "b": None}, {}


@case
def _self_parent(scene: Scene) -> Found:
    scene.call("a", parent="a")
    scene.reward("r", parent="a")
    return {"a": 1.0}, {}


@case
def _parent_that_never_came(scene: Scene) -> Found:
    scene.call("a", parent="gone")
    scene.reward("r", parent="gone")
    return {"a": 1.0}, {}


@case
def _two_rollouts_in_one_trace(scene: Scene) -> Found:
    scene.work("root")
    for number in ("1", "2"):
        scene.call(f"call {number}", parent="root", rollout_id=f"half {number}")
        scene.reward(f"r{number}", float(number), parent="root", rollout_id=f"half {number}")
    return {"call 1": 1.0, "call 2": 2.0}, {}


@case
def _one_rollout_in_ten_traces(scene: Scene) -> Found:
    for number in range(10):
        scene.call(f"call {number}", trace=str(number))
        scene.reward(f"r{number}", float(number), trace=str(number))
    return {f"call {number}": float(number) for number in range(10)}, {}


# --- clocks --------------------------------------------------------------------------------------


@case
def _end_before_start(scene: Scene) -> Found:
    scene.call("a", start_ns=BEGAN_NS + SECOND, end_ns=BEGAN_NS)
    scene.reward("r")
    return {"a": 1.0}, {}


@case
def _no_duration_at_one_instant(scene: Scene) -> Found:
    for label in ("a", "b"):
        scene.call(label, start_ns=BEGAN_NS, end_ns=BEGAN_NS)
    scene.reward("r", start_ns=BEGAN_NS, end_ns=BEGAN_NS)
    return {"a": None, "b": 1.0}, {}


@case
def _times_of_zero(scene: Scene) -> Found:
    scene.call("a", start_ns=0, end_ns=0)
    scene.reward("r")
    return {"a": 1.0}, {}


@case
def _times_beyond_64_bits(scene: Scene) -> Found:
    scene.call("a", start_ns=2**63, end_ns=2**63 + 1)
    scene.call("b", start_ns=-5, end_ns=-1)
    return {"a": None, "b": None}, {}


@case
def _call_that_never_ended(scene: Scene) -> Found:
    scene.call("a")
    scene.reward("r")
    scene.call("b", end_ns=None)
    return {"a": 1.0}, {"b": calls.INCOMPLETE}


# --- messages ------------------------------------------------------------------------------------

TRUNCATED = json.dumps([said("assistant", "an answer that is cut")])[:30]

for _key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
    _noun = _key.split(".")[1]
    damaged(f"{_noun} is half of its JSON", {_key: TRUNCATED}, calls.UNREADABLE)
    damaged(f"{_noun} is cut", {_key: TRUNCATED, c.CUT: "{}"}, calls.CUT)
    damaged(f"{_noun} is no list", {_key: '{"role": "user"}'}, calls.UNREADABLE)
    damaged(f"{_noun} holds no objects", {_key: "[1, null]"}, calls.UNREADABLE)
    damaged(f"{_noun} is bottomless", {_key: nested(100_000)}, calls.UNREADABLE)
    damaged(
        f"{_noun} holds a number of 5,000 digits",
        {_key: f'[{{"role": "tool", "parts": [{{"type": "tool", "x": {"9" * 5000}}}]}}]'},
        calls.UNREADABLE,
    )

damaged("answer is empty", {c.OUTPUT_MESSAGES: "[]"}, calls.NO_OUTPUT)
damaged("answer is nothing", {c.OUTPUT_MESSAGES: ...}, calls.NO_OUTPUT)
damaged("answer has no parts", {c.OUTPUT_MESSAGES: '[{"role": "assistant"}]'}, calls.NO_OUTPUT)
damaged(
    "answer has empty parts",
    {c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": []}]'},
    calls.NO_OUTPUT,
)
damaged(
    "neither question nor answer",
    {c.INPUT_MESSAGES: ..., c.OUTPUT_MESSAGES: ...},
    calls.NO_CONTENT,
)
odd("question is nothing", {c.INPUT_MESSAGES: ...})
odd("question without a role", {c.INPUT_MESSAGES: '[{"parts": [{"type": "text"}]}]'})
odd("question whose role is a list", {c.INPUT_MESSAGES: '[{"role": ["user"], "parts": []}]'})
odd("question whose parts are text", {c.INPUT_MESSAGES: '[{"role": "user", "parts": "hi"}]'})
odd("question with parts of nothing", {c.INPUT_MESSAGES: '[{"role": "user", "parts": [null]}]'})
odd(
    "parts of an unknown kind",
    {c.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": "hologram", "data": [1, {}]}]}]'},
)
odd(
    "parts whose kind is a list",
    {c.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": ["text"], "content": {}}]}]'},
)
odd(
    "text of another kind",
    {c.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": "text", "content": {"a": [1]}}]}]'},
)
odd(
    "answer without a role",
    {c.OUTPUT_MESSAGES: '[{"parts": [{"type": "text", "content": "x"}]}]'},
)
odd(
    "integers beyond 64 bits, and no numbers",
    {
        c.OUTPUT_MESSAGES: json.dumps(
            [
                {
                    "role": "assistant",
                    "parts": [
                        {
                            "type": "tool_call",
                            "id": "1",
                            "name": "f",
                            "arguments": {"n": 10**40, "x": float("nan"), "y": float("-inf")},
                        }
                    ],
                }
            ]
        )
    },
)
odd(
    "half of a surrogate pair",
    {
        c.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": "text", "content": "\\ud83d"}]}]',
        c.AGENT_NAME: "agent \ud83d",
    },
)
odd("null characters", {c.INPUT_MESSAGES: json.dumps([said("user", "a\0b")]), c.AGENT_NAME: "\0"})
odd("nested deep", {c.INPUT_MESSAGES: f'[{{"role": "user", "parts": {nested(400)}}}]'})
odd(
    "tool arguments nested deep",
    {
        c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": [{"type": "tool_call", "id": "1", '
        f'"name": "f", "arguments": {nested(400)}}}]}}]'
    },
)
odd("tools that are none", {c.TOOL_DEFINITIONS: "nonsense", c.SYSTEM_INSTRUCTIONS: "[1"})


# --- the fields of a call ------------------------------------------------------------------------

odd("usage beyond 64 bits", {c.INPUT_TOKENS: 2**63, c.OUTPUT_TOKENS: 10**400})
odd("usage of 5,000 digits", {c.INPUT_TOKENS: 10**5000})
odd("usage that is no number", {c.INPUT_TOKENS: "12", c.OUTPUT_TOKENS: float("nan")})
odd("response id that is a list", {c.RESPONSE_ID: ["a"]})
odd("finish reasons that are numbers", {c.FINISH_REASONS: [1, None]})
odd("rollout that is a list", {c.ATTEMPT_ID: ["1"]})
odd("agent that is a number", {c.AGENT_NAME: 7})
odd("resources that are bottomless", {c.RESOURCES: f'{{"*": {{"prompt": {nested(900)}}}}}'})
odd("resources of 5,000 digits", {c.RESOURCES: f'{{"*": {{"prompt": {"9" * 5000}}}}}'})
odd("token ids that are no ids", {c.PROMPT_TOKEN_IDS: "?", c.RESPONSE_TOKEN_IDS: "AAA="})
odd("token ids that are a list", {c.PROMPT_TOKEN_IDS: [1], c.RESPONSE_TOKEN_IDS: {"a": 1}})
odd(
    "logprobs of another length",
    {
        **token_attributes([1], [2, 3]),
        c.RESPONSE_LOGPROBS: token_attributes([], [], [-1.0])[c.RESPONSE_LOGPROBS],
    },
)
damaged("error of 5,000 digits", {c.ERROR_TYPE: 10**5000, c.ABANDONED: True}, calls.ABANDONED)
damaged("agents that are none", {c.TRACK_ONLY: ["re:("]}, calls.NOT_TRACKED)
damaged("an embedding", {c.OPERATION: c.EMBEDDINGS}, calls.EMBEDDING)


@case
def _error_that_is_no_text(scene: Scene) -> Found:
    scene.call("a")
    scene.call("b", {c.ERROR_TYPE: ["Timeout"]}, status="ERROR")
    return {"a": None}, {"b": "failed: ['Timeout']"}


@case
def _error_without_a_word(scene: Scene) -> Found:
    scene.call("a")
    scene.call("b", status="ERROR")
    return {"a": None}, {"b": "failed: the call ended in an error"}


# --- rewards -------------------------------------------------------------------------------------

_NOT_A_NUMBER: Final[Mapping[str, Any]] = {
    "text": "good",
    "empty": "",
    "list": [1.0],
    "object": {"value": 1.0},
    "bool": True,
    "bytes": b"1",
}
_NOT_FINITE: Final[Mapping[str, Any]] = {
    "NaN": float("nan"),
    "infinite": float("inf"),
    "infinitely bad": float("-inf"),
    "beyond a double": 10**400,
    "of 5,000 digits": 10**5000,
}
for _reason, _values in (
    (rewarding.NOT_A_NUMBER, _NOT_A_NUMBER),
    (rewarding.NOT_FINITE, _NOT_FINITE),
):
    for _name, _value in _values.items():
        _scene = Scene(f"reward that is {_name}")
        _scene.call("a")
        _scene.reward("bad", _value)
        _scene.reward("r", 0.5)
        CASES[_scene.name] = Case(
            _scene.name, _scene.spans, {_scene.id("a"): 0.5}, {_scene.id("bad"): _reason}
        )


@case
def _reward_without_its_value(scene: Scene) -> Found:
    scene.call("a")
    scene.reward("r", changes={c.REWARD_VALUE: ...})
    return {"a": None}, {"r": rewarding.NO_PRIMARY}


@case
def _reward_whose_second_value_is_none(scene: Scene) -> Found:
    scene.call("a")
    scene.reward("r", changes={f"{c.REWARD_PREFIX}.1.value": "x"})
    return {"a": None}, {"r": rewarding.NOT_A_NUMBER}


@case
def _reward_that_is_named_oddly(scene: Scene) -> Found:
    scene.call("a")
    scene.reward("r", changes={c.REWARD_NAME: ["name"]})
    return {"a": 1.0}, {}


@case
def _reward_linked_to_a_span_that_never_came(scene: Scene) -> Found:
    scene.call("a")
    scene.reward("r", span_id="gone")
    scene.reward("s", response_id="gone")
    return {"a": None}, {"r": credit.UNKNOWN_TARGET, "s": credit.UNKNOWN_TARGET}


@case
def _reward_linked_to_a_span_without_calls(scene: Scene) -> Found:
    scene.call("a")
    scene.work("w")
    scene.reward("r", span_id=scene.id("w"))
    return {"a": None}, {"r": credit.UNUSED_TARGET}


@case
def _reward_linked_to_a_call_that_failed(scene: Scene) -> Found:
    scene.call("a")
    scene.call("b", status="ERROR")
    scene.reward("r", span_id=scene.id("b"))
    scene.reward("s", parent="b")
    failed = "failed: the call ended in an error"
    return {"a": None}, {"b": failed, "r": credit.UNUSED_TARGET, "s": credit.UNUSED_PARENT}


@case
def _reward_linked_by_5_000_digits(scene: Scene) -> Found:
    scene.call("a")
    key, value = f"{c.LINK_PREFIX}.0.key_match", f"{c.LINK_PREFIX}.0.value_match"
    scene.reward("r", changes={key: c.LINK_SPAN_ID, value: 10**5000})
    return {"a": None}, {"r": credit.UNKNOWN_TARGET}


@case
def _reward_before_every_call(scene: Scene) -> Found:
    scene.reward("r")
    scene.call("a")
    return {"a": None}, {"r": credit.NO_CALL_BEFORE}


@case
def _reward_alone(scene: Scene) -> Found:
    scene.reward("r")
    return {}, {"r": WAITING}


@case
def _two_rewards_for_one_call(scene: Scene) -> Found:
    scene.call("a")
    scene.call("b")
    scene.reward("r", 0.1)
    scene.reward("s", 0.9)
    return {"a": None, "b": 0.1}, {"s": credit.ALREADY_REWARDED}


# --- other conventions ---------------------------------------------------------------------------


def _openinference(output: str) -> dict[str, Any]:
    return {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "go on",
        "output.value": output,
        c.OPERATION: ...,
        c.INPUT_MESSAGES: ...,
        c.OUTPUT_MESSAGES: ...,
    }


def _litellm(choices: str) -> dict[str, Any]:
    return {
        "llm.openai.messages": "[{'role': 'user', 'content': 'go on'}]",
        "llm.openai.choices": choices,
        c.OPERATION: ...,
        c.INPUT_MESSAGES: ...,
        c.OUTPUT_MESSAGES: ...,
    }


damaged("choices are null", _openinference('{"choices": null}'), calls.NO_OUTPUT)
damaged("choice is null", _openinference('{"choices": [null, {"message": null}]}'), calls.NO_OUTPUT)
damaged("body is half of its JSON", _openinference('{"choices": [{"mess'), calls.UNREADABLE)
damaged("choices are None", _litellm("None"), calls.NO_OUTPUT)
damaged("choices are no Python", _litellm("[{'message': <object>}]"), calls.UNREADABLE)
damaged("choices have keys that cannot be", _litellm("[{[]: 1}]"), calls.UNREADABLE)
damaged(
    "message holds what JSON does not know",
    _litellm("[{'message': {'role': 'assistant', 'content': [{(1, 2): 3}]}}]"),
    calls.UNREADABLE,
)
damaged(
    "keys that are nested deep",
    {
        "gen_ai.system": "x",
        f"gen_ai.prompt.0.{'a.' * DEEP}b": 1,
        c.INPUT_MESSAGES: ...,
        c.OUTPUT_MESSAGES: ...,
    },
    calls.NO_OUTPUT,
)
damaged(
    "keys that are numbered high",
    {
        "gen_ai.system": "x",
        f"gen_ai.prompt.{'9' * 5000}.role": "user",
        c.INPUT_MESSAGES: ...,
        c.OUTPUT_MESSAGES: ...,
    },
    calls.NO_CONTENT,
)

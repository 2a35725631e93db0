"""What broken tracers, servers and users leave behind, each with what has to come of it.

A case is a drawing, with the attributes that are changed of some spans in it (one that is changed
to ``...`` is left out), and its outcome: the reward of each call that is sound, and after ``!`` the
reason for everything else. The same cases go through the adapter and through a store on disk.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.adapter.forest import draw, said, token_attributes

from lightning_otel.adapter import WAITING, calls, credit
from lightning_otel.adapter import rewards as rewarding
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

DEEP: Final = 5000
REASONS: Final = {
    "before": rewarding.NO_CALL_BEFORE,
    "cut": calls.CUT,
    "embedding": calls.EMBEDDING,
    "failed": "failed: the call ended in an error",
    "incomplete": calls.INCOMPLETE,
    "infinite": rewarding.NOT_FINITE,
    "no content": calls.NO_CONTENT,
    "no number": rewarding.NOT_A_NUMBER,
    "no output": calls.NO_OUTPUT,
    "no primary": rewarding.NO_PRIMARY,
    "abandoned": calls.ABANDONED,
    "already": rewarding.ALREADY_REWARDED,
    "not tracked": calls.NOT_TRACKED,
    "parent": credit.UNUSED_PARENT,
    "target": credit.UNUSED_TARGET,
    "unknown": credit.UNKNOWN_TARGET,
    "unreadable": calls.UNREADABLE,
    "waits": WAITING,
}
Changes = Mapping[str, Any]


def nested(depth: int) -> str:
    """JSON of lists in lists."""
    return "[" * depth + "]" * depth


# --- calls with one thing wrong ------------------------------------------------------------------

BAD: dict[str, tuple[Changes, str]] = {
    "answer is empty": ({c.OUTPUT_MESSAGES: "[]"}, "no output"),
    "answer is nothing": ({c.OUTPUT_MESSAGES: ...}, "no output"),
    "answer has no parts": ({c.OUTPUT_MESSAGES: '[{"role": "assistant"}]'}, "no output"),
    "answer has empty parts": (
        {c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": []}]'},
        "no output",
    ),
    "neither question nor answer": (
        {c.INPUT_MESSAGES: ..., c.OUTPUT_MESSAGES: ...},
        "no content",
    ),
    "error of 5,000 digits": ({c.ERROR_TYPE: 10**5000, c.ABANDONED: True}, "abandoned"),
    "agents that are none": ({c.TRACK_ONLY: ["re:("]}, "not tracked"),
    "an embedding": ({c.OPERATION: c.EMBEDDINGS}, "embedding"),
}
_CUT = json.dumps([said("assistant", "an answer that is cut")])[:30]
_LONG = f'[{{"role": "tool", "parts": [{{"type": "tool", "x": {"9" * 5000}}}]}}]'
for _key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
    for _name, _text in {
        "half of its JSON": _CUT,
        "no list": '{"role": "user"}',
        "no objects": "[1, null]",
        "bottomless": nested(100_000),
        "a number of 5,000 digits": _LONG,
    }.items():
        BAD[f"{_key} is {_name}"] = {_key: _text}, "unreadable"
    BAD[f"{_key} is cut"] = {_key: _CUT, c.CUT: "{}"}, "cut"

_NO_MESSAGES: Final[Changes] = {c.INPUT_MESSAGES: ..., c.OUTPUT_MESSAGES: ...}
_ASKED_ELSEWHERE = {
    "openinference.span.kind": "LLM",
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "go on",
    "llm.openai.messages": "[{'role': 'user', 'content': 'go on'}]",
    c.OPERATION: ...,
    **_NO_MESSAGES,
}
_CONTENT = "[{'message': {'role': 'assistant', 'content': [{(1, 2): 3}]}}]"
for _key, _text, _reason in (
    ("output.value", '{"choices": null}', "no output"),
    ("output.value", '{"choices": [null, {"message": null}]}', "no output"),
    ("output.value", '{"choices": [{"mess', "unreadable"),
    ("llm.openai.choices", "None", "no output"),
    ("llm.openai.choices", "[{'message': <object>}]", "unreadable"),
    ("llm.openai.choices", "[{[]: 1}]", "unreadable"),
    ("llm.openai.choices", _CONTENT, "unreadable"),
):
    _asked = {**_ASKED_ELSEWHERE, _key: _text}
    if _key != "output.value":
        _asked = {k: v for k, v in _asked.items() if not k.startswith(("openinf", "llm.input"))}
    else:
        del _asked["llm.openai.messages"]
    BAD[f"{_key} is {_text[:40]}"] = _asked, _reason
for _name, _row, _reason in (
    ("nested deep", f"0.{'a.' * DEEP}b", "no output"),
    ("numbered high", f"{'9' * 5000}.role", "no content"),
):
    _keys = {"gen_ai.system": "x", f"gen_ai.prompt.{_row}": "user", **_NO_MESSAGES}
    BAD[f"keys that are {_name}"] = _keys, _reason


# --- calls that are odd, and sound all the same --------------------------------------------------


def asking(*parts: Any) -> Changes:
    """A call that was asked these parts."""
    return {c.INPUT_MESSAGES: json.dumps([{"role": "user", "parts": list(parts)}])}


def calling(arguments: str) -> Changes:
    part = f'{{"type": "tool_call", "id": "1", "name": "f", "arguments": {arguments}}}'
    return {c.OUTPUT_MESSAGES: f'[{{"role": "assistant", "parts": [{part}]}}]'}


ODD: dict[str, Changes] = {
    "question is nothing": {c.INPUT_MESSAGES: ...},
    "question without a role": {c.INPUT_MESSAGES: '[{"parts": [{"type": "text"}]}]'},
    "question whose role is a list": {c.INPUT_MESSAGES: '[{"role": ["user"], "parts": []}]'},
    "question whose parts are text": {c.INPUT_MESSAGES: '[{"role": "user", "parts": "hi"}]'},
    "question with parts of nothing": asking(None),
    "parts of an unknown kind": asking({"type": "hologram", "data": [1, {}]}),
    "parts whose kind is a list": asking({"type": ["text"], "content": {}}),
    "text of another kind": asking({"type": "text", "content": {"a": [1]}}),
    "answer without a role": {c.OUTPUT_MESSAGES: '[{"parts": [{"type": "text", "content": "x"}]}]'},
    "integers beyond 64 bits, and no numbers": calling(
        json.dumps({"n": 10**40, "x": float("nan"), "y": float("-inf")})
    ),
    "half of a surrogate pair": {
        **asking({"type": "text", "content": "\ud83d"}),
        c.AGENT_NAME: "agent \ud83d",
    },
    "null characters": {**asking({"type": "text", "content": "a\0b"}), c.AGENT_NAME: "\0"},
    "nested deep": {c.INPUT_MESSAGES: f'[{{"role": "user", "parts": {nested(400)}}}]'},
    "tool arguments nested deep": calling(nested(400)),
    "tools that are none": {c.TOOL_DEFINITIONS: "nonsense", c.SYSTEM_INSTRUCTIONS: "[1"},
    "usage beyond 64 bits": {c.INPUT_TOKENS: 2**63, c.OUTPUT_TOKENS: 10**400},
    "usage of 5,000 digits": {c.INPUT_TOKENS: 10**5000},
    "usage that is no number": {c.INPUT_TOKENS: "12", c.OUTPUT_TOKENS: float("nan")},
    "response id that is a list": {c.RESPONSE_ID: ["a"]},
    "finish reasons that are numbers": {c.FINISH_REASONS: [1, None]},
    "attempt that is a list": {c.ATTEMPT_ID: ["1"]},
    "agent that is a number": {c.AGENT_NAME: 7},
    "resources that are bottomless": {c.RESOURCES: f'{{"*": {{"prompt": {nested(900)}}}}}'},
    "resources of 5,000 digits": {c.RESOURCES: f'{{"*": {{"prompt": {"9" * 5000}}}}}'},
    "token ids that are no ids": {c.PROMPT_TOKEN_IDS: "?", c.RESPONSE_TOKEN_IDS: "AAA="},
    "token ids that are a list": {c.PROMPT_TOKEN_IDS: [1], c.RESPONSE_TOKEN_IDS: {"a": 1}},
    "logprobs of another length": token_attributes([1], [2, 3], [-1.0]),
}


# --- all of them ---------------------------------------------------------------------------------

_DRAWN: dict[str, tuple[str, dict[str, Changes], str]] = {
    "cycle": ("+a@parent=d +b@parent=a +d@parent=b d/!1 -d -b -a", {}, "a=- b=- d=1"),
    "cycle of two": ("a@parent=b b@parent=a", {}, "a=- b=-"),
    "self-parent": ("a@parent=a a/!1", {}, "a=1"),
    "parent that never came": ("a@parent=gone gone/!1", {}, "a=1"),
    "two rollouts in one trace": (
        "root( #rollout=half1 a !1 #rollout=half2 b !2 )",
        {},
        "a=1 b=2",
    ),
    "one rollout in ten traces": (
        " ".join(f"#trace={n} a{n} !{n}" for n in range(10)),
        {},
        " ".join(f"a{n}={n}" for n in range(10)),
    ),
    "end before start": ("a@at=9-1 !1", {}, "a=1"),
    "no duration at one instant": ("#counted=no a@at=1 b@at=1 !1@at=1", {}, "a=- b=1"),
    "times of zero": ("#counted=no a@at=0 !1", {}, "a=1"),
    "times beyond 64 bits": ("a@at=9223372037-9223372038 #clock=-99 b", {}, "a=- b=-"),
    "call that never ended": ("a !1 +b", {}, "a=1 ! b incomplete"),
    "error that is no text": (
        "a b@error",
        {"b": {c.ERROR_TYPE: ["Timeout"]}},
        "a=- ! b failed: ['Timeout']",
    ),
    "error without a word": ("a b@error", {}, "a=- ! b failed"),
    "reward without its value": (
        "a !1@as=r",
        {"r": {c.REWARD_VALUE: ...}},
        "a=- ! r no primary",
    ),
    "second value is none": (
        "a !1@as=r",
        {"r": {f"{c.REWARD_PREFIX}.1.value": "x"}},
        "a=- ! r no number",
    ),
    "name that is a list": ("a !1@as=r", {"r": {c.REWARD_NAME: ["name"]}}, "a=1"),
    "linked to what never came": (
        "a !1@as=r@span=gone !1@as=s@id=gone",
        {},
        "a=- ! r unknown, s unknown",
    ),
    "linked to a span without calls": ("a w( ) !1@as=r@span=w", {}, "a=- ! r target"),
    "linked to a call that failed": (
        "a b@error !1@as=r@span=b b/!1@as=s",
        {},
        "a=- ! b failed, r target, s parent",
    ),
    "linked by 5,000 digits": (
        "a !1@as=r@span=x",
        {"r": {f"{c.LINK_PREFIX}.0.value_match": 10**5000}},
        "a=- ! r unknown",
    ),
    "reward before every call": ("!1@as=r a", {}, "a=- ! r before"),
    "reward alone": ("!1@as=r", {}, "! r waits"),
    "two rewards for one call": ("a b !.1 !.9@as=s", {}, "a=- b=0.1 ! s already"),
    # A reward that names no call is of the latest one that is there.
    **{name: ("a b !1", {"b": held}, f"a=1 ! b {why}") for name, (held, why) in BAD.items()},
    **{name: ("a !.5", {"a": held}, "a=0.5") for name, held in ODD.items()},
    **{
        f"reward that is {name}": (
            "a !0@as=r !.5",
            {"r": {c.REWARD_VALUE: value}},
            f"a=0.5 ! r {why}",
        )
        for why, values in {
            "no number": {
                "text": "good",
                "empty": "",
                "list": [1.0],
                "object": {"value": 1.0},
                "bool": True,
                "bytes": b"1",
            },
            "infinite": {
                "NaN": float("nan"),
                "infinite": float("inf"),
                "infinitely bad": float("-inf"),
                "beyond a double": 10**400,
                "of 5,000 digits": 10**5000,
            },
        }.items()
        for name, value in values.items()
    },
}


@dataclass(frozen=True)
class Case:
    """Spans of a rollout of its own, or of a few, and their outcome."""

    spans: list[Span]
    names: dict[tuple[str, str], str]
    outcome: str


def changed(span: Span, changes: Changes) -> Span:
    """The span with attributes changed, or left out."""
    held = {**span.attributes, **changes}
    return replace(span, attributes={k: v for k, v in held.items() if v is not ...})


def _case(number: int, drawing: str, changes: dict[str, Changes], outcome: str) -> Case:
    for word in ("half1", "half2"):
        drawing = drawing.replace(word, f"{word}-{number}")
    spans = [
        replace(
            changed(span, changes.get(span.attributes["drawn"], {})),
            trace_id=f"{number:031x}{span.trace_id[0]}",
        )
        for span in draw(drawing, rollout_id=f"rollout {number}", process=f"p{number}-").spans
    ]
    names = {(span.trace_id, span.span_id): span.attributes["drawn"] for span in spans}
    return Case(spans, names, outcome)


CASES: dict[str, Case] = {
    name: _case(number, *each) for number, (name, each) in enumerate(_DRAWN.items())
}

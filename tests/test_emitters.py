"""Spans made by hand: names, keys and value types as Agent Lightning 0.3 has them."""

import base64
import contextlib
import enum
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import openai
import pytest
from tests.command import invoke

from lightning_otel import (
    Recording,
    Span,
    Store,
    auto_trace,
    context,
    emit_action,
    emit_exception,
    emit_message,
    emit_object,
    emit_observation,
    emit_reward,
    emit_span,
    emit_state,
)
from lightning_otel.errors import ConfigError
from lightning_otel.types import conventions as c


@pytest.fixture
def recording(store: Store) -> Iterator[Recording]:
    with auto_trace(store=store) as found:
        yield found


Warnings = Callable[[], list[str]]


def last(recording: Recording) -> Span:
    return recording.spans()[-1]


def own(span: Span) -> dict[str, Any]:
    """A span's attributes without the stamps of its rollout."""
    return {k: v for k, v in span.attributes.items() if k not in (c.ROLLOUT_ID, c.ATTEMPT_ID)}


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, 1.0),
        (0, 0.0),
        (-2.5, -2.5),
        (True, 1.0),
        (False, 0.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array([0.75]).mean(), 0.75),
        (np.array(0.25), 0.25),
    ],
    ids=repr,
)
def test_reward_number_has_agent_lightnings_keys(
    number: Any, value: float, recording: Recording
) -> None:
    """One number of any type is the primary reward, as a float."""
    span_id = emit_reward(number)

    span = last(recording)
    assert span.span_id == span_id
    assert span.name == "agentlightning.annotation"
    assert own(span) == {
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": value,
    }
    assert type(span.attributes["agentlightning.reward.0.value"]) is float
    assert span.parent_span_id == recording.span_id
    assert (span.kind, span.status, span.is_incomplete) == ("INTERNAL", "UNSET", False)


def rewards(*values: tuple[str, float], **more: Any) -> dict[str, Any]:
    """The attributes of named rewards, the primary one first, in Agent Lightning's keys."""
    found = {}
    for number, (name, value) in enumerate(values):
        found[f"agentlightning.reward.{number}.name"] = name
        found[f"agentlightning.reward.{number}.value"] = value
    return {**found, **{key.replace("_", "."): value for key, value in more.items()}}


def linked(*links: tuple[str, str]) -> dict[str, Any]:
    """The attributes of a reward with links: each a key and the value it must have."""
    found = rewards(("primary", 1.0))
    for number, (key, value) in enumerate(links):
        found[f"agentlightning.link.{number}.key_match"] = key
        found[f"agentlightning.link.{number}.value_match"] = value
    return found


@pytest.mark.pain(21)
@pytest.mark.parametrize(
    ("arguments", "keywords", "attributes"),
    [
        (("task_success", 0.95), {}, rewards(("task_success", 0.95))),
        (("completion",), {"score": 0.5}, rewards(("completion", 0.5))),
        (("nothing", 0), {}, rewards(("nothing", 0.0))),
        (({"only": 0.25},), {}, rewards(("only", 0.25))),
        (
            ({"short": 0.4, "ok": 1, "kind": 0.2},),
            {"primary": "ok"},
            rewards(("ok", 1.0), ("short", 0.4), ("kind", 0.2)),
        ),
        (
            ([1, None, np.float32(0.5)],),
            {},
            rewards(("primary", 1.5), lightning_reward_steps="[1.0, null, 0.5]"),
        ),
        (
            ("progress", (0.25,)),
            {},
            rewards(("progress", 0.25), lightning_reward_steps="[0.25]"),
        ),
        (
            (0.5,),
            {"attributes": {"agentlightning.tag.0": "x", "agentlightning.reward.0.value": 9.0}},
            rewards(("primary", 0.5), agentlightning_tag_0="x"),
        ),
        ((1.0,), {"span_id": "ab" * 8}, linked(("span_id", "ab" * 8))),
        ((1.0,), {"response_id": "chat-1"}, linked(("gen_ai.response.id", "chat-1"))),
        (
            (1.0,),
            {"span_id": "ab" * 8, "response_id": "chat-1", "match": {"t": "T-1", "try": 2}},
            linked(
                ("span_id", "ab" * 8), ("gen_ai.response.id", "chat-1"), ("t", "T-1"), ("try", "2")
            ),
        ),
        ((1.0,), {"match": {"is_final": True}}, linked(("is_final", "true"))),
    ],
)  # fmt: skip
def test_reward_in_each_spelling(
    arguments: Any, keywords: Any, attributes: dict[str, Any], recording: Recording
) -> None:
    """Names, several numbers, one for each step, links and further attributes."""
    emit_reward(*arguments, **keywords)

    assert own(last(recording)) == attributes


@pytest.mark.parametrize(
    ("arguments", "keywords", "says"),
    [
        ((float("nan"),), {}, "'primary' is nan; it must be finite"),
        ((float("inf"),), {}, "'primary' is inf; it must be finite"),
        ((float("-inf"),), {}, "must be finite"),
        ((Decimal("NaN"),), {}, "must be finite"),
        ((10**400,), {}, "must be a number"),
        (("task_success",), {}, "'task_success' is None; it must be a number"),
        (("task_success", "0.5"), {}, "'task_success' is '0.5'; it must be a number"),
        ((b"1.0",), {}, "must be a number"),
        ((None,), {}, "'primary' is None; it must be a number"),
        (([],), {}, "has no number for any step"),
        (([None],), {}, "has no number for any step"),
        (([1.0, float("nan")],), {}, "'step 1' is nan; it must be finite"),
        (([1.0, "x"],), {}, "'step 1' is 'x'; it must be a number"),
        (([1e308, 1e308],), {}, "must be finite"),
        (([1.0], 2.0), {}, "only after a name"),
        (({"a": [1.0]},), {}, "'a' is"),
        ((np.array([1.0, 2.0]),), {}, "must be a number"),
        ((Ellipsis,), {}, "must be a number"),
        (({},), {}, "the mapping is empty"),
        (({"a": 1, "b": 2},), {}, "need primary="),
        (({"a": 1, "b": 2},), {"primary": "c"}, "'c' is none of the rewards: a, b"),
        (({"a": "good"},), {}, "'a' is 'good'"),
        ((1.0, 2.0), {}, "only after a name"),
        ((1.0,), {"score": 2.0}, "only after a name"),
        (({"a": 1}, 2.0), {}, "only after a name"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_recorded", [True, False])
def test_reward_that_is_none_is_refused_and_not_kept(
    arguments: Any, keywords: Any, says: str, is_recorded: bool
) -> None:
    """What is no finite number, or leaves open which counts, raises and says why."""
    with auto_trace(store=":memory:") if is_recorded else context() as recording:
        with pytest.raises(ConfigError, match=says):
            emit_reward(*arguments, **keywords)

        assert [span for span in recording.spans() if span.name == c.SPAN_ANNOTATION] == []


def test_reward_for_another_rollout_belongs_to_that_one(store: Store) -> None:
    """A reward given to another rollout is none of this one's: no stamp, no parent of it."""
    with auto_trace(store=store, rollout_id="first", agent="planner"):
        emit_action("act", "one")
    with auto_trace(store=store, rollout_id="second", agent="judge", attempt_id="3") as second:
        emit_reward(0.5, rollout_id="first")
        emit_reward(0.25, rollout_id="second")

    first = store.spans(rollout_id="first").rows()[-1]
    assert first.attributes[c.REWARD_VALUE] == 0.5
    assert first.attempt_id == "1"
    assert c.AGENT_NAME not in first.attributes
    assert first.parent_span_id is None
    assert first.trace_id != second.trace_id
    assert [t.reward for t in store.transitions(rollout_id="first")] == [0.5]
    assert [span.attributes.get(c.REWARD_VALUE) for span in second.spans()] == [None, 0.25]


@pytest.mark.parametrize("span_id", ["zz", "AB" * 8, "ab" * 16, 7])
def test_reward_of_no_span_is_refused(span_id: Any, store: Store) -> None:
    """An id that no span can have would wait for ever; within a recording and without."""
    with auto_trace(store=store), pytest.raises(ConfigError, match="16 hex digits"):
        emit_reward(1.0, span_id=span_id)
    with pytest.raises(ConfigError, match="16 hex digits"):
        emit_reward(1.0, span_id=span_id)


def test_number_of_a_sum_is_rounded_for_people(store: Store) -> None:
    """Binary fractions leave some of what is zero; data keeps it, and small numbers stay."""
    for number, value in enumerate((0.1 + 0.2 - 0.3, 1e-7)):
        with auto_trace(store=store, rollout_id=f"r{number}"):
            emit_reward(value)

    lines = invoke("ls", "rollouts", "--store", store.name).stdout.splitlines()
    rows = json.loads(invoke("ls", "rollouts", "--json", "--store", store.name).stdout)

    assert ["1e-07" in line.split() for line in lines if "r1" in line] == [True]
    assert ["0" in line.split() for line in lines if "r0" in line] == [True]
    assert {row["reward"] for row in rows} == {0.1 + 0.2 - 0.3, 1e-7}


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("name", ["response_id", "rollout_id", "span_id"])
def test_late_reward_reaches_its_call(
    name: str, is_recorded: bool, client: openai.OpenAI, warnings_in: Warnings
) -> None:
    """A reward given after the rollout is credited to what it names, from wherever it is given."""
    with auto_trace() as recording:
        reply = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "hi"}]
        )
    call, ids = recording.spans()[1], {"response_id": reply.id, "rollout_id": recording.rollout_id}
    target: Any = {name: ids.get(name, call.span_id)}

    with auto_trace() if is_recorded else contextlib.nullcontext():
        span_id = emit_reward(0.5, **target)

    (reward,) = [span for span in Store().spans() if span.name == c.SPAN_ANNOTATION]
    assert (reward.span_id, reward.scope, reward.is_incomplete) == (span_id, c.SCOPE, False)
    assert warnings_in() == []
    assert [(t.response_id, t.reward) for t in Store().transitions()] == [(reply.id, 0.5)]
    assert Store().report().rewards_placed == 1


@pytest.mark.parametrize("store", ["file/store", "mongodb://here"])
def test_late_reward_without_a_store_costs_one_warning(
    store: str, monkeypatch: pytest.MonkeyPatch, warnings_in: Warnings, tmp_path: Any
) -> None:
    """Where there is no default store to be had, the program runs on and no folder is made."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", store)

    given = [emit_reward(1.0, rollout_id="r1") for _ in range(2)]

    assert given == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len(warnings_in()) == 1


class Colour(str, enum.Enum):  # noqa: UP042  # StrEnum shows itself as what it is
    """Text that shows itself as something else."""

    RED = "red"


@dataclass
class Plan:
    """An object of the user's own."""

    steps: int


class Awkward:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "kind", "is_literal", "held"),
    [
        ("text", "str", True, "text"),
        ("", "str", True, ""),
        (7, "int", True, "7"),
        (0.5, "float", True, "0.5"),
        (True, "bool", True, "True"),
        (b"\x00\xff", "bytes", True, base64.b64encode(b"\x00\xff").decode()),
        (bytearray(b"ab"), "bytes", True, base64.b64encode(b"ab").decode()),
        (np.float64(0.5), "float", True, "0.5"),
        (Colour.RED, "str", True, "red"),
        ({"a": [1, None, "ü"]}, "dict", False, {"a": [1, None, "ü"]}),
        ([1, 2], "list", False, [1, 2]),
        ((1, 2), "tuple", False, [1, 2]),
        (None, "NoneType", False, None),
        ({"a": Plan(3)}, "dict", False, {"a": "Plan(steps=3)"}),
        (Plan(3), f"{__name__}.Plan", False, "Plan(steps=3)"),
        ({(1, 2): 3}, "dict", False, "{(1, 2): 3}"),
        (Awkward(), f"{__name__}.Awkward", False, "<Awkward>"),
        (CIRCLE, "list", False, "[[...]]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_object_is_a_literal_or_json(
    value: object, kind: str, is_literal: bool, held: object, recording: Recording
) -> None:
    """Text, numbers and bytes are literals of Agent Lightning's types, whatever their subclass."""
    emit_object(value, attributes={"note": "kept"})

    span = last(recording)
    key = "agentlightning.object.literal" if is_literal else "agentlightning.object.json"
    text = span.attributes[key]
    assert span.name == "agentlightning.object"
    assert own(span) == {"agentlightning.object.type": kind, "note": "kept", key: text}
    assert type(text) is str
    assert (text if is_literal else json.loads(text)) == held


@pytest.mark.parametrize(
    ("emit", "name"),
    [(emit_action, "lightning.action"), (emit_observation, "lightning.observation")],
)
def test_marks_hold_a_name_and_a_value(emit: Any, name: str, recording: Recording) -> None:
    """An action or observation has a name and a value, or is a value alone."""
    emit("tool", {"x": 1})
    emit("alone")
    emit({"also": "alone"})
    emit("nought", 0)

    marks = recording.spans()[1:]
    assert [span.name for span in marks] == [name] * 4
    assert [span.attributes.get(c.MARK_NAME) for span in marks] == ["tool", None, None, "nought"]
    held = [
        span.attributes.get(c.OBJECT_JSON) or span.attributes[c.OBJECT_LITERAL] for span in marks
    ]
    assert held == ['{"x": 1}', "alone", '{"also": "alone"}', "0"]


def test_marks_become_transitions(recording: Recording) -> None:
    """Code without any known client gets transitions from its marks, as from model calls."""
    emit_observation("board", "start")
    emit_action("move", "e4")
    emit_reward(0.5)
    emit_observation("board", "after e5")
    emit_action("move", "d4")
    emit_reward("win", 1.0)
    emit_observation("board", "mate")

    (trajectory,) = recording.trajectories()
    first, second = trajectory.transitions

    def text(messages: Any) -> list[str]:
        return [message["parts"][0]["content"] for message in messages]

    assert (text(first.observation), text(first.action)) == (["start"], ["e4"])
    assert (text(second.observation), text(second.action)) == (["after e5"], ["d4"])
    assert (first.reward, second.reward, dict(second.rewards)) == (0.5, 1.0, {"win": 1.0})
    assert (first.done, second.done) == (False, True)
    assert second.next_observation is not None
    assert text(second.next_observation) == ["mate"]
    assert not any(c.REQUEST_MODEL in span.attributes for span in recording.spans())


def test_message_and_state_are_spans_with_their_text(recording: Recording) -> None:
    """Of a message its text; a state is one of three, with a message if there is one."""
    span_id = emit_message("hello", attributes={"level": "info"})
    emit_state("started")
    emit_state("failed", message="why")
    with pytest.raises(ConfigError, match="started, finished, failed"):
        emit_state("paused")  # type: ignore[arg-type]  # on purpose

    message, bare, told = recording.spans()[1:]
    assert (message.span_id, message.name) == (span_id, "agentlightning.message")
    assert own(message) == {"agentlightning.message.body": "hello", "level": "info"}
    assert bare.name == told.name == "lightning.state"
    assert own(bare) == {c.MARK_NAME: "started"}
    assert own(told) == {c.MARK_NAME: "failed", c.MESSAGE_BODY: "why"}


def test_exception_is_a_failed_span_with_its_stack(recording: Recording) -> None:
    """An exception has OpenTelemetry's keys; no secret of"""
    secret = "sk-" + "a1B2" * 8

    def tick(depth: int) -> None:
        if not depth:
            raise LookupError(f"{'no ' * 500}such key: {secret}")
        tock(depth)

    def tock(depth: int) -> None:  # two that take turns: Python shortens what only repeats itself
        tick(depth - 1)

    for depth in (0, 100):
        try:
            tick(depth)
        except LookupError as exc:
            span_id = emit_exception(exc)

    _, span, deep = recording.spans()
    assert deep.span_id == span_id
    stack = deep.attributes["exception.stacktrace"]
    assert len(stack) == 8192
    assert stack.endswith("no such key: [redacted:api_key]\n")
    assert span.name == "agentlightning.exception"
    assert span.status == "ERROR"
    assert span.attributes["exception.type"] == "LookupError"
    message = f"{'no ' * 500}such key: [redacted:api_key]"
    assert span.attributes["exception.message"] == message
    assert "test_exception_is_a_failed_span" in span.attributes["exception.stacktrace"]
    assert secret not in span.attributes["exception.stacktrace"]
    assert span.attributes["exception.escaped"] is False
    assert recording.spans()[0].status == "UNSET"


def test_span_holds_metadata_and_task_and_can_be_rewarded(store: Store) -> None:
    """An instant of one's own has an id that a later reward links to."""
    with auto_trace(store=store) as recording:
        span_id = emit_span(
            "prompt_optimization_code",
            metadata={"category": "code", "size": 3, "ok": True, "model": None, "nested": {"a": 1}},
            task_id="t1",
        )
    emit_reward(0.5, span_id=span_id, rollout_id=recording.rollout_id)

    span = last(recording)
    assert span.span_id == span_id
    assert span.name == "prompt_optimization_code"
    assert own(span) == {
        "category": "code",
        "size": 3,
        "ok": True,
        "model": "null",
        "nested": '{"a": 1}',
        "lightning.task.id": "t1",
    }
    (reward,) = Store().spans().rows()
    assert reward.attributes[f"{c.LINK_PREFIX}.0.value_match"] == span_id


@pytest.mark.pain(1)
def test_every_emitter_outside_a_recording_gives_none_and_says_so_once(
    warnings_in: Warnings,
) -> None:
    """Emitters in code that runs unrecorded do nothing but say so, once each."""
    for _ in range(2):
        given = [
            emit_reward(1.0),
            emit_reward("ok", 1.0),
            emit_message("m"),
            emit_object(1),
            emit_action("a"),
            emit_observation("o"),
            emit_state("started"),
            emit_exception(ValueError()),
            emit_span("s"),
        ]

        assert given == [None] * 8 + [""]
        assert given[-1].span_id is None  # type: ignore[union-attr]  # emit_span's

    assert len(warnings_in()) == 8
    with pytest.raises(ConfigError, match="name it: rollout_id="):
        emit_reward(1.0, match={"ticket": "T-1"})
    assert not Store().layout.exists()  # type: ignore[union-attr]  # the default store is local


def test_content_stays_out_where_the_user_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``NO_CONTENT`` spans are kept without what was said in them."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")
    with auto_trace(store=store, task="secret") as recording:
        emit_message("secret")
        emit_object("secret")
        emit_reward(1.0)

    assert "secret" not in repr(recording.spans())
    assert recording.spans()[-1].attributes[c.REWARD_VALUE] == 1.0

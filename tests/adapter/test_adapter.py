"""The adapter as a whole: its settings, what it makes of attempts and marks, what it may not do."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer
from tests.adapter.forest import (
    SECOND,
    Forest,
    answers,
    call_attributes,
    draw,
    paths,
    reward_attributes,
    text_of,
)

from lightning_otel import TripletAdapter
from lightning_otel.errors import ConfigError
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[((rule,), f"'{rule}'.*previous, last, discounted") for rule in ("next", "sibling")],
        *[(("discounted", gamma), "between 0 and 1") for gamma in (-0.1, 1.1)],
        (("discounted", float("nan")), "gamma is nan; it must be float"),
        (("previous", 0.5, len, None, None, None, "ok"), "reward is 'ok' beside compose=.*one of"),
        (
            ("previous", 0.5, TripletAdapter().compose, None, None, None, ""),
            "reward is empty; give the name",
        ),
    ],
)
def test_adapter_refuses_what_it_does_not_know(settings: tuple[str, float], message: str) -> None:
    """A rule that does not exist, and a discount that would make returns grow without bound."""
    with pytest.raises(ConfigError, match=message):
        TripletAdapter(*settings)  # type: ignore[arg-type]  # what a user may mistype


def test_transition_says_where_it_came_from() -> None:
    """Ids, times, model and usage are those of the call's span."""
    told = {
        c.REQUEST_MODEL: "asked", c.RESPONSE_MODEL: "answered", c.INPUT_TOKENS: 12,
        c.OUTPUT_TOKENS: 3, c.RESOURCE_VERSION: "prompt@4",
    }  # fmt: skip
    forest = Forest(rollout_id="r7", attempt_id="3")
    forest.make("chat", {**call_attributes("question", "answer", "chatcmpl-1"), **told})
    ((found,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert (found.rollout_id, found.attempt_id, found.agent) == ("r7", "3", "")
    assert (found.trace_id, found.start_ns, found.end_ns) == ("a" * 32, SECOND, 2 * SECOND)
    assert (found.model, found.response_id) == ("answered", "chatcmpl-1")
    assert (found.input_tokens, found.output_tokens) == (12, 3)
    assert found.resource_version == "prompt@4"


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        *[(["stop"], "stop"), (("length",), "length"), ("stop", "stop"), (["a", "b"], "a")],
        *[([], None), ([5], None), (5, None)],
    ],
)
def test_transition_takes_the_first_finish_reason(reasons: object, expected: str | None) -> None:
    """The first choice's reason counts; one that is no text is none."""
    forest = Forest()
    forest.tag(forest.call("a"), **{c.FINISH_REASONS: reasons})

    ((found,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert found.finish_reason == expected


# --- attempts; where rewards from elsewhere go, `test_credit.py` shows ---------------------------

ATTEMPTS = {
    "by the ids they name, else by trace": (
        "#rollout=,attempt=,trace=c a #rollout=r1,attempt=2,trace=b b #attempt=1 d",
        "cc.1 a, r1.2 b, r1.1 d",
    ),
    "a rollout in two traces": ("#trace=b a #trace=d b", "r1.1 a b"),
    "two rollouts in one trace": ("a #rollout=r2 b", "r1.1 a, r2.1 b"),
    "in the order they began": (
        "#rollout=r3,tick=30 a #rollout=r1,tick=20 b #rollout=r2,tick=10 d",
        "r2.1 d, r1.1 b, r3.1 a",
    ),
    "ids that are no text": (
        f"#rollout=,attempt= a@{c.ROLLOUT_ID}=7@{c.ATTEMPT_ID}=8",
        "aa.1 a",
    ),
}


@pytest.mark.parametrize(("drawing", "expected"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_spans_belong_to_attempts(drawing: str, expected: str) -> None:
    """The attempts with their calls, in the order they began."""
    found = TripletAdapter().adapt(draw(drawing).spans)

    told = [
        " ".join([f"{path.rollout_id[:2]}.{path.attempt_id}", *answers(path)]) for path in found
    ]
    assert ", ".join(told) == expected


def test_a_damaged_reward_stays_where_it_was_given() -> None:
    """It is reported there, whatever it names."""
    found = TripletAdapter().explain(draw("a@id=r1 #rollout=,attempt=,trace=b !NaN@id=r1").spans)

    assert (found.report.rollouts, found.report.rewards) == (2, 1)


# --- marks by hand -------------------------------------------------------------------------------

TRACKED = f"@{c.TRACK_ONLY}=A"

MARKS = {
    "each action answers what was seen since the one before": (
        "root( see:start do:left !.1 see:wall see:dark do:right !1 see:exit )",
        "start>left=0.1>wall dark, wall dark>right=1>exit.",
    ),
    "actions with nothing seen": ("do:a do:b", ">a>, >b>."),
    "each agent answers what it saw": (
        "A[ see:x B[ see:y do:b ] do:a ]",
        "y>b>., x>a>.",
    ),
    "beside model calls": (
        "A[ see:x a do:b ] B[ do:d ]",
        "go on>a>., >d>. ! 2 marked by hand beside model calls",
    ),
    "an agent that never acts": ("see:x", "! 1 idle"),
    "an action that never ended": ("do:a +do:b", ">a>. ! 1 incomplete"),
    "an observation that never ended": ("do:a +see:b", ">a>. ! 1 incomplete"),
    "an agent that is not tracked": (
        f"A[ do:a{TRACKED} ] B[ do:b{TRACKED} ]",
        ">a>. ! 1 not tracked",
    ),
}


@pytest.mark.parametrize(("drawing", "expected"), MARKS.values(), ids=MARKS)
def test_marks_become_transitions(drawing: str, expected: str) -> None:
    """Each is what was seen, what was done, and what was seen next; ``.`` where it is done."""
    found = TripletAdapter().explain(draw(drawing).spans)

    steps = [
        f"{text_of(step.observation)}>{text_of(step.action)}"
        f"{'' if step.reward is None else f'={step.reward:g}'}"
        f">{text_of(step.next_observation)}{'.' * step.done}"
        for path in found.trajectories
        for step in path.transitions
    ]
    dropped = [
        f"{count} {reason.partition(':')[0]}" for reason, count in found.report.reasons().items()
    ]
    assert " ! ".join(filter(None, (", ".join(steps), *dropped))) == expected.removeprefix("! ")
    assert {each.noun for each in found.report.dropped} <= {"mark"}


def test_marks_speak_as_agent_and_world() -> None:
    """An action is the assistant's message, an observation the user's; names and JSON stay."""
    forest = Forest()
    forest.make(c.SPAN_OBSERVATION, {c.OBJECT_JSON: '{"x": 1}', c.MARK_NAME: "board"})
    forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: "e4", c.MARK_NAME: "move"})

    ((step,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert step.observation == (
        {"role": "user", "parts": [{"type": "text", "content": '{"x": 1}'}], "name": "board"},
    )
    assert (step.action[0]["role"], step.action[0]["name"]) == ("assistant", "move")


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


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Keeps the spans."""
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("a.scope")


def test_adapter_takes_spans_of_the_sdk(exporter: InMemorySpanExporter, tracer: Tracer) -> None:
    """Spans as an exporter gets them give transitions, rewards and agents, also among ours."""
    agent = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "planner"}
    with tracer.start_as_current_span("invoke_agent planner", attributes=agent):
        with tracer.start_as_current_span("chat", attributes=call_attributes("hi", "yes", "id-1")):
            pass
        with tracer.start_as_current_span("reward", attributes=reward_attributes(0.5)):
            pass

    own = Span("a" * 32, "b" * 16, None, "chat", 1, 2, attributes=call_attributes("hi", "ours"))

    _, path = TripletAdapter().adapt([own, *exporter.get_finished_spans()])

    (step,) = path.transitions
    assert (path.agent, step.response_id, step.reward) == ("planner", "id-1", 0.5)
    assert step.trace_id == format(exporter.get_finished_spans()[0].context.trace_id, "032x")


def test_a_span_of_the_sdk_that_has_not_ended_is_incomplete(tracer: Tracer) -> None:
    """An open span has no end, and its call makes no transition."""
    span = tracer.start_span("chat", attributes=call_attributes("hi", "yes"))
    assert isinstance(span, ReadableSpan)

    found = TripletAdapter().explain([span])

    assert not found.trajectories
    assert found.report.reasons() == {"incomplete: the call never ended": 1}

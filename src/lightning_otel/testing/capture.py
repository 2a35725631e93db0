"""Capture of an agent in a test block, in memory: calls, tools, rewards, transitions."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Unpack

from opentelemetry import context as otel_context

from lightning_otel import capture, config
from lightning_otel.adapter.calls import observation_of
from lightning_otel.adapter.duplicates import DUPLICATE
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.messages import objects, parse_messages
from lightning_otel.messages.chat import messages_of
from lightning_otel.store.schema import build_span
from lightning_otel.store.transforms import remove_dropped
from lightning_otel.tracing import Options, Recording, auto_trace
from lightning_otel.types import Report, Reward, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.types.transitions import distinct_steps
from lightning_otel.types.values import parse_json
from lightning_otel.views.trace import Row, Trace, make_trace

_CELLS: Final = 60
_TWICE: Final = DUPLICATE.partition(":")[0]


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A request to a model, as a test asks about it.

    Attributes:
        model: The requested model, else the answering one.
        agent: The agent; empty where nobody is named.
        messages: The messages to the model, as the chat API writes them.
        text: Its first answer, without tool calls.
        tool_calls: Name and arguments of each tool call.
        tools: Names of the tools it was offered.
        input_tokens: As the server counted them; None if it did not.
        output_tokens: Likewise.
        reward: The step's reward; None if none.
        error: Why the call failed; empty if it did not.
        left_out: Why it is in no transition; empty if it is in one.
    """

    model: str
    agent: str
    messages: tuple[Mapping[str, Any], ...]
    text: str
    tool_calls: tuple[tuple[str, Any], ...]
    tools: tuple[str, ...]
    input_tokens: int | None
    output_tokens: int | None
    reward: float | None
    error: str
    left_out: str
    span: Span = field(repr=False)

    def __repr__(self) -> str:
        query = self.messages[-1].get("content") if self.messages else ""
        called = ", ".join(name for name, _ in self.tool_calls)
        text = self.error or (f"calls {called}" if called else self.text)
        lost = f", left out: {self.left_out}" if self.left_out else ""
        return f"<call of {self.model}: {_shorten_value(query)} → {_shorten_value(text)}{lost}>"


@dataclass(frozen=True, slots=True)
class CapturedTool:
    """A tool that ran.

    Attributes:
        agent: The agent that ran it; empty where nobody is named.
        arguments: Its arguments, if that was recorded.
        result: Its result, if that was recorded.
        error: Why it failed; empty if it did not.
    """

    name: str
    agent: str
    arguments: Any
    result: Any
    error: str
    span: Span = field(repr=False)


class Captured:
    """The capture so far; each property reads anew."""

    def __init__(self, recording: Recording, store: Store) -> None:
        self.recording = recording
        """The block's own rollout."""
        self.store = store
        """Where the spans are: in memory unless the test named a store."""

    @property
    def spans(self) -> list[Span]:
        """Every span, in order of its start, the block's own one first."""
        if self.store.layout is not None:
            return self.store.spans().rows()
        by_id: dict[tuple[str, str], Span] = {}
        # An end comes after its start, and counts more.
        for record in remove_dropped(self.store.writer().records((0, 0), "") or []):
            span = build_span(record)
            by_id[span.trace_id, span.span_id] = span
        return sorted(by_id.values(), key=lambda span: (span.start_ns, span.sequence))

    @property
    def calls(self) -> list[CapturedCall]:
        """Requests to models, in order of their start, each once whoever recorded it."""
        rows = self._find_rows("call")
        return [_make_call(row) for row in rows if not row.left_out.startswith(_TWICE)]

    @property
    def tools(self) -> list[CapturedTool]:
        """Tools that ran, where a framework ran them: those of a loop of one's own are not seen."""
        return [_make_tool(row) for row in self._find_rows("tool")]

    @property
    def rewards(self) -> list[Mapping[str, float]]:
        """The rewards that were given, in order, each by name, the primary one first."""
        read = [read_reward(row.span) for row in self._find_rows("reward")]
        return [reward.values for reward in read if isinstance(reward, Reward)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that a trainer would get."""
        return self._trace.trajectories

    @property
    def transitions(self) -> list[Transition]:
        """The steps of all trajectories, each once."""
        return distinct_steps(self.trajectories)

    @property
    def report(self) -> Report:
        """The report on calls and rewards, with a reason for each left out."""
        return self._trace.report

    def assert_complete(self) -> None:
        """Check that calls were made, each became a transition, and each reward found one.

        Raises:
            AssertionError: One did not; the message says which, and why.
        """
        report = self.report
        if not report.calls:
            raise AssertionError(
                "no call was captured; does the block call a model through a library that "
                f"lightning-otel knows? {self!r}"
            )
        if report.dropped:
            reasons = "; ".join(f"{count} × {why}" for why, count in report.reasons().items())
            raise AssertionError(f"not all is training data: {reasons}\n{self!r}")

    def __repr__(self) -> str:
        calls = self.calls
        lines = [f"<Captured {len(calls)} calls, {self.report.transitions} transitions"]
        lines += [f"  {call!r}" for call in calls]
        lines += [
            f"  <tool {tool.name}: {_shorten_value(tool.error or tool.result)}>"
            for tool in self.tools
        ]
        lines += [f"  <reward {dict(values)}>" for values in self.rewards]
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        from lightning_otel.views.picture import draw_trace

        return draw_trace(self._trace)

    @property
    def _trace(self) -> Trace:
        return make_trace(self.spans)

    def _find_rows(self, kind: str) -> list[Row]:
        rows = [row for row in self._trace.rows if row.kind == kind]
        return sorted(rows, key=lambda row: (row.span.start_ns, row.span.sequence))


class captured:  # noqa: N801  # used as a function
    """Capture what goes on in a block, for a test: ``with captured() as got: agent()``.

    That is all that this process does meanwhile, in any thread or task; concurrent blocks each keep
    their own. Nothing is written to the program's usual store, unless the program names it.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        """Prepare; options are those of :func:`auto_trace`, with a store in memory by default.

        Raises:
            ConfigError: Recording is switched off, so a test could only pass by accident.
        """
        if not config.is_enabled():
            raise ConfigError(
                f"nothing can be captured, as recording is switched off; unset "
                f"{config.ENABLED.name} OTEL_SDK_DISABLED"
            )
        store = options.get("store")
        self._store = store if isinstance(store, Store) else Store(store or ":memory:")
        settings: Options = {"name": "captured", **options, "store": self._store}
        self._traced = auto_trace(**settings)
        self._frame: capture.Frame | None = None

    def __enter__(self) -> Captured:
        recording = self._traced.__enter__()
        frame = capture.current_frame()
        if frame is None or not recording.rollout_id:
            self._traced.__exit__(None, None, None)
            raise ConfigError("nothing can be captured; see: lightning-otel doctor")
        self._frame = replace(frame, parent=otel_context.get_current())
        _open.add(self._frame)
        return Captured(recording, self._store)

    def __exit__(self, *exc: Any) -> None:
        if self._frame is not None:
            _open.remove(self._frame)
        self._traced.__exit__(*exc)

    async def __aenter__(self) -> Captured:
        return self.__enter__()

    async def __aexit__(self, *exc: Any) -> None:
        if self._frame is not None:
            _open.remove(self._frame)
        await self._traced.__aexit__(*exc)


class _Open:
    def __init__(self) -> None:
        # Guards: the process's frame is that of the last open block, else what it was before.
        self._lock = threading.Lock()
        self._frames: list[capture.Frame] = []
        self._before: capture.Frame | None = None

    def add(self, frame: capture.Frame) -> None:
        with self._lock:
            if not self._frames:
                self._before = capture.process.frame
            self._frames.append(frame)
            capture.process.frame = frame

    def remove(self, frame: capture.Frame) -> None:
        with self._lock:
            self._frames = [entry for entry in self._frames if entry is not frame]
            capture.process.frame = self._frames[-1] if self._frames else self._before


_open: Final = _Open()


def _make_call(row: Row) -> CapturedCall:
    attributes = row.span.attributes
    answered = parse_messages(attributes.get(c.OUTPUT_MESSAGES)) or ()
    parts = (answered[0].get("parts") or ()) if answered else ()
    return CapturedCall(
        model=str(attributes.get(c.REQUEST_MODEL) or attributes.get(c.RESPONSE_MODEL) or ""),
        agent=row.agent,
        messages=tuple(messages_of(observation_of(row.span))),
        text="".join(str(part.get("content")) for part in parts if part.get("type") == "text"),
        tool_calls=tuple(
            (str(part.get("name")), part.get("arguments"))
            for part in parts
            if part.get("type") == "tool_call"
        ),
        tools=tuple(
            str(tool.get("name"))
            for tool in objects(parse_json(attributes.get(c.TOOL_DEFINITIONS)))
        ),
        input_tokens=attributes.get(c.INPUT_TOKENS),
        output_tokens=attributes.get(c.OUTPUT_TOKENS),
        reward=row.step.reward if row.step is not None else None,
        error=_word_error(row.span),
        left_out=row.left_out,
        span=row.span,
    )


def _make_tool(row: Row) -> CapturedTool:
    attributes = row.span.attributes
    return CapturedTool(
        name=str(attributes.get(c.TOOL_NAME) or row.span.name),
        agent=row.agent,
        arguments=parse_json(attributes.get(c.TOOL_ARGUMENTS)),
        result=parse_json(attributes.get(c.TOOL_RESULT)),
        error=_word_error(row.span),
        span=row.span,
    )


def _word_error(span: Span) -> str:
    if span.status != "ERROR":
        return ""
    return str(span.attributes.get(c.ERROR_TYPE) or span.status_message or "error")


def _shorten_value(value: object) -> str:
    return repr(one_line(value, _CELLS)) if value else "nothing"

"""Teams: ``invoke_workflow`` around each run of one, and its agents under it.

AutoGen's runtime delivers messages in tasks of its own. What it delivers to a team belongs to the
run of that team, whatever context the runtime was started in.
"""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import agents, runs, said
from lightning_otel.instrumentors.doors import Within, named
from lightning_otel.instrumentors.reading import fields_of

_PLACE_KEY = otel_context.create_key("lightning-otel-autogen-place")

_running: dict[str, "TeamRun"] = {}


def running() -> int:
    """Count the running teams."""
    return len(_running)


class TeamRun(runs.Run):
    """A run of a team; known by the team's id until it is over."""

    def __init__(self, operation: capture.Operation, context: Context, team_id: str) -> None:
        super().__init__(operation, context)
        self._team_id = team_id
        self._last: Any = None

    def saw(self, item: Any) -> None:
        """Keep the result's last message, and why the team stopped."""
        held = fields_of(item)
        messages = held.get("messages")
        if not isinstance(messages, list) or "stop_reason" not in held:
            return
        self.is_complete = True
        if capture.content_policy().is_kept:
            if messages:
                self.operation.body[c.OUTPUT_MESSAGES] = said.answered(messages[-1])
            if isinstance(held["stop_reason"], str):
                self.operation.body[c.STOP_REASON] = held["stop_reason"]

    def stop(self) -> None:
        """End it."""
        self._forget_team()
        super().stop()

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised."""
        self._forget_team()
        super().fail(exc)

    def _forget_team(self) -> None:
        if _running.get(self._team_id) is self:
            del _running[self._team_id]


def begin_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TeamRun:
    """Begin the run of ``BaseGroupChat.run_stream``, which ``run`` goes through too."""
    name, team_id, task = args[0].name, args[0]._team_id, kwargs.get("task")
    operation = runs.start(
        c.INVOKE_WORKFLOW,
        name,
        {c.WORKFLOW_NAME: name},
        lambda: {c.INPUT_MESSAGES: said.given(task)},
    )
    run = TeamRun(operation, runs.inside(operation), team_id)
    # A team that is running refuses to run again: what it does still belongs to its first run.
    _running.setdefault(team_id, run)
    return run


def begin_delivery(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Within | None:
    """Run the method through which a part of a running team gets its messages in the team's."""
    part = args[0]
    run = _running.get(part.id.key)
    if run is None:
        return None
    # The run's own, not the current one: a span of AutoGen's messaging may be current there, which
    # belongs to whatever provider its runtime was built with.
    context = otel_context.set_value(_PLACE_KEY, Place(part), run.context)
    name, frame = getattr(part, "_name", None), capture.current_frame(context)
    if isinstance(name, str) and frame is not None:
        # Only a manager has a name here: what it asks to lead the team, it asks as an agent.
        stamps = {**frame.stamps, c.AGENT_NAME: name}
        context = capture.in_frame(replace(frame, stamps=stamps), context)
    return Within(context)


def _find_place() -> "Place | None":
    found = otel_context.get_value(_PLACE_KEY)
    return found if isinstance(found, Place) else None


def note_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep the message that leaves an agent's container."""
    place = _find_place()
    if place is not None and place.container is args[0]:
        place.last_said = named(("message",), args, kwargs).get("message")


def speak(
    agent_name: str, agent_description: str | None = None, agent_id: str | None = None
) -> "Speaking | None":
    """Return the replacement of AutoGen's own span of an agent's turn in a team."""
    place = _find_place()
    return None if place is None else Speaking(place, agent_name, agent_description, agent_id)


class Speaking(AbstractContextManager[Span]):
    """An agent's turn in a team, in place of AutoGen's span around it: it lies in one coroutine."""

    def __init__(
        self, place: "Place", name: str, description: str | None, agent_id: str | None
    ) -> None:
        held = fields_of(place.container)
        buffer = held.get("_message_buffer")
        given = list(buffer) if isinstance(buffer, list) else None
        operation = agents.start_agent(name, given, description, agent_id)
        context = agents.working(runs.inside(operation), held.get("_agent"))
        self._run = agents.AgentRun(operation, context)
        self._place = place
        self._attached = capture.attached(context)

    def __enter__(self) -> Span:
        self._attached.__enter__()
        return self._run.operation.span

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self._attached.__exit__()
        if exc is not None:
            capture.guarded(self._run.fail, exc)
            return
        # What it said last, it said as its answer.
        last, self._place.last_said = self._place.last_said, None
        if last is not None:
            capture.guarded(self._run.answered, last)
        capture.guarded(self._run.stop)


class Place:
    """The recipient of a team's message: a participant's container, or the team's manager.

    Attributes:
        last_said: The last message its agent gave in this turn.
    """

    __slots__ = ("_container", "last_said")

    def __init__(self, container: object) -> None:
        # Weakly: an open connection keeps the context it was made in, and that keeps this.
        self._container = weakref.ref(container)
        self.last_said: Any = None

    @property
    def container(self) -> object | None:
        """AutoGen's object there."""
        return self._container()

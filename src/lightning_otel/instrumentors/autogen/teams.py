"""Teams: ``invoke_workflow`` around each run of one, and its agents under it.

AutoGen's runtime delivers messages in tasks of its own. What it delivers to a team belongs to the
run of that team, whatever context the runtime was started in.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said, turns
from lightning_otel.instrumentors.autogen.agents import IsWanted, Spans
from lightning_otel.instrumentors.autogen.turns import Place
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
    team, task = args[0], kwargs.get("task")
    name, team_id = team.name, team._team_id
    given = said.given(task) if capture.content_policy().is_kept else None
    operation = runs.start(
        f"{c.INVOKE_WORKFLOW} {name}",
        {c.OPERATION: c.INVOKE_WORKFLOW, c.WORKFLOW_NAME: name},
        {} if given is None else {c.INPUT_MESSAGES: given},
    )
    run = TeamRun(operation, runs.inside(operation), team_id)
    # A team that is running refuses to run again: what it does still belongs to its first run.
    _running.setdefault(team_id, run)
    return run


def begin_delivery(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Within | None:
    """Run the method through which a part of a running team gets its messages in the team's."""
    context = _delivery_context(args[0])
    return None if context is None else Within(context)


def _delivery_context(part: Any) -> Context | None:
    """The context of what a part of a running team does; None if the team's run is not known."""
    run = _running.get(part.id.key)
    if run is None:
        return None
    # The run's own, not the current one: a span of AutoGen's messaging may be current there, which
    # belongs to whatever provider its runtime was built with.
    context = otel_context.set_value(_PLACE_KEY, Place(part), run.context)
    name, frame = getattr(part, "_name", None), capture.current_frame(context)
    if not isinstance(name, str) or frame is None:
        return context
    # Only a manager has a name here: what it asks to lead the team, it asks as an agent.
    return capture.in_frame(replace(frame, stamps={**frame.stamps, c.AGENT_NAME: name}), context)


def _find_place() -> Place | None:
    found = otel_context.get_value(_PLACE_KEY)
    return found if isinstance(found, Place) else None


def note_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep the message that leaves an agent's container."""
    place = _find_place()
    if place is not None and place.container is args[0]:
        place.last_said = named(("message",), args, kwargs).get("message")


def native_span(is_wanted: IsWanted) -> Callable[[Spans], Spans]:
    """Return the replacement of AutoGen's own span of an agent's turn in a team."""

    def make(original: Spans) -> Spans:
        def trace_invoke_agent_span(agent_name: str, **kwargs: Any) -> AbstractContextManager[Span]:
            found = capture.guarded(_speaker_turn, agent_name, kwargs) if is_wanted() else None
            return original(agent_name, **kwargs) if found is None else found

        return trace_invoke_agent_span

    return make


def _speaker_turn(name: str, kwargs: dict[str, Any]) -> AbstractContextManager[Span] | None:
    place = _find_place()
    if place is None:
        return None
    return turns.Speaking(place, name, kwargs.get("agent_description"), kwargs.get("agent_id"))

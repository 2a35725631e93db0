"""An agent's turn in a team: ``invoke_agent`` in place of AutoGen's own span around it."""

import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry.trace import Span

from lightning_otel import capture
from lightning_otel.instrumentors.autogen import agents, runs, said
from lightning_otel.instrumentors.reading import fields_of


class Speaking(AbstractContextManager[Span]):
    """An agent's turn in a team, in place of AutoGen's span around it: it lies in one coroutine."""

    def __init__(
        self, place: "Place", name: str, description: str | None, agent_id: str | None
    ) -> None:
        """Start it.

        Args:
            place: Where the team's runtime called the agent.
            name: The agent's name.
            description: What it is for.
            agent_id: Its id in the runtime.
        """
        agent = fields_of(place.container).get("_agent")
        buffer = fields_of(place.container).get("_message_buffer")
        given = said.given(list(buffer)) if isinstance(buffer, list) and _keeps_content() else None
        operation = agents.begun(given, name=name, description=description, agent_id=agent_id)
        self._run = agents.AgentRun(operation, agents.working(runs.inside(operation), agent))
        self._place = place
        self._attached = capture.attached(self._run.context)

    def __enter__(self) -> Span:
        self._attached.__enter__()
        return self._run.operation.span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attached.__exit__()
        if exc is None:
            # What it said last, it said as its answer.
            capture.guarded(self._keep_message)
            capture.guarded(self._run.stop)
        else:
            capture.guarded(self._run.fail, exc)

    def _keep_message(self) -> None:
        last, self._place.last_said = self._place.last_said, None
        if last is not None:
            self._run.answered(last)


def _keeps_content() -> bool:
    return capture.content_policy().is_kept


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

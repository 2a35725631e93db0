"""Names that complete an argument or option: of what stands in the store, or is installed.

A type a kind of name; a command that takes such a name says so by its type.
"""

import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.state import State

_MOST_COMPLETED: Final = 50
_WORD: Final = re.compile(r"[\w@.:~+/-]+", re.ASCII)


class StoredName(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """A name that may stand in the store on this disk, whose own names complete it."""

    def __init__(
        self,
        name: str,
        read: Callable[["Store"], Iterable[Any]],
        *words: str,
        is_stored: bool = True,
    ) -> None:
        """Complete by words and what ``read`` gives; ``is_stored``: only if the store exists."""
        self.name = name
        self._read = read
        self._words = words
        self._is_stored = is_stored

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin so."""
        from lightning_otel.dataset import Store
        from lightning_otel.errors import LightningOtelError

        names = list(self._words)
        logging.disable()  # a shell would show it in the line that is being written
        try:
            opened = Store(ctx.params.get("store"))
            is_there = opened.layout is not None and opened.layout.exists()
            if is_there or not self._is_stored:
                names += map(str, self._read(opened))
        except (LightningOtelError, OSError):
            pass
        # A shell puts them into the line as they are: what it would take for more than a word is
        # not offered, as agents and ids are named by whoever was recorded.
        matches = [name for name in names if name.startswith(incomplete) and _WORD.fullmatch(name)]
        return [CompletionItem(match) for match in matches[:_MOST_COMPLETED]]


def _column(name: str, view: str, order: str = "1") -> Callable[["Store"], Iterable[Any]]:
    query = f"SELECT {name} AS v FROM {view} WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY {order}"
    return lambda store: (row["v"] for row in store.sql(query))


def _of_state(read: Callable[["State"], Iterable[Any]]) -> Callable[["Store"], Iterable[Any]]:
    def read_state(store: "Store") -> Iterable[Any]:
        from lightning_otel.state import State

        state = State.beside(store)
        return read(state) if state.is_made else ()

    return read_state


def _list_resources(state: "State") -> Iterable[str]:
    from lightning_otel.resources import Resources

    return Resources(state).names()


def _list_runs(state: "State") -> Iterable[str]:
    from lightning_otel.state.runs import Runs

    return [run.run_id for run in Runs(state).all()][::-1]


def _list_queued(state: "State") -> Iterable[str]:
    from lightning_otel.state.queue import Queue

    return [rollout.rollout_id for rollout in Queue(state).rollouts()][::-1]


def _list_metrics(store: "Store") -> Iterable[str]:
    from lightning_otel.views.plot.queries import METRICS
    from lightning_otel.views.plot.runs import logged_metrics

    return [*METRICS, *_of_state(lambda state: logged_metrics(state, ()))(store)]


def _list_algorithms(_: "Store") -> Iterable[str]:
    from lightning_otel import algorithms

    return algorithms.names()


ID: Final = StoredName("ID", _column("rollout_id", "rollouts", "max(start_ns) DESC"), "@last")
"""The beginning of an id, ``@last``, ``@last~2``."""
AGENT: Final = StoredName("PATTERN", _column("agent", "spans"))
"""An agent's name, or a pattern of names."""
AGENT_NAME: Final = StoredName("NAME", _column("agent", "spans"))
MODEL: Final = StoredName("NAME", _column("model", "calls"))
TOOL: Final = StoredName("NAME", _column("name", "tools"))
REWARD: Final = StoredName("NAME", _column("name", "rewards"))
RESOURCE: Final = StoredName("NAME", _of_state(_list_resources))
RUN: Final = StoredName("RUN", _of_state(_list_runs), "@last")
"""A training run's id, or ``@last``."""
QUEUED: Final = StoredName("ROLLOUT", _of_state(_list_queued), "@last")
"""The id of a rollout in the queue."""
ALGORITHM: Final = StoredName("ALGORITHM", _list_algorithms, is_stored=False)
METRIC: Final = StoredName("METRIC", _list_metrics, is_stored=False)
"""A curve of rollouts, or a metric that a run logged."""

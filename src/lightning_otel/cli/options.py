"""Options and arguments that commands share: forms of data, times, ids, and what completes them."""

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from lightning_otel.store import Store

F = TypeVar("F", bound=Callable[..., Any])
Form = Literal["json", "jsonl", "csv"]
"""How data is printed for machines; for people, where none is asked for."""

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_COMPLETED: Final = 50
_WORD: Final = re.compile(r"[\w@.:~+/-]+", re.ASCII)


def age_seconds(text: str) -> float | None:
    """The seconds that ``10m``, ``2h`` or ``30d`` says; None if it says none."""
    found = _AGE.fullmatch(text.strip())
    return float(found[1]) * _SECONDS[found[2]] if found else None


def rows_options(function: F) -> F:
    """Adds ``--json``, ``--jsonl`` and ``--csv``, of which the last one counts, as ``form``."""
    for form, text in (
        ("csv", "Comma-separated values."),
        ("jsonl", "One JSON object a line."),
        ("json", "One JSON document."),
    ):
        function = click.option(f"--{form}", "form", flag_value=form, help=text)(function)
    return function


class When(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """A point in time as Unix nanoseconds: ``10m`` ago, a date, a date and time, such a number."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The time that a text names."""
        from lightning_otel.adapter.selection import Selection
        from lightning_otel.errors import ConfigError

        if isinstance(value, int):
            return value
        text = str(value).strip()
        if (passed_s := age_seconds(text)) is not None:
            return time.time_ns() - int(passed_s * 1e9)
        if text.isdecimal() and len(text) > len("20261101"):
            return int(text)
        try:
            found = Selection.of({"since": text}).since_ns
        except ConfigError:
            found = None
        if found is None:
            self.fail(
                f"{text!r} is no time; write 10m, 2h or 7d for so long ago, 2026-11-01, "
                "2026-11-01T12:00:00Z, or Unix nanoseconds",
                param, ctx,
            )  # fmt: skip
        return found


class Id(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """What stands for something stored: the beginning of an id, ``@last``, ``@last~2``."""

    name = "ID"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Rollouts of the store, the newest first, that begin so."""
        found = _completed(ctx, "SELECT rollout_id AS v FROM rollouts ORDER BY start_ns DESC")
        return _beginning(["@last", *found], incomplete)


class Agent(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """An agent's name, or a pattern of names."""

    name = "PATTERN"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Agents of the store."""
        query = "SELECT DISTINCT agent AS v FROM spans WHERE agent IS NOT NULL ORDER BY 1"
        return _beginning(_completed(ctx, query), incomplete)


def _beginning(values: list[str], incomplete: str) -> list[CompletionItem]:
    # A shell puts them into the line as they are: what it would take for more than a word is not
    # offered, as agents and ids are named by whoever was recorded.
    found = [each for each in values if each.startswith(incomplete) and _WORD.fullmatch(each)]
    return [CompletionItem(each) for each in found[:_MOST_COMPLETED]]


def _completed(ctx: click.Context, query: str) -> list[str]:
    """Values from the store on this disk; none where there is none, or it cannot be read."""
    from lightning_otel.errors import LightningOtelError
    from lightning_otel.store import Store

    try:
        opened = Store(ctx.params.get("store"))
        if opened.layout is None or not opened.layout.exists():
            return []
        return [str(row["v"]) for row in opened.sql(query)]
    except (LightningOtelError, OSError):
        return []


def when_options(function: F) -> F:
    """Adds ``--since`` and ``--until``."""
    until = click.option(
        "--until", type=When(), metavar="TIME", help="Only rollouts that began before."
    )
    since = click.option(
        "--since", type=When(), metavar="TIME",
        help="Only rollouts that began then or later: 10m, 2h, 2026-11-01.",
    )  # fmt: skip
    return since(until(function))


rollout_option = click.option(
    "--rollout", type=Id(), metavar="ID", help="Only this one; a prefix, @last or @last~2."
)


@overload
def rollout_id_of(opened: "Store", target: str) -> str: ...
@overload
def rollout_id_of(opened: "Store", target: str | None) -> str | None: ...
def rollout_id_of(opened: "Store", target: str | None) -> str | None:
    """The rollout that an id, the beginning of one or ``@last`` stands for; None if none is named.

    Raises:
        NotFoundError: Nothing has such an id, or several have.
    """
    if target is None:
        return None
    noun, whole = opened.find(target)
    return whole if noun == "rollout" else opened.rollout_of(noun, whole)

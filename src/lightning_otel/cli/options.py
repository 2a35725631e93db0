"""Options and arguments that commands share: formats, times, ids, functions."""

import importlib
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, overload

import click

from lightning_otel.cli.names import AGENT, AGENT_NAME, ID, MODEL, REWARD, TOOL
from lightning_otel.errors import ConfigError
from lightning_otel.types.instants import instant_ns
from lightning_otel.views.table import WHEN, Filter

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.store.follow import Follower

F = TypeVar("F", bound=Callable[..., Any])
Form = Literal["json", "jsonl", "csv"]
"""How data is printed for machines; for people, where none is asked for."""

_ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_STEP_S: Final = 0.02


def _inherit_store(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    above: click.Context | None = ctx
    while not value and (above := above.parent if above else None) is not None:
        value = above.params.get("store")
    return value


store_option = click.option("--store", metavar="PATH", hidden=True, callback=_inherit_store)
"""Adds ``--store``, which help shows once, with the group."""


def format_option(function: F) -> F:
    """Add ``--format`` as ``form``, and its older spellings ``--json``, ``--jsonl``, ``--csv``."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return None if value == "table" else value

    for form in ("csv", "jsonl", "json"):
        flag = click.option(f"--{form}", "form", flag_value=form, hidden=True, callback=read)
        function = flag(function)
    return click.option(
        "--format", "form", type=click.Choice(["table", "json", "jsonl", "csv"]), callback=read,
        help="Output format; --json is short for --format json.",
    )(function)  # fmt: skip


class When(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """A point in time as Unix nanoseconds, of this machine's zone where it names none."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The time that a text names."""
        try:
            return instant_ns(value)
        except ConfigError as exc:
            self.fail(str(exc), param, ctx)


COUNT: Final = click.IntRange(1, 1_000_000_000)
"""A number of things, which any database can take."""
_KINDS: Final[Mapping[type, Any]] = {
    date: When(), int: int, str: str, float: float, bool: bool, tuple: str
}  # fmt: skip
_NAMED: Final[Mapping[str, Any]] = {
    "agent": AGENT_NAME, "agents": AGENT, "model": MODEL, "reward": REWARD, "rollout_id": ID,
    "tool": TOOL,
}  # fmt: skip
"""Options whose values the store completes."""
_SHORT: Final = {"rollout_id": "--rollout", "include_incomplete": "--incomplete"}
"""Other spellings of options."""


class SignalStop:
    """Ctrl-C and SIGTERM, which set it, stop a follower, and do nothing else.

    No lock is taken: a signal may come in the midst of a wait, or of another signal.
    """

    follower: "Follower | None" = None
    _is_set = False

    def is_set(self) -> bool:
        """Return whether a signal came."""
        return self._is_set

    def clear(self) -> None:
        """Forget it."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Wait some seconds; return whether a signal came."""
        until_s = time.monotonic() + timeout
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _STEP_S))
        return self._is_set

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop_on_signal) for number in _ENDING}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop_on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True
        if self.follower is not None:
            self.follower.stop()


def filter_options(filters: Mapping[str, Filter]) -> Callable[[F], F]:
    """Return what adds filters as options; each comes as a keyword of its name."""

    def add(function: F) -> F:
        for name, option in reversed([*filters.items()]):
            flags = [f"--{name.replace('_', '-')}", *filter(None, [_SHORT.get(name)])]
            if option.kind is bool:
                flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
            kind = click.Choice(option.choices) if option.choices else _KINDS.get(option.kind, str)
            function = click.option(
                *flags, name, type=_NAMED.get(name, kind), default=None,
                multiple=option.kind is tuple, help=option.help,
            )(function)  # fmt: skip
        return function

    return add


when_options: Final = filter_options(WHEN)
"""Adds ``--since`` and ``--until``."""

rollout_option = click.option(
    "--rollout",
    "--rollout-id",
    type=ID,
    metavar="ID",
    help="Only this one; a prefix, @last or @last~2.",
)


@overload
def find_rollout_id(opened: "Store", target: str) -> str: ...
@overload
def find_rollout_id(opened: "Store", target: str | None) -> str | None: ...
def find_rollout_id(opened: "Store", target: str | None) -> str | None:
    """Return the rollout that an id, its beginning or ``@last`` stands for; None if none is named.

    Raises:
        NotFoundError: Nothing has such an id, or several have.
    """
    if target is None:
        return None
    return opened.rollout_of(*opened.find(target))


def load_named(reference: str, noun: Literal["function", "agent"] = "function") -> Any:
    """Return the function or agent that ``FILE.py:NAME`` or ``MODULE:NAME`` names.

    Its folder, or the working one, stays first on ``sys.path``, also for processes that it starts.

    Raises:
        ConfigError: There is none, or what it stands in cannot be loaded.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{reference!r} names no {noun}; write it as MODULE:NAME or FILE.py:NAME")
    try:
        module = _load_module(place)
    except ConfigError:  # says itself what to do
        raise
    except Exception as exc:  # somebody else's code may raise anything
        raise ConfigError(
            f"cannot load {reference!r}: {type(exc).__name__}: {exc}; does {place} run by itself?"
        ) from exc
    member: Any = getattr(module, name, None)
    if member is None or (noun == "function" and not callable(member)):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        )
        raise ConfigError(
            f"there is no {noun} {name!r} in {place}; there are: {', '.join(functions) or 'none'}"
        )
    return member


def _load_module(place: str) -> Any:
    path = Path(place)
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    if not path.is_file():
        raise ConfigError(f"there is no file {place}; write FILE.py:FUNCTION")
    sys.path.insert(0, str(path.resolve().parent))
    # Not by its own name: a rewards file called json.py shall hide nothing.
    spec = importlib.util.spec_from_file_location(f"functions_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

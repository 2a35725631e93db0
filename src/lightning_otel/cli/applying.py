"""``apply-rewards``: a reward function of one's own over what is stored."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.options import rollout_id_of, rollout_option, rows_options, when_options
from lightning_otel.cli.output import (
    count_noun,
    print_json,
    print_rows,
    progress_bar,
    store_option,
    suggest,
    talk,
)
from lightning_otel.cli.waiting import give_waiting
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.rewarding import Applied, Judgement

_MOST_NAMED: Final = 5
_COLUMNS: Final = ("rollout_id", "attempt_id", "agent", "rewards", "failure")


@click.command("apply-rewards")
@click.argument("function", metavar="FILE.py:FUNCTION")
@rollout_option
@when_options
@click.option("--version", "version", default="", metavar="NAME",
              help="Judge all anew, as FUNCTION@NAME.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what it would give, and keep nothing.")
@rows_options
@store_option
def apply_rewards(function: str, version: str, store: str | None, **given: Any) -> int:
    """Have a reward function judge every ended rollout that it has not judged yet.

    FUNCTION asks for what it needs by the names of its parameters: task, answer, trajectory,
    trajectories, rewards, rollout. It gives a number, numbers by name, or None. A module's name may
    stand for FILE.py. Exits with 1 if it raised anywhere; the other rewards are kept.
    """
    from lightning_otel.dataset import Store
    from lightning_otel.rewarding import apply_rewards as apply

    judge = _load_function(function)
    opened = Store(store)
    rows = _Rows(is_dry_run=given["dry_run"])
    rollout_id = rollout_id_of(opened, given["rollout"])
    if not given["dry_run"]:
        give_waiting(opened)
    with progress_bar("attempts") as progress:
        done = apply(
            opened,
            judge,
            version=version,
            is_dry_run=given["dry_run"],
            told=rows.take,
            progress=progress,
            rollout_id=rollout_id,
            since=given["since"],
            until=given["until"],
        )
    if given["form"] == "json":
        print_json({**_make_document(done), "dry_run": given["dry_run"], "judgements": rows.kept})
    elif given["dry_run"]:
        print_rows(rows.kept, _COLUMNS, form=given["form"])
    for line in _word_results(done, is_dry_run=given["dry_run"]):
        talk(line)
    for line in rows.failures[:_MOST_NAMED]:
        talk(f"  {line}")
    if done.rewards and not given["dry_run"]:
        suggest("export triplets", store)
    return 1 if done.failed else 0


class _Rows:
    """A function's judgements: all of them on a dry run, else only failures."""

    def __init__(self, *, is_dry_run: bool) -> None:
        self._is_dry_run = is_dry_run
        self.kept: list[Mapping[str, Any]] = []
        self.failures: list[str] = []

    def take(self, judgement: "Judgement") -> None:
        """Keep a judgement."""
        if judgement.failure and len(self.failures) < _MOST_NAMED:
            self.failures.append(f"rollout {judgement.rollout_id}: {judgement.failure}")
        if self._is_dry_run:
            found = judgement._asdict()
            self.kept.append({"rewards": found.pop("values"), **found})


def _make_document(done: "Applied") -> Mapping[str, Any]:
    return {
        "function": done.name,
        "version": done.version,
        "rewards": done.rewards,
        "mean": done.mean,
        "attempts": done.attempts,
        "held": done.held,
        "changed": done.changed,
        "none": done.none,
        "running": done.running,
        "stepless": done.stepless,
        "failed": dict(done.failed),
    }


def _word_results(done: "Applied", *, is_dry_run: bool) -> Iterator[str]:
    """Word the results of all attempts."""
    mean = "" if done.mean is None else f", mean {done.mean:.3g}"
    behind = f"@{done.version}" if done.version else ""
    where = " (dry run: nothing was kept)" if is_dry_run else ""
    yield (
        f"⚡ {done.name}{behind}: {count_noun(done.rewards, 'reward')}{mean}, of "
        f"{count_noun(done.attempts, 'attempt')}{where}"
    )
    if done.held:
        yield f"  {done.held} judged by it before"
    if done.changed:
        yield (
            f"  {done.changed} of them when its text was another; "
            "--version 2 judges all anew, beside those"
        )
    if done.none:
        yield f"  {done.none} of which it said nothing"
    if done.running:
        yield f"  {done.running} still running; do it again later"
    for kind, number in done.failed.most_common():
        yield f"  failed: {number} × {kind}"
    if done.stepless:
        yield (
            f"  {done.stepless} without a step, and so not judged; emit_observation and "
            "emit_action make one"
        )
    if not done.attempts:
        yield "  no rollout here has a transition; see: lightning-otel stats"


def _load_function(named: str) -> Callable[..., object]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names.

    Raises:
        ConfigError: There is none, or what it stands in cannot be loaded.
    """
    place, mark, name = named.rpartition(":")
    if not mark or not place or not name:
        raise ConfigError(f"{named!r} names no function; write rewards.py:exact_match")
    module = _load_module(place)
    found: Any = getattr(module, name, None)
    if not callable(found):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        )
        raise ConfigError(
            f"there is no function {name!r} in {place}; there are: {', '.join(functions) or 'none'}"
        )
    function: Callable[..., object] = found
    return function


def _load_module(place: str) -> Any:
    path = Path(place)
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise ConfigError(f"there is no file {place}; write FILE.py:FUNCTION")
    # What it imports may stand beside it.
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        if not is_file:
            return importlib.import_module(place)
        # Not by its own name: a rewards file called json.py shall hide nothing.
        spec = importlib.util.spec_from_file_location(f"rewards_of_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{place} cannot be loaded; write FILE.py:FUNCTION")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as exc:  # somebody else's code may raise anything
        raise ConfigError(
            f"{place} cannot be loaded: {type(exc).__name__}: {exc}; does it run by itself?"
        ) from exc
    return module

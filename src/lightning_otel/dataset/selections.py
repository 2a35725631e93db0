"""Selections: filters saved under a name, in versions that freeze their steps and rewards.

A version is a file in the store's folder that nothing changes. It is read as of its moment: what
was recorded, rewarded or retracted later does not count.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import orjson

from lightning_otel.errors import ConfigError, NotFoundError, StoreError, disk_remedy
from lightning_otel.store.files import make_private, write_private
from lightning_otel.types.values import check_types, suggest_name

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VERSION: Final = re.compile(rf"({_NAME.pattern})@([1-9][0-9]*)")
_FREE: Final = frozenset({"advantage", "adapter"})
"""Options of transitions that may stand beside a selection: they choose no step or reward."""
_RELATIVE: Final = ("since", "until", "rollout_id")
"""Options that chose rollouts, which a version names."""
_EXPORTS: Final = "exports.ndjson"
_LATEST: Final = "SELECT coalesce(max(start_ns), 0) AS latest_ns FROM spans"
_LABELLED: Final = "SELECT DISTINCT rollout_id FROM rewards WHERE author IS NOT NULL"


@dataclass(frozen=True, slots=True)
class SelectionVersion:
    """A version of a saved selection.

    Attributes:
        version: Its number, from 1.
        options: As :meth:`Store.transitions` takes them.
        source: The page that it was saved from; empty without one.
        created_ns: When it was saved, Unix nanoseconds.
        as_of_ns: The start of the latest span that counts.
        steps: The reward of each step by its span's id; None without one.
    """

    name: str
    version: int
    options: Mapping[str, Any]
    source: str
    created_ns: int
    as_of_ns: int
    rollouts: Sequence[str]
    steps: Mapping[str, float | None] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def make_keywords(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return its options as of its moment, with others that choose no step or reward."""
        if wrong := sorted(others.keys() - _FREE):
            raise ConfigError(
                f"{self} has its own steps and rewards; leave out {', '.join(wrong)}, or save "
                "another selection"
            )
        fixed = {name: value for name, value in self.options.items() if name not in _RELATIVE}
        return {**fixed, **others}


class SelectionDiff(NamedTuple):
    """Span ids of the steps that differ, and both rewards of what changed."""

    added: list[str]
    gone: list[str]
    changed: dict[str, tuple[float | None, float | None]]

    @classmethod
    def of(cls, a: SelectionVersion, b: SelectionVersion) -> Self:
        """Compare two versions."""
        pairs = {
            span_id: (a.steps[span_id], b.steps[span_id]) for span_id in a.steps.keys() & b.steps
        }
        return cls(
            [span_id for span_id in b.steps if span_id not in a.steps],
            [span_id for span_id in a.steps if span_id not in b.steps],
            {span_id: pair for span_id, pair in sorted(pairs.items()) if pair[0] != pair[1]},
        )

    def __str__(self) -> str:
        counts = {"added": self.added, "gone": self.gone, "with another reward": self.changed}
        return ", ".join(f"{len(steps):,} {words}" for words, steps in counts.items())


def list_versions(store: "Store") -> dict[str, list[int]]:
    """Return the numbers of the versions of each selection, by name."""
    versions: dict[str, list[int]] = {}
    for path in sorted(_find_folder(store).glob("*@*.json")):
        if match := _VERSION.fullmatch(path.stem):
            versions.setdefault(match[1], []).append(int(match[2]))
    return {name: sorted(numbers) for name, numbers in versions.items()}


def read_version(store: "Store", reference: str) -> SelectionVersion:
    """Read ``NAME@N``, or the newest version of ``NAME``."""
    check_types({"selection": reference}, {"selection": str})
    versions = list_versions(store)
    name, mark, number = reference.partition("@")
    if name not in versions:
        advice = suggest_name(name, [*versions]) if versions else "save one first"
        raise NotFoundError(f"there is no selection {name!r}; {advice}")
    if mark and number not in map(str, versions[name]):
        known = ", ".join(f"{name}@{version}" for version in versions[name][-5:])
        raise NotFoundError(f"there is no selection {reference!r}; there are {known}")
    return _read_file(store, f"{name}@{number or versions[name][-1]}")


def list_newest(store: "Store") -> list[SelectionVersion]:
    """Return the newest version of each selection, by name."""
    versions = list_versions(store)
    return [_read_file(store, f"{name}@{numbers[-1]}") for name, numbers in versions.items()]


def _read_file(store: "Store", reference: str) -> SelectionVersion:
    path = _find_folder(store) / f"{reference}.json"
    try:
        return SelectionVersion(**orjson.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as exc:
        raise StoreError(f"{path} cannot be read ({exc}); save the selection again") from exc


def _read_sound(store: "Store", reference: str) -> SelectionVersion | None:
    with suppress(StoreError):
        return _read_file(store, reference)
    return None


def save_version(
    store: "Store", name: str, options: Mapping[str, Any], source: str = ""
) -> SelectionVersion:
    """Save what options select now as the next version; the newest stays if it is the same.

    Raises:
        ConfigError: The name or an option cannot be saved, no step matches, or labels leave open
            which reward counts.
    """
    from lightning_otel.store.source import at_moment

    if "selection" in options:
        raise ConfigError("a selection is saved already; save other options, or export it")
    check_types({"name": name}, {"name": str})
    if not _NAME.fullmatch(name):
        raise ConfigError(f"no selection can be named {name!r}; use letters, digits, _, . and -")
    moment = at_moment(store)
    steps = list(moment.transitions(bodies=False, **options))
    if not steps:
        raise ConfigError("no step matches; nothing was saved")
    _check_reward(moment, steps, options)
    (latest,) = moment.sql(_LATEST).dicts()
    version = SelectionVersion(
        name, 1, _check_options(options), source, time.time_ns(), latest["latest_ns"],
        sorted({step.rollout_id for step in steps}), {step.span_id: step.reward for step in steps},
    )  # fmt: skip
    return _write_version(store, version)


def _write_version(store: "Store", version: SelectionVersion) -> SelectionVersion:
    folder, row = _find_folder(store), asdict(version)
    while True:
        numbers = list_versions(store).get(version.name, [0])
        newest = _read_sound(store, f"{version.name}@{numbers[-1]}") if numbers[-1] else None
        if newest and (newest.options, newest.steps) == (row["options"], row["steps"]):
            return newest
        reference = f"{version.name}@{numbers[-1] + 1}"
        try:
            _make_file(folder, reference, {**row, "version": numbers[-1] + 1})
        except FileExistsError:
            continue  # somebody else saved this number
        except OSError as exc:
            raise StoreError(
                f"{folder} refuses it: {exc.strerror or exc}; "
                + disk_remedy(exc, "see: lightning-otel doctor")
            ) from exc
        return read_version(store, reference)


def _make_file(folder: Path, reference: str, row: Mapping[str, Any]) -> None:
    make_private(folder)
    draft = folder / f".{os.urandom(8).hex()}"
    write_private(draft, orjson.dumps(row), is_synced=True)
    try:
        os.link(draft, folder / f"{reference}.json")  # whole, or not at all; in no other's place
    finally:
        draft.unlink()


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = orjson.loads(
            orjson.dumps(dict(options), option=orjson.OPT_PASSTHROUGH_DATACLASS)
        )
    except TypeError as exc:
        raise ConfigError(f"an option is no plain value and cannot be saved: {exc}") from exc
    return saved


def _check_reward(store: "Store", steps: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse steps with labels and several rewards where none of these is chosen."""
    reward = options.get("reward")
    names = sorted({name for step in steps for name in step.rewards})
    if reward is not None and reward not in names:
        raise ConfigError(f"no step has the reward {reward!r}; {suggest_name(reward, names)}")
    labelled = {row["rollout_id"] for row in store.sql(_LABELLED)}
    is_open = reward is None and "compose" not in options and len(names) > 1
    if is_open and not labelled.isdisjoint(step.rollout_id for step in steps):
        raise ConfigError(
            f"its steps have labels and rewards of several names ({', '.join(names)}); say which "
            "one counts as the reward"
        )


def check_frozen(store: "Store", version: SelectionVersion) -> None:
    """Refuse a version whose steps are gone or have other rewards."""
    steps = store.transitions(bodies=False, selection=str(version))
    now = {step.span_id: step.reward for step in steps}
    if now != version.steps:
        gone = len(version.steps.keys() - now)
        changed = sum(version.steps.get(key, reward) != reward for key, reward in now.items())
        raise StoreError(
            f"{version} is not what it was: {gone} of its {len(version.steps)} steps are gone, "
            f"{changed} have other rewards; save it again"
        )


def freeze_options(store: "Store", options: dict[str, Any]) -> dict[str, Any]:
    """Return options of an export that name the version of their selection, which is as it was."""
    if options.get("selection") is None:
        return options
    version = read_version(store, options["selection"])
    check_frozen(store, version)
    return {**options, "selection": str(version)}


def note_export(store: "Store", reference: str, path: object) -> None:
    """Note that a version was written to a file, for who takes a label back."""
    line = {"selection": reference, "path": str(path), "exported_ns": time.time_ns()}
    place = _find_folder(store) / _EXPORTS
    with suppress(OSError):  # a store that may only be read keeps no notes
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def list_uses(store: "Store", rollout_id: str, name: str, given_ns: int) -> dict[str, list[str]]:
    """Return the versions that a label is in, with their files."""
    if store.layout is None:
        return {}
    versions = (
        _read_sound(store, f"{selection}@{number}")
        for selection, numbers in list_versions(store).items()
        for number in numbers
    )
    uses: dict[str, list[str]] = {
        str(version): []
        for version in filter(None, versions)
        if rollout_id in version.rollouts
        and version.as_of_ns >= given_ns
        and version.options.get("reward") in (None, name)
    }
    path = _find_folder(store) / _EXPORTS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that a full disk cut off
            export = orjson.loads(line)
            uses.get(export["selection"], []).append(export["path"])
    return uses


def _find_folder(store: "Store") -> Path:
    if store.layout is None:
        raise ConfigError("selections are files of a store on this machine; name its path")
    store.layout.require()
    return store.layout.root / "selections"

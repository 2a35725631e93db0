"""Background reads of the assignable versions: a traced request never waits for them.

A thread reads the state at most once a second and only while requests are made; all requests of one
rollout get the versions of its first. Faults are logged once and leave the program as it is.
"""

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from opentelemetry.instrumentation.utils import suppress_instrumentation

from lightning_otel import capture
from lightning_otel.errors import LightningOtelError, NotFoundError, StateError, warn_once
from lightning_otel.instrumentors.substitution import (
    READ_STANDINGS,
    Standing,
    assign_versions,
    resource_of,
    standings_of,
)
from lightning_otel.store.layout import Layout, check_state
from lightning_otel.types import Resource

FRESH_S: Final = 1.0
"""How old what was read may be before it is read anew, while requests go on with it."""
STALE_S: Final = 1.5
"""Age from which a request waits for a read: withdrawals apply within two seconds."""
FIRST_S: Final = 2.0
"""How long the first request may wait: the libraries that read are loaded then, too."""
CATCH_UP_S: Final = 0.2
"""How long a request may wait after a pause."""

_changed = {"s": -math.inf}


def note_change() -> None:
    """Have whatever was read in this process before be read anew: somebody here changed it."""
    _changed["s"] = time.monotonic()


def changed_s() -> float:
    """Return the monotonic time of the latest change that this process made, seconds."""
    return _changed["s"]


class Watch:
    """The assignable versions in this process, kept fresh while asked for."""

    def __init__(self, open_reader: Callable[[], Any]) -> None:
        """Take what opens a reader in the background; readers are as :class:`Resources`."""
        self._open = open_reader
        self._reader: Any = None
        self._standings: Mapping[str, Standing] = {}
        # When what was read last was asked for and came, and when a reading began and ended.
        self._asked_s = self._read_s = self._begun_s = self._tried_s = -math.inf
        self._pinned: dict[tuple[str, int], Resource | None] = {}
        self._pinned_s = -math.inf
        # Set while nothing is being read.
        self._done = threading.Event()
        self._is_reading = False
        # Guards _is_reading: one thread alone reads.
        self._lock = threading.Lock()

    def for_rollout(self, standings: Mapping[str, Standing] | None = None) -> "RolloutVersions":
        """Return the versions of one rollout; ``standings`` are those of another process."""
        return RolloutVersions(self, standings)

    def assign(
        self,
        key: str,
        agent: str | None,
        pinned: Mapping[str, int],
        fixed: dict[str, Mapping[str, Standing]] | None = None,
    ) -> dict[str, Resource]:
        """Return a request's resources from the last read, and fill ``fixed`` with them."""
        pins = list(pinned.items())
        is_new = not self._pinned.keys() >= set(pins)
        if is_new:
            for pin in pins:
                self._pinned.setdefault(pin, None)
            self._pinned_s = time.monotonic()
        # Nobody here expects what was before this process itself changed something; and a request
        # that is held to a version would else be made with what the agent wrote, and what it
        # earned be taken for what the version earns.
        needed_s = max(changed_s(), self._pinned_s)
        for _ in range(2):  # what is being read already may not know of it, or fail
            if self._asked_s < needed_s:
                if is_new or self._begun_s < needed_s:
                    self.begin_reading(is_urgent=True)
                self._await_end(FIRST_S)
        age_s = time.monotonic() - self._read_s
        is_unread = any(self._pinned[pin] is None for pin in pins)
        if age_s >= FRESH_S or is_unread:
            self.begin_reading()
            if age_s == math.inf:
                self._await_end(FIRST_S)
            elif age_s >= STALE_S or is_unread:
                self._await_end(CATCH_UP_S)
        standings = self._standings
        if fixed is not None:
            standings = fixed.setdefault("standings", standings)
        picks = {name: item for name, version in pins if (item := self._pinned[name, version])}
        versions = assign_versions(standings, key, agent, picks)
        # A pin that cannot be read is not the same as none: what it names is left to the agent.
        names = {*picks, *(name.removeprefix(f"{agent}/") for name in picks)}
        return {name: versions[name] for name in versions if name in names or name not in pinned}

    def _await_end(self, limit_s: float) -> None:
        # Counted from when the reading began: where a database hangs, few requests wait at all.
        self._done.wait(max(0.0, self._begun_s + limit_s - time.monotonic()))

    def begin_reading(self, *, is_urgent: bool = False) -> None:
        """Read in the background, unless that is under way or was just done."""
        with self._lock:
            is_fresh = time.monotonic() - self._tried_s < FRESH_S
            if self._is_reading or (is_fresh and not is_urgent):
                return
            self._is_reading, self._begun_s = True, time.monotonic()
            self._done.clear()
        try:
            threading.Thread(
                target=self._read_all, name="lightning-otel-apply", daemon=True
            ).start()
        except RuntimeError:  # the interpreter is ending
            self._is_reading = False
            self._done.set()

    def _read_all(self) -> None:
        try:
            # What others' instrumentors make of a database's calls is no part of the agent's work.
            with suppress_instrumentation():
                if self._reader is None:
                    self._reader = self._open()
                asked_s = time.monotonic()
                self._standings = self._reader.standings()
                for name, version in [pin for pin, item in list(self._pinned.items()) if not item]:
                    try:
                        self._pinned[name, version] = self._reader.get(name, version)
                    except LightningOtelError as exc:
                        warn_once(f"{name}@{version} is not applied: {exc}")
                self._asked_s, self._read_s = asked_s, time.monotonic()
        except LightningOtelError as exc:
            warn_once(f"resources are not applied anew: {exc}")
        except Exception:  # noqa: BLE001  # capture never raises into the traced program
            capture.note_fault()
        finally:
            self._tried_s = time.monotonic()
            self._is_reading = False
            self._done.set()


class RolloutVersions:
    """The assignable versions of one rollout, fixed at its first request."""

    def __init__(self, watch: Watch, standings: Mapping[str, Standing] | None) -> None:
        self._watch = watch
        # In a dictionary, which is set once however many threads of the rollout ask first.
        self._fixed = {} if standings is None else {"standings": standings}
        self.for_rollout = watch.for_rollout

    @property
    def standings(self) -> Mapping[str, Standing] | None:
        """The fixed versions; None before the first request."""
        return self._fixed.get("standings")

    def assign(self, key: str, agent: str | None, pinned: Mapping[str, int]) -> dict[str, Resource]:
        """Return a request's resources, as :meth:`Watch.assign` does."""
        return self._watch.assign(key, agent, pinned, self._fixed)


class StateFile:
    """Reads versions from a state file, for which SQLite is enough: two milliseconds at first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def standings(self) -> Mapping[str, Standing]:
        """Return the assignable versions by name."""
        return standings_of(self._read(READ_STANDINGS))

    def get(self, name: str, version: int) -> Resource:
        """Return one version, or raise NotFoundError."""
        query = "SELECT * FROM lightning_resources WHERE name = ? AND version = ?"
        for row in self._read(query, name, version):
            return resource_of(row)
        raise NotFoundError(f"there is no {name}@{version} in {self._path}")

    def has_published(self) -> bool:
        """Return whether some version is given to agents; False where that cannot be read."""
        try:
            return bool(self._read("SELECT name FROM lightning_resource_aliases LIMIT 1"))
        except LightningOtelError:
            return False

    def _read(self, query: str, *values: object) -> list[dict[str, Any]]:
        try:
            if not self._path.exists():
                return []
            address = f"{self._path.resolve().as_uri()}?mode=rw"  # to look makes nothing
            with contextlib.closing(sqlite3.connect(address, uri=True)) as opened:
                opened.row_factory = sqlite3.Row
                names = [row["name"] for row in opened.execute("SELECT name FROM sqlite_master")]
                if "lightning_resource_aliases" not in names:
                    return []
                (newest,) = opened.execute("SELECT max(version) FROM lightning_state").fetchone()
                check_state(self._path, newest or 0)
                return [dict(row) for row in opened.execute(query, values)]
        except (OSError, sqlite3.Error) as exc:
            raise StateError(f"the state {self._path} failed: {exc}") from exc


def state_file(place: str | None) -> StateFile | None:
    """Return what reads the state of a store on this machine; None of a database elsewhere."""
    return None if place is None or "://" in place else StateFile(Layout(place).state_path)


_watches: dict[str, Watch] = {}


def watch_of(place: str, open_reader: Callable[[], Any]) -> Watch:
    """Return the process's watch of a place; begin it if there is none."""
    watch = _watches.get(place) or _watches.setdefault(place, Watch(open_reader))
    if watch._read_s == -math.inf:
        watch.begin_reading()  # so that the first request finds it read
    return watch


def _begin_anew() -> None:
    # The thread that was reading is the parent's: nothing would ever say that it is done.
    for watch in _watches.values():
        Watch.__init__(watch, watch._open)


os.register_at_fork(after_in_child=_begin_anew)

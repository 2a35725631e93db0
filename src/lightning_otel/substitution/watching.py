"""Background reads of the assignable versions: a traced request never waits for them.

The state is read in a thread of its own, at most once a second and only while requests are made;
each request is given what was read last, and all requests of one rollout what its first was given.
Faults are told once and leave the program as it is.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from opentelemetry.instrumentation.utils import suppress_instrumentation

from lightning_otel import capture
from lightning_otel.errors import LightningOtelError, warn_once
from lightning_otel.substitution.assigning import Standing, assigned
from lightning_otel.types import Resource

FRESH_S: Final = 1.0
"""How old what was read may be before it is read anew, while requests go on with it."""
STALE_S: Final = 1.5
"""How old it may be before a request waits for what is being read: nobody asked for a while.

What was taken back reaches every new rollout within two seconds, however seldom there is one.
"""
FIRST_S: Final = 2.0
"""How long the first request may wait: the libraries that read are loaded then, too."""
CATCH_UP_S: Final = 0.2
"""How long a request may wait after a pause."""


_changed = {"s": -math.inf}


def note_change() -> None:
    """Have whatever was read in this process before be read anew: somebody here changed it."""
    _changed["s"] = time.monotonic()


def changed_s() -> float:
    """The monotonic time of the latest change that this process made, seconds."""
    return _changed["s"]


class Reader(Protocol):
    """Reads the state; as :class:`Resources` does."""

    def standings(self) -> Mapping[str, Standing]:
        """Return the assignable versions by name."""

    def get(self, name: str, version: int | str) -> Resource:
        """One version."""


class Watch:
    """The assignable versions in this process, kept fresh while asked for."""

    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        """Name what reads; it is opened, and what it needs is imported, in the background.

        Args:
            open_reader: Opens it.
        """
        self._open = open_reader
        self._reader: Reader | None = None
        self._standings: Mapping[str, Standing] = {}
        self._read_s: float | None = None
        self._begun_s = self._tried_s = self._asked_s = -math.inf
        self._pinned: dict[tuple[str, int], Resource | None] = {}
        # Set while nothing is being read.
        self._done = threading.Event()
        self._is_reading = False
        # Guards _is_reading: one thread alone reads.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to read, so that the first request finds it read."""
        if self._read_s is None:
            self._refresh_loop()

    def held(self, standings: Mapping[str, Standing] | None = None) -> "Held":
        """Return the versions of one rollout.

        Args:
            standings: What it was given in another process; None if it has asked nothing yet.
        """
        return Held(self, standings)

    def given(self, key: str, agent: str | None, pinned: Mapping[str, int]) -> dict[str, Resource]:
        """Return a request's resources, as ``Resources.assigned`` does, from the last read.

        Args:
            key: What the choice sticks to.
            agent: Who acts.
            pinned: Versions by name that are given whatever is live.
        """
        return self.given_of(self.latest, key, agent, pinned)

    def latest(self) -> Mapping[str, Standing]:
        """Return the last read."""
        return self._standings

    def given_of(
        self,
        standings: Callable[[], Mapping[str, Standing]],
        key: str,
        agent: str | None,
        pinned: Mapping[str, int],
    ) -> dict[str, Resource]:
        """As :meth:`given`, of what is asked for once it was read.

        Args:
            standings: Gives what may be assigned.
            key: As above.
            agent: As above.
            pinned: As above.
        """
        new = [pin for pin in pinned.items() if pin not in self._pinned]
        if new:
            self._read_versions(new)
        read_s, now_s = self._read_s, time.monotonic()
        is_pin_unread = any(self._pinned[pin] is None for pin in pinned.items())
        if read_s is None or now_s - read_s >= FRESH_S or is_pin_unread:
            self._refresh_loop()
            if read_s is None:
                self._wait_for_read(FIRST_S)
            elif is_pin_unread or now_s - read_s >= STALE_S:
                self._wait_for_read(CATCH_UP_S)
        self._catch_up()
        held = {name: self._pinned[name, version] for name, version in pinned.items()}
        found = {name: resource for name, resource in held.items() if resource is not None}
        given = assigned(standings(), key, agent, found)
        # A pin that cannot be read is not the same as none: what it names is left to the agent.
        known = {*found, *(name.removeprefix(f"{agent}/") for name in found)}
        return {name: given[name] for name in given if name in known or name not in held}

    def _catch_up(self) -> None:
        """Wait for what this process itself changed: nobody here expects what was before."""
        for _ in range(2):  # what is being read already may not know of it
            if self._asked_s >= changed_s():
                return
            if self._begun_s < changed_s():
                self._refresh_loop(is_urgent=True)
            self._wait_for_read(FIRST_S)

    def _read_versions(self, new: Sequence[tuple[str, int]]) -> None:
        """Read versions that were never asked for, at once.

        A request that is held to one would else be made with what the agent wrote, and what it
        earned be taken for what the version earns.
        """
        self._pinned.update(dict.fromkeys(new))
        end_s = time.monotonic() + FIRST_S
        for _ in range(2):  # what is being read already may not know of them
            self._refresh_loop(is_urgent=True)
            self._done.wait(max(0.0, end_s - time.monotonic()))
            if all(self._pinned[pin] is not None for pin in new):
                return

    def _wait_for_read(self, limit_s: float) -> None:
        # Counted from when the reading began: where a database hangs, few requests wait at all.
        left_s = self._begun_s + limit_s - time.monotonic()
        if left_s > 0:
            self._done.wait(left_s)

    def _refresh_loop(self, *, is_urgent: bool = False) -> None:
        with self._lock:
            is_fresh = time.monotonic() - self._tried_s < FRESH_S
            if self._is_reading or (is_fresh and not is_urgent):
                return
            self._is_reading, self._begun_s = True, time.monotonic()
            self._done.clear()
        try:
            threading.Thread(
                target=self._read_standings, name="lightning-otel-apply", daemon=True
            ).start()
        except RuntimeError:  # the interpreter is ending
            self._is_reading = False
            self._done.set()

    def _read_standings(self) -> None:
        try:
            # What others' instrumentors make of a database's calls is no part of the agent's work.
            with suppress_instrumentation():
                self._read_all()
        except LightningOtelError as exc:
            warn_once(f"resources are not applied anew: {exc}")
        except Exception:  # noqa: BLE001  # capture never raises into the traced program
            capture.note_fault()
        finally:
            self._tried_s = time.monotonic()
            self._is_reading = False
            self._done.set()

    def _read_all(self) -> None:
        if self._reader is None:
            self._reader = self._open()
        asked_s = time.monotonic()
        self._standings = self._reader.standings()
        for name, version in [pin for pin, held in list(self._pinned.items()) if not held]:
            self._pinned[name, version] = _read_pin(self._reader, name, version)
        self._asked_s, self._read_s = asked_s, time.monotonic()


class Held:
    """The assignable versions of one rollout, fixed at its first request."""

    def __init__(self, watch: Watch, standings: Mapping[str, Standing] | None) -> None:
        """Begin.

        Args:
            watch: Knows what stands.
            standings: What it holds already; None if nothing yet.
        """
        self._watch = watch
        # In a dictionary, which is set once however many threads of the rollout ask first.
        self._first = {} if standings is None else {"standings": standings}

    @property
    def standings(self) -> Mapping[str, Standing] | None:
        """The fixed versions; None before the first request."""
        return self._first.get("standings")

    def held(self, standings: Mapping[str, Standing] | None = None) -> "Held":
        """As of the watch: for a rollout within this one that is none of its parts."""
        return self._watch.held(standings)

    def given(self, key: str, agent: str | None, pinned: Mapping[str, int]) -> dict[str, Resource]:
        """Return a request's resources, as :meth:`Watch.given` does."""

        def first() -> Mapping[str, Standing]:
            return self._first.setdefault("standings", self._watch.latest())

        return self._watch.given_of(first, key, agent, pinned)


def _read_pin(reader: Reader, name: str, version: int) -> Resource | None:
    try:
        return reader.get(name, version)
    except LightningOtelError as exc:
        warn_once(f"{name}@{version} is not applied: {exc}")
        return None


_watches: dict[str, Watch] = {}


def watch_of(place: str, open_reader: Callable[[], Reader]) -> Watch:
    """The process's watch of a place, begun if there is none.

    Args:
        place: Where what it reads stands.
        open_reader: Opens what reads there.
    """
    watch = _watches.get(place)
    if watch is None:
        watch = _watches.setdefault(place, Watch(open_reader))
    watch.start()
    return watch


def _begin_anew() -> None:
    # The thread that was reading is the parent's: nothing would ever say that it is done.
    for watch in _watches.values():
        Watch.__init__(watch, watch._open)


os.register_at_fork(after_in_child=_begin_anew)

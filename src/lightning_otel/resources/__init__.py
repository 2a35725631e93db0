"""Resources: immutable versions of prompts, endpoints and weights, and aliases that name them.

``live`` is the default version, ``canary`` that of a share. Nothing is overwritten.
"""

import contextlib
import difflib
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

# Before SQLAlchemy, for it names the extra where that is missing.
from lightning_otel.state import State, take_lock

# isort: split
import sqlalchemy as sa

from lightning_otel.errors import ChangedError, ConfigError, NotFoundError
from lightning_otel.instrumentors.substitution import (
    CANARY,
    LIVE,
    Standing,
    assign_versions,
    stamps,
    watcher,
)
from lightning_otel.resources import bodies, tables
from lightning_otel.resources.tables import Withdrawal
from lightning_otel.types import Resource, ResourceKind
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from lightning_otel.dataset import Store
    from lightning_otel.resources.comparison import Comparison

__all__ = ["CANARY", "LIVE", "Resources", "Withdrawal", "stamps"]

FRESH_S: Final = 1.0
"""Seconds for which an answer is reused."""


class Resources:
    """The resources of a state, for any number of threads and processes."""

    def __init__(self, state: State | None = None) -> None:
        """Use a state, by default beside the default store; nothing is read yet.

        Raises:
            ConfigError: It is no state.
        """
        check_types({"state": state}, Resources.__init__.__annotations__)
        self.state = state if state is not None else State()
        self._known: dict[tuple[str, int], Resource] = {}
        # The time of the last read, the last change then, and its result.
        self._held: tuple[float, int, Mapping[str, Standing]] = (-math.inf, 0, {})

    def publish(
        self,
        name: str,
        body: object,
        *,
        kind: ResourceKind | None = None,
        parent: int | None = None,
        run_id: str = "",
        metrics: Mapping[str, float] | None = None,
        alias: str | None = None,
        weight: float | None = None,
        last_change: int | None = None,
    ) -> Resource:
        """Publish a version; a body that the newest version has stays that version.

        Args:
            name: The resource; ``agent/name`` is for that agent alone.
            body: Text or a :class:`Prompt`; chat messages, the system's and then
                examples; or an object of the kind's keys, as :class:`Resource` lists.
            kind: The kind; guessed by default.
            parent: The version it was made from.
            run_id: The training run that made it.
            metrics: Measured numbers by name.
            alias: Its alias, such as ``live`` or ``canary``; by default none, but a
                name's first version goes live.
            weight: The share of a canary, as :meth:`set_alias` takes it.
            last_change: Publish only if nothing of the name changed since :meth:`last_change` said
                so.

        Raises:
            ChangedError: Something did.
            ConfigError: It does not parse, or the name holds another kind.
            NotFoundError: There is no such parent.
        """
        bodies.check_name(name)
        found_kind, text = bodies.check_body(name, body, kind)
        measured = bodies.check_metrics(metrics or {})
        bodies.check_alias(alias or LIVE, weight)
        with self._begin_change(name, last_change=last_change) as entry:
            newest = entry.newest()
            if newest is not None and newest.kind != found_kind:
                raise ConfigError(
                    f"{name} is {newest.kind}, and this is {found_kind}; publish it under "
                    "another name"
                )
            if newest is None and alias is None:
                alias = LIVE
            if newest is None or newest.body != json.loads(text):
                if parent is not None:
                    entry.get(parent)
                newest = entry.insert(
                    version=newest.version + 1 if newest is not None else 1,
                    kind=found_kind,
                    body=text,
                    sha256=hashlib.sha256(text.encode()).hexdigest(),
                    parent=parent,
                    run_id=run_id,
                    metrics=json.dumps(measured, sort_keys=True),
                )
            if alias is not None:
                entry.point(alias, newest.version, weight)
        return newest

    def get(self, name: str, version: int | str = LIVE) -> Resource:
        """One version, by number or alias.

        Raises:
            NotFoundError: There is none.
        """
        resource = self._known.get((name, version)) if isinstance(version, int) else None
        if resource is not None:
            return resource
        with self._begin_read() as connection:
            entry = tables.Entry(connection, name)
            if isinstance(version, int):
                return self._known.setdefault((name, version), entry.get(version))
            target = entry.alias(version)
            if target is not None:
                return entry.get(target.version)
            newest = entry.require()
        raise NotFoundError(
            f"no version of {name} is {version}; the newest is {newest}, and "
            f"lightning-otel resources alias {name} {version} {newest.version} makes it so"
        )

    def versions(self, name: str) -> list[Resource]:
        """Return every version, the oldest first.

        Raises:
            NotFoundError: There is none.
        """
        with self._begin_read() as connection:
            return tables.Entry(connection, name).all()

    def names(self) -> list[str]:
        """Return the names there are versions of."""
        with self._begin_read() as connection:
            return sorted(connection.scalars(sa.select(tables.VERSIONS.c.name).distinct()))

    def aliases(self, name: str) -> dict[str, int]:
        """Return the version that each alias of a name means."""
        by_name = tables.ALIASES.c.name == name
        query = sa.select(tables.ALIASES.c.alias, tables.ALIASES.c.version).where(by_name)
        with self._begin_read() as connection:
            return {row.alias: row.version for row in connection.execute(query)}

    def canary_weight(self, name: str) -> float:
        """Return the share that is given the canary, 0 to 1; 0 where there is none."""
        with self._begin_read() as connection:
            canary = tables.Entry(connection, name).alias(CANARY)
            return 0.0 if canary is None else canary.weight or 0.0

    def last_move(self, name: str) -> int:
        """Return the number of the change by which an alias of a name moved last; 0 if none did."""
        with self._begin_read() as connection:
            return tables.Entry(connection, name).last_change(is_move=True)

    def last_change(self, name: str) -> int:
        """Return the number of the last publication or move of an alias; 0 if there was none."""
        with self._begin_read() as connection:
            return tables.Entry(connection, name).last_change()

    def set_alias(
        self,
        name: str,
        alias: str,
        version: int | None,
        *,
        weight: float | None = None,
        last_move: int | None = None,
    ) -> None:
        """Point an alias to a version, for every process.

        Args:
            name: The resource.
            alias: ``live``, ``canary``, or another word, which agents get only by name.
            version: The version; None removes the alias, of a canary as :meth:`withdraw` does.
            weight: The share of the canary, 0 to 1; by default what it was, else 0.1.
            last_move: Move it only if no alias of the name moved since :meth:`last_move` said so.

        Raises:
            ChangedError: One did.
            ConfigError: The alias is no word, or the weight no share.
            NotFoundError: There is no such version.
        """
        bodies.check_alias(alias, weight)
        with self._begin_change(name, last_move) as entry:
            if version is not None:
                entry.get(version)
            else:
                entry.require()
            if alias == CANARY and version is None and entry.alias(CANARY) is not None:
                entry.withdraw("", None)
            entry.point(alias, version, weight)

    def promote(self, name: str, *, last_move: int | None = None) -> Resource:
        """Make the canary live for all.

        Raises:
            ChangedError: An alias moved since.
            NotFoundError: There is no canary.
        """
        with self._begin_change(name, last_move) as entry:
            canary = entry.alias(CANARY)
            if canary is None:
                raise NotFoundError(
                    f"{name} has no canary; lightning-otel resources alias {name} live VERSION"
                )
            entry.point(LIVE, canary.version)
            entry.point(CANARY, None)
            return entry.get(canary.version)

    def withdraw(self, name: str, reason: str = "", *, version: int | None = None) -> Resource:
        """Withdraw the canary, if it still is this version, and keep the reason; return it.

        Running agents follow within two seconds; a rollout that began with it ends with it.

        Raises:
            NotFoundError: There is no canary, or it is another version by now.
        """
        with self._begin_change(name) as entry:
            return entry.withdraw(reason, version)

    def withdrawals(self, name: str) -> list[Withdrawal]:
        """Return the canaries that were withdrawn, with the reason, the oldest first."""
        columns = tables.WITHDRAWALS.c
        query = sa.select(*(columns[field] for field in Withdrawal._fields)).order_by(columns.n)
        with self._begin_read() as connection:
            rows = connection.execute(query.where(columns.name == name))
            return [Withdrawal(*row) for row in rows]

    def withdrawn(self, name: str) -> dict[int, str]:
        """Return versions that were withdrawn or rolled back and not assigned since."""
        with self._begin_read() as connection:
            return tables.Entry(connection, name).withdrawn()

    def rollback(self, name: str, *, last_move: int | None = None) -> Resource:
        """Make the previous live version live again; each call goes back one further.

        Raises:
            ChangedError: An alias moved since.
            ConfigError: Nothing was.
            NotFoundError: There is no such resource.
        """
        with self._begin_change(name, last_move) as entry:
            version = entry.take_step_back()
            entry.point(LIVE, version, is_step=False)
            return entry.get(version)

    def previous(self, name: str) -> int | None:
        """Return the version that :meth:`rollback` would make live; None if nothing was before."""
        with self._begin_read() as connection:
            entry = tables.Entry(connection, name)
            before = entry.steps()[entry.alias(LIVE) is not None :]
        return before[0].version if before else None

    def assigned(
        self,
        key: str,
        *,
        agent: str | None = None,
        pinned: Mapping[str, int | str] | None = None,
    ) -> dict[str, Resource]:
        """Return the version of each resource for a key: live, or canary for a share of keys.

        The state is read at most once a second.

        Args:
            key: A rollout's or user's id; the choice for it is the same in every process.
            agent: The agent; it gets resources named ``agent/name`` as ``name``, too.
            pinned: Versions by name that precede what is live.

        Raises:
            NotFoundError: A pinned version does not exist.
            StateError: The state cannot be read.
        """
        versions = {name: self.get(name, version) for name, version in (pinned or {}).items()}
        return assign_versions(self.standings(), key, agent, versions)

    def compare(
        self,
        name: str,
        a: int | str = LIVE,
        b: int | str = CANARY,
        store: "Store | None" = None,
        *,
        is_paired: bool | None = None,
        reward_range: tuple[float, float] | None = None,
    ) -> "Comparison":
        """Compare two versions by the rewards of the rollouts made with them.

        Neighbours in time are compared, of one task where tasks repeat. Versions drawn by user,
        session or group count once for each; failed rollouts count as the lowest reward. The 95 %
        interval holds however often one looks: see :mod:`lightning_otel.resources.evidence`.

        Args:
            name: The resource.
            a: One version, by number or alias.
            b: The other.
            store: The store of the rollouts; by default the default store.
            is_paired: Count only tasks done with both; by default unless few tasks repeat, or
                versions stick to users, sessions or groups.
            reward_range: The lowest and the highest possible reward; by default the range seen so
                far, which the verdict then says.

        Raises:
            ConfigError: No rollouts tell of both, or the range is none.
            NotFoundError: There is no such version.
        """
        from lightning_otel.dataset import Store
        from lightning_otel.resources.comparison import compare_versions
        from lightning_otel.resources.waiting import explain_waiting

        versions = [self.get(name, version).version for version in (a, b)]
        opened = store if store is not None else Store()
        try:
            return compare_versions(
                name,
                versions[0],
                versions[1],
                opened,
                is_paired=is_paired,
                reward_range=reward_range,
            )
        except ConfigError as exc:
            is_canary = versions[1] == self.aliases(name).get(CANARY)
            reason = explain_waiting(self, name, opened) if is_canary else ""
            if not reason:
                raise
            pair = f"{name}@{versions[0]} and {name}@{versions[1]}"
            raise ConfigError(f"{pair} cannot be compared: {reason}") from exc

    def diff(self, name: str, a: int | str = LIVE, b: int | str = CANARY) -> str:
        """Return the difference of two versions as ``diff -u`` shows it; empty if none.

        Raises:
            NotFoundError: There is no such version.
        """
        old, new = self.get(name, a), self.get(name, b)
        lines = (bodies.format_lines(old), bodies.format_lines(new))
        return "\n".join(difflib.unified_diff(*lines, str(old), str(new), lineterm=""))

    def standings(self) -> Mapping[str, Standing]:
        """Return the assignable versions by name, at most a second old."""
        asked_s, change, standings = self._held
        if time.monotonic() - asked_s < FRESH_S and asked_s >= watcher.changed_s():
            return standings
        asked_s = time.monotonic()
        with self._begin_read() as connection:
            newest = connection.scalar(sa.select(sa.func.max(tables.CHANGES.c.n))) or 0
            if newest != change:
                standings = tables.read_standings(connection)
        self._held = (asked_s, newest, standings)
        return standings

    @contextlib.contextmanager
    def _begin_change(
        self, name: str, last_move: int | None = None, last_change: int | None = None
    ) -> "Iterator[tables.Entry]":
        self.state.ensure(*tables.ALL)
        with self.state.change() as connection:
            take_lock(connection, tables.LOCK)
            entry = tables.Entry(connection, name, self.state.now_ns())
            is_late = last_move not in (None, entry.last_change(is_move=True))
            if is_late or last_change not in (None, entry.last_change()):
                raise ChangedError(
                    f"somebody changed {name} meanwhile; look at it again, and then decide"
                )
            yield entry
        watcher.note_change()

    @contextlib.contextmanager
    def _begin_read(self) -> "Iterator[Connection]":
        self.state.ensure(*tables.ALL)
        with self.state.read() as connection:
            yield connection

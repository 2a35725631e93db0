"""Tables of resources: versions, aliases, and every change in order."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.instrumentors.substitution import (
    CANARY,
    LIVE,
    READ_STANDINGS,
    Standing,
    resource_of,
    standings_of,
)
from lightning_otel.state import METADATA
from lightning_otel.types import Resource
from lightning_otel.types.values import check_whole

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

VERSIONS: Final = sa.Table(
    "lightning_resources",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("parent", sa.Integer),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
)
ALIASES: Final = sa.Table(
    "lightning_resource_aliases",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("alias", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("weight", sa.Float),
)
CHANGES: Final = sa.Table(
    "lightning_resource_changes",
    METADATA,
    sa.Column("n", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    # Empty for a publication.
    sa.Column("alias", sa.Text, nullable=False),
    sa.Column("version", sa.Integer),
    sa.Column("weight", sa.Float),
    # Whether live came to mean this, and that was not taken back: what a rollback goes back over.
    sa.Column("is_step", sa.Boolean, nullable=False),
    sa.Column("changed_ns", sa.BigInteger, nullable=False),
)
WITHDRAWALS: Final = sa.Table(
    "lightning_resource_withdrawals",
    METADATA,
    sa.Column("n", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("withdrawn_ns", sa.BigInteger, nullable=False),
)
ROLLED_BACK: Final = "rolled back"
"""In place of an alias, of a change by which a version stopped to be live; no alias has a space."""
CANARY_WEIGHT: Final = 0.1
"""The share of a canary whose weight was never said."""
ALL: Final = (VERSIONS, ALIASES, CHANGES, WITHDRAWALS)
LOCK: Final = 0x6C6F7472
"""Lock of changes: else publishers find the same newest version, and readers miss changes."""
_OF_NAME: Final = sa.select(VERSIONS).where(VERSIONS.c.name == sa.bindparam("name"))


class Withdrawal(NamedTuple):
    """A canary that was taken back: its version, the reason, and since when, Unix nanoseconds."""

    version: int
    reason: str
    withdrawn_ns: int


class Entry:
    """The versions and aliases of one name, within a transaction."""

    def __init__(self, connection: "Connection", name: str, now_ns: int = 0) -> None:
        self._connection = connection
        self._is_alias = ALIASES.c.name == name
        self._now_ns = now_ns  # of its changes
        self.name = name

    def get(self, version: int) -> Resource:
        """Return one version, or raise NotFoundError."""
        check_whole(f"the version of {self.name}", version)
        query = _OF_NAME.where(VERSIONS.c.version == version)
        row = self._connection.execute(query, {"name": self.name}).one_or_none()
        if row is None:
            raise NotFoundError(
                f"there is no {self.name}@{version}; lightning-otel resources show {self.name}"
            )
        return _resource_of(row)

    def all(self) -> list[Resource]:
        """Return every version, the oldest first, or raise NotFoundError."""
        rows = self._connection.execute(_OF_NAME.order_by(VERSIONS.c.version), {"name": self.name})
        versions = [_resource_of(row) for row in rows]
        if not versions:
            raise NotFoundError(
                f"there is no resource {self.name!r}; lightning-otel resources list"
            )
        return versions

    def newest(self) -> Resource | None:
        """Return the version that was published last; None if none was."""
        query = _OF_NAME.order_by(VERSIONS.c.version.desc()).limit(1)
        row = self._connection.execute(query, {"name": self.name}).one_or_none()
        return None if row is None else _resource_of(row)

    def require(self) -> Resource:
        """Return the newest version, or raise NotFoundError."""
        return self.newest() or self.all()[-1]

    def alias(self, alias: str) -> Any:
        """Return the version and weight that an alias means; None if it means none."""
        query = sa.select(ALIASES.c.version, ALIASES.c.weight)
        where = (self._is_alias, ALIASES.c.alias == alias)
        return self._connection.execute(query.where(*where)).one_or_none()

    def steps(self) -> "list[sa.Row[Any]]":
        """Return the last two changes of live that were not taken back, the later one first."""
        query = sa.select(CHANGES.c.n, CHANGES.c.version).order_by(CHANGES.c.n.desc()).limit(2)
        where = (CHANGES.c.name == self.name, CHANGES.c.is_step)
        return list(self._connection.execute(query.where(*where)))

    def take_step_back(self) -> int:
        """Return the version that was live before; the last step is none any more."""
        self.require()
        steps = self.steps()
        if self.alias(LIVE) is not None:
            last_step, *steps = steps
            change = sa.update(CHANGES).where(CHANGES.c.n == last_step.n)
            self._connection.execute(change.values(is_step=False))
            self._note(ROLLED_BACK, last_step.version, None, is_step=False)
        if not steps:
            raise ConfigError(
                f"nothing of {self.name} was live before; lightning-otel resources alias "
                f"{self.name} live none leaves the agent to what it says itself"
            )
        version: int = steps[0].version
        return version

    def last_change(self, *, is_move: bool = False) -> int:
        """Return the number of the last publication or move, or of the last move; 0 if none."""
        query = sa.select(sa.func.max(CHANGES.c.n)).where(CHANGES.c.name == self.name)
        if is_move:
            query = query.where(CHANGES.c.alias != "")
        return self._connection.scalar(query) or 0

    def insert(self, **columns: Any) -> Resource:
        """Keep a version and return it."""
        row = {"name": self.name, "created_ns": self._now_ns, **columns}
        self._connection.execute(sa.insert(VERSIONS).values(row))
        self._note("", columns["version"], None, is_step=False)
        return self.get(columns["version"])

    def point(
        self, alias: str, version: int | None, weight: float | None = None, *, is_step: bool = True
    ) -> None:
        """Let an alias mean a version, or nothing; note it unless it stands already."""
        current = self.alias(alias)
        if alias == CANARY and weight is None and version is not None:
            weight = current.weight if current is not None else CANARY_WEIGHT
        if (
            (current.version, current.weight) == (version, weight)
            if current is not None
            else version is None
        ):
            return
        self._connection.execute(sa.delete(ALIASES).where(self._is_alias, ALIASES.c.alias == alias))
        if version is not None:
            row = {"name": self.name, "alias": alias, "version": version, "weight": weight}
            self._connection.execute(sa.insert(ALIASES).values(row))
        is_step = is_step and alias == LIVE and version is not None
        self._note(alias, version, weight, is_step=is_step)

    def withdraw(self, reason: str, version: int | None) -> Resource:
        """Withdraw the canary, and keep why; return its version."""
        canary = self.alias(CANARY)
        if canary is None:
            self.require()
        if canary is None or version not in (None, canary.version):
            what = (
                f"{self.name} has no canary"
                if version is None
                else f"{self.name}@{version} is no canary"
            )
            raise NotFoundError(
                f"nothing can be withdrawn: {what}; lightning-otel resources show {self.name}"
            )
        self._connection.execute(
            sa.insert(WITHDRAWALS).values(
                name=self.name,
                version=canary.version,
                reason=reason or "by hand",
                withdrawn_ns=self._now_ns,
            )
        )
        self.point(CANARY, None)
        return self.get(canary.version)

    def withdrawn(self) -> dict[int, str]:
        """Return versions that were withdrawn or rolled back and not assigned since, and why."""
        why = sa.case((CHANGES.c.alias == ROLLED_BACK, ROLLED_BACK), else_=None)
        moves = CHANGES.c.alias.in_((LIVE, CANARY, ROLLED_BACK))
        events = sa.union_all(
            sa.select(
                CHANGES.c.changed_ns.label("ns"), CHANGES.c.version, why.label("reason")
            ).where(CHANGES.c.name == self.name, moves),
            sa.select(
                WITHDRAWALS.c.withdrawn_ns, WITHDRAWALS.c.version, WITHDRAWALS.c.reason
            ).where(WITHDRAWALS.c.name == self.name),
        ).order_by("ns")
        last: dict[int, str | None] = {}
        for row in self._connection.execute(events):
            last.pop(row.version, None)  # the latest is the last one
            last[row.version] = row.reason
        in_use = [alias.version for alias in map(self.alias, (LIVE, CANARY)) if alias]
        return {
            version: reason
            for version, reason in last.items()
            if reason is not None and version not in in_use
        }

    def _note(
        self, alias: str, version: int | None, weight: float | None, *, is_step: bool
    ) -> None:
        self._connection.execute(
            sa.insert(CHANGES).values(
                name=self.name,
                alias=alias,
                version=version,
                weight=weight,
                is_step=is_step,
                changed_ns=self._now_ns,
            )
        )


def read_standings(connection: "Connection") -> dict[str, Standing]:
    """Read the assignable versions by name."""
    rows = connection.exec_driver_sql(READ_STANDINGS).mappings()
    return standings_of({str(key): value for key, value in row.items()} for row in rows)


def _resource_of(row: "sa.Row[Any]") -> Resource:
    return resource_of(dict(row._mapping))

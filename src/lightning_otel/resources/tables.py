"""Tables of resources: versions, aliases, and every change in order."""

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from lightning_otel.errors import ChangedError, ConfigError, NotFoundError
from lightning_otel.state import METADATA
from lightning_otel.substitution import CANARY, LIVE, Standing
from lightning_otel.types import Resource

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
CANARY_WEIGHT: Final = 0.1
"""The share of a canary whose weight was never said."""
ALL: Final = (VERSIONS, ALIASES, CHANGES, WITHDRAWALS)
LOCK: Final = 0x6C6F7472
"""Of changes: two publishers would find the same newest version, and a reader could see a later
change before an earlier one, and ask no more."""


class Withdrawal(NamedTuple):
    """A canary that was taken back.

    Attributes:
        version: The version that was given as canary.
        reason: Why it is so no more.
        withdrawn_ns: Since when, Unix nanoseconds.
    """

    version: int
    reason: str
    withdrawn_ns: int


def unknown(name: str) -> NotFoundError:
    """The error for a name that nothing was published under."""
    return NotFoundError(f"there is no resource {name!r}; lightning-otel resources list")


def version_of(connection: "Connection", name: str, version: int) -> Resource:
    """One version.

    Raises:
        NotFoundError: There is none.
    """
    where = (VERSIONS.c.name == name) & (VERSIONS.c.version == version)
    row = connection.execute(sa.select(VERSIONS).where(where)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no {name}@{version}; lightning-otel resources show {name}")
    return resource_of(row)


def versions_of(connection: "Connection", name: str) -> list[Resource]:
    """Every version, the oldest first.

    Raises:
        NotFoundError: There is none.
    """
    wanted = sa.select(VERSIONS).where(VERSIONS.c.name == name).order_by(VERSIONS.c.version)
    found = [resource_of(row) for row in connection.execute(wanted)]
    if not found:
        raise unknown(name)
    return found


def newest_of(connection: "Connection", name: str) -> Resource | None:
    """The version that was published last; None if none was."""
    wanted = sa.select(VERSIONS).where(VERSIONS.c.name == name)
    row = connection.execute(wanted.order_by(VERSIONS.c.version.desc()).limit(1)).one_or_none()
    return resource_of(row) if row is not None else None


def aliased(connection: "Connection", name: str, alias: str) -> int | None:
    """The version that an alias means; None if it means none."""
    where = (ALIASES.c.name == name) & (ALIASES.c.alias == alias)
    return connection.scalar(sa.select(ALIASES.c.version).where(where))


def canary_weight(connection: "Connection", name: str) -> float:
    """The share that is given the canary, 0 to 1; 0 where there is none."""
    where = (ALIASES.c.name == name) & (ALIASES.c.alias == CANARY)
    return connection.scalar(sa.select(ALIASES.c.weight).where(where)) or 0.0


def steps_of(connection: "Connection", name: str) -> "list[sa.Row[Any]]":
    """The last two changes of what was live that were not taken back, the later one first."""
    where = (CHANGES.c.name == name) & CHANGES.c.is_step
    wanted = sa.select(CHANGES.c.n, CHANGES.c.version).where(where)
    return list(connection.execute(wanted.order_by(CHANGES.c.n.desc()).limit(2)))


def take_step_back(connection: "Connection", name: str) -> int:
    """Have what was made live last be no step any more; gives the version that was live before.

    Raises:
        ConfigError: Nothing was.
        NotFoundError: There is no such resource.
    """
    if newest_of(connection, name) is None:
        raise unknown(name)
    steps = steps_of(connection, name)
    if aliased(connection, name, LIVE) is not None:
        taken, *steps = steps
        connection.execute(sa.update(CHANGES).where(CHANGES.c.n == taken.n).values(is_step=False))
    if not steps:
        raise ConfigError(
            f"nothing of {name} was live before; lightning-otel resources alias {name} live none "
            "leaves the agent to what it says itself"
        )
    version: int = steps[0].version
    return version


def last_move(connection: "Connection", name: str) -> int:
    """The number of the change by which an alias of a name moved last; 0 if none did."""
    where = (CHANGES.c.name == name) & (CHANGES.c.alias != "")
    return connection.scalar(sa.select(sa.func.max(CHANGES.c.n)).where(where)) or 0


def check_last_move(connection: "Connection", name: str, expected: int | None) -> None:
    """Refuse to go on where an alias moved after what was expected; None expects nothing.

    Raises:
        ChangedError: One did.
    """
    if expected is not None and last_move(connection, name) != expected:
        raise ChangedError(f"somebody changed {name} meanwhile; look at it again, and then decide")


def last_change(connection: "Connection") -> int:
    """The number of the change that came last; 0 before the first."""
    return connection.scalar(sa.select(sa.func.max(CHANGES.c.n))) or 0


def insert(connection: "Connection", **columns: Any) -> Resource:
    """Keep a version, whose columns are those of ``VERSIONS``; gives it back."""
    connection.execute(sa.insert(VERSIONS).values(columns))
    note(
        connection,
        name=columns["name"],
        alias="",
        version=columns["version"],
        is_step=False,
        changed_ns=columns["created_ns"],
    )
    return version_of(connection, columns["name"], columns["version"])


def note(connection: "Connection", **columns: Any) -> None:
    """Keep a change, whose columns are those of ``CHANGES``."""
    connection.execute(sa.insert(CHANGES).values(columns))


def point(
    connection: "Connection", name: str, alias: str, version: int | None, weight: float | None
) -> dict[str, Any] | None:
    """Let an alias mean a version, or nothing; gives the change, None if it stands already."""
    where = (ALIASES.c.name == name) & (ALIASES.c.alias == alias)
    held = connection.execute(sa.select(ALIASES).where(where)).one_or_none()
    if alias == CANARY and weight is None and version is not None:
        weight = held.weight if held is not None else CANARY_WEIGHT
    if (held.version, held.weight) == (version, weight) if held is not None else version is None:
        return None
    row = {"name": name, "alias": alias, "version": version, "weight": weight}
    connection.execute(sa.delete(ALIASES).where(where))
    if version is not None:
        connection.execute(sa.insert(ALIASES).values(row))
    return row


def withdraw(
    connection: "Connection", name: str, reason: str, version: int | None, now_ns: int
) -> Resource:
    """Keep that the canary is given to nobody any more, and why; gives the version that it was.

    Raises:
        NotFoundError: There is no canary, or it is another version than was asked for.
    """
    held = aliased(connection, name, CANARY)
    if held is None and newest_of(connection, name) is None:
        raise unknown(name)
    if held is None or version not in (None, held):
        what = f"{name}@{version} is no canary" if version is not None else f"{name} has no canary"
        raise NotFoundError(
            f"nothing can be withdrawn: {what}; lightning-otel resources show {name}"
        )
    row = {"name": name, "version": held, "reason": reason or "by hand", "withdrawn_ns": now_ns}
    connection.execute(sa.insert(WITHDRAWALS).values(row))
    return version_of(connection, name, held)


def withdrawals(connection: "Connection", name: str) -> list[Withdrawal]:
    """The canaries of a name that were taken back, the oldest first."""
    wanted = sa.select(WITHDRAWALS).where(WITHDRAWALS.c.name == name).order_by(WITHDRAWALS.c.n)
    rows = connection.execute(wanted)
    return [Withdrawal(row.version, row.reason, row.withdrawn_ns) for row in rows]


def standings(connection: "Connection") -> dict[str, Standing]:
    """Read the assignable versions by name."""
    found: dict[str, Standing] = {}
    given = ALIASES.c.alias.in_((LIVE, CANARY))
    for row in connection.execute(sa.select(ALIASES).where(given)).all():
        resource = version_of(connection, row.name, row.version)
        own = found.get(row.name, Standing())
        found[row.name] = (
            own._replace(live=resource)
            if row.alias == LIVE
            else own._replace(canary=resource, weight=row.weight)
        )
    return found


def resource_of(row: Any) -> Resource:
    """The version that a row of ``VERSIONS`` holds."""
    return Resource(
        name=row.name,
        version=row.version,
        kind=row.kind,
        body=json.loads(row.body),
        sha256=row.sha256,
        parent=row.parent,
        run_id=row.run_id,
        metrics=json.loads(row.metrics),
        created_ns=row.created_ns,
    )

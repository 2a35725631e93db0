"""Where resources stand in the state: versions, aliases, and every change in its order."""

import json
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from lightning_otel.errors import NotFoundError
from lightning_otel.state import METADATA
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
ALL: Final = (VERSIONS, ALIASES, CHANGES)
_LOCK: Final = 0x6C6F7472  # any number that nothing else in a shared PostgreSQL database takes


def be_alone(connection: "Connection") -> None:
    """Let nobody else change resources until the transaction ends.

    SQLite lets one change anything at a time. In PostgreSQL two publishers would find the same
    newest version, and a reader could see a later change before an earlier one, and ask no more.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


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


def newest_of(connection: "Connection", name: str) -> Resource | None:
    """The version that was published last; None if none was."""
    wanted = sa.select(VERSIONS).where(VERSIONS.c.name == name)
    row = connection.execute(wanted.order_by(VERSIONS.c.version.desc()).limit(1)).one_or_none()
    return resource_of(row) if row is not None else None


def aliased(connection: "Connection", name: str, alias: str) -> int | None:
    """The version that an alias means; None if it means none."""
    where = (ALIASES.c.name == name) & (ALIASES.c.alias == alias)
    return connection.scalar(sa.select(ALIASES.c.version).where(where))


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

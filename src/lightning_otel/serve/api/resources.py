"""Resources by HTTP: read their versions and aliases, publish, point an alias, roll back."""

from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.resources import CANARY, Resources
from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api.operation import (
    Answer,
    Asked,
    Operation,
    Told,
    body_of,
    query_of,
    routes,
    told,
)
from lightning_otel.serve.viewer.page import run
from lightning_otel.types import Resource, ResourceKind

_BODY_BYTES: Final = 4 << 20
_INT32: Final = (1 << 31) - 1

Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Version = Annotated[int, Field(ge=1, le=_INT32)]
Weight = Annotated[float, Field(ge=0, le=1)]


class VersionTold(Told):
    """One version of a resource."""

    name: str
    version: int
    kind: ResourceKind
    body: dict[str, Any]
    sha256: str
    parent: int | None
    run_id: str
    """The training run that made it; empty if a person did."""
    metrics: dict[str, float]
    created_ns: int


class StandingTold(Told):
    """A resource and where it stands."""

    name: str
    kind: ResourceKind
    newest: int
    aliases: dict[str, int]
    """The version that each alias means."""
    canary_weight: float
    """The share of rollouts that is given the canary."""


class ResourcesTold(Told):
    """Every resource."""

    resources: list[StandingTold]


class WithdrawalTold(Told):
    """A canary that was taken back."""

    version: int
    reason: str
    withdrawn_ns: int


class ResourceTold(StandingTold):
    """A resource with its versions, the oldest first."""

    versions: list[VersionTold]
    withdrawals: list[WithdrawalTold]


class VersionQuery(Asked):
    """A version of a resource."""

    version: Word | None = None
    """A number or an alias; without, all versions."""


class PublishBody(Asked):
    """A version to keep."""

    name: Name
    body: str | list[Any] | dict[str, Any]
    """Text of a prompt; chat messages; or an object of the kind's keys."""
    kind: ResourceKind | None = None
    """What it is; guessed by default."""
    parent: Version | None = None
    """The version it was made from."""
    alias: Word | None = None
    """What names it from now on, such as `live` or `canary`."""
    weight: Weight | None = None
    """The share of a canary."""
    metrics: dict[str, float] = Field(default_factory=dict)


class AliasBody(Asked):
    """The version that an alias is to mean."""

    name: Name
    alias: Word
    version: Version | None
    """null takes the alias away."""
    weight: Weight | None = None
    """The share that is given the canary."""


class NameBody(Asked):
    """The name of a resource."""

    name: Name


async def resources(request: Request) -> Response:
    """Every resource, its newest version and its aliases."""
    held: Resources = request.app.state.rooms.resources

    def read(_: object) -> ResourcesTold:
        return ResourcesTold(resources=[_describe_aliases(held, name) for name in held.names()])

    return told(await run(request, read))


async def resource(request: Request) -> Response:
    """One resource with its versions and aliases; or one version of it."""
    asked = query_of(request, VersionQuery)
    held: Resources = request.app.state.rooms.resources
    name = request.path_params["name"]

    def read(_: object) -> ResourceTold | VersionTold:
        if asked.version is not None:
            given = asked.version
            is_number = given.isascii() and given.isdecimal() and int(given) <= _INT32
            return version_told(held.get(name, int(given) if is_number else given))
        versions = [version_told(each) for each in held.versions(name)]
        taken = [WithdrawalTold(**each._asdict()) for each in held.withdrawals(name)]
        standing = _describe_aliases(held, name).model_dump()
        return ResourceTold(**standing, versions=versions, withdrawals=taken)

    return told(await run(request, read))


async def publish(request: Request) -> Response:
    """Keep a version; what the newest one says already stays that version."""
    asked = await body_of(request, PublishBody, most_bytes=_BODY_BYTES)
    held: Resources = request.app.state.rooms.resources
    given = asked.model_dump()

    def act(_: object) -> VersionTold:
        return version_told(held.publish(given.pop("name"), given.pop("body"), **given))

    return told(await run(request, act), 201)


async def alias(request: Request) -> Response:
    """Let an alias mean a version from now on, for every process that asks."""
    asked = await body_of(request, AliasBody)
    held: Resources = request.app.state.rooms.resources

    def act(_: object) -> StandingTold:
        held.set_alias(asked.name, asked.alias, asked.version, weight=asked.weight)
        return _describe_aliases(held, asked.name)

    return told(await run(request, act))


async def promote(request: Request) -> Response:
    """Make the canary live for all."""
    return await _move_alias(request, Resources.promote)


async def rollback(request: Request) -> Response:
    """Make live what was live before; once more goes back further."""
    return await _move_alias(request, Resources.rollback)


async def _move_alias(request: Request, move: Any) -> Response:
    asked = await body_of(request, NameBody)
    held: Resources = request.app.state.rooms.resources

    def act(_: object) -> StandingTold:
        move(held, asked.name)
        return _describe_aliases(held, asked.name)

    return told(await run(request, act))


def _describe_aliases(held: Resources, name: str) -> StandingTold:
    newest = held.versions(name)[-1]
    aliases = held.aliases(name)
    return StandingTold(
        name=name,
        kind=newest.kind,
        newest=newest.version,
        aliases=aliases,
        canary_weight=held.canary_weight(name) if CANARY in aliases else 0.0,
    )


def version_told(found: Resource) -> VersionTold:
    """A version as it is told."""
    return VersionTold(
        name=found.name,
        version=found.version,
        kind=found.kind,
        body=dict(found.body),
        sha256=found.sha256,
        parent=found.parent,
        run_id=found.run_id,
        metrics=dict(found.metrics),
        created_ns=found.created_ns,
    )


_UNKNOWN: Final = Answer("There is no such resource or version.")
OPERATIONS: Final = (
    Operation(
        "GET", "/v1/resources", resources, "Every resource, its newest version and its aliases.",
        {200: Answer("All of them.", {JSON: ResourcesTold})},
    ),
    Operation(
        "POST", "/v1/resources", publish,
        "Keep a version; what the newest one says already stays that version.",
        {201: Answer("The version.", {JSON: VersionTold}), 404: _UNKNOWN},
        body=PublishBody,
    ),
    Operation(
        "POST", "/v1/resources/alias", alias,
        "Let an alias mean a version from now on, for every process that asks.",
        {200: Answer("How it stands.", {JSON: StandingTold}), 404: _UNKNOWN},
        body=AliasBody,
    ),
    Operation(
        "POST", "/v1/resources/promote", promote, "Make the canary live for all.",
        {200: Answer("How it stands.", {JSON: StandingTold}), 404: _UNKNOWN},
        body=NameBody,
    ),
    Operation(
        "POST", "/v1/resources/rollback", rollback,
        "Make live what was live before; once more goes back further.",
        {200: Answer("How it stands.", {JSON: StandingTold}), 404: _UNKNOWN},
        body=NameBody,
    ),
    Operation(
        "GET", "/v1/resources/{name:path}", resource,
        "One resource with its versions and aliases; with `version`, that one alone.",
        {
            200: Answer("The resource, or the version.",
                        {JSON: {"anyOf": [ResourceTold, VersionTold]}}),
            404: _UNKNOWN,
        },
        query=VersionQuery,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)

"""Resources by HTTP: read their versions and aliases, publish, point an alias, roll back."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints
from starlette.requests import Request

from lightning_otel.resources import Resources
from lightning_otel.serve.api.operation import RequestModel, ResponseModel, operation
from lightning_otel.types import ResourceKind
from lightning_otel.views.nouns import describe_resource, parse_version

_INT32: Final = (1 << 31) - 1
_UNKNOWN: Final[Mapping[int, str]] = {404: "There is no such resource or version."}

Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Version = Annotated[int, Field(ge=1, le=_INT32)]
Weight = Annotated[float, Field(ge=0, le=1)]


class VersionResponse(ResponseModel):
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


class StandingResponse(ResponseModel):
    """A resource and where it stands."""

    name: str
    kind: ResourceKind
    newest: int
    aliases: dict[str, int]
    """The version that each alias means."""
    canary_weight: float
    """The share of rollouts that is given the canary."""


class ResourcesResponse(ResponseModel):
    """Every resource."""

    resources: list[StandingResponse]


class WithdrawalResponse(ResponseModel):
    """A canary that was taken back."""

    version: int
    reason: str
    withdrawn_ns: int


class ResourceResponse(StandingResponse):
    """A resource with its versions, the oldest first."""

    versions: list[VersionResponse]
    withdrawals: list[WithdrawalResponse]


class VersionQuery(RequestModel):
    """A version of a resource."""

    version: Word | None = None
    """A number or an alias; without, all versions."""


class NameBody(RequestModel):
    """The name of a resource."""

    name: Name


class PublishBody(NameBody):
    """A version to keep."""

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


class AliasBody(NameBody):
    """The version that an alias is to mean."""

    alias: Word
    version: Version | None
    """null takes the alias away."""
    weight: Weight | None = None
    """The share that is given the canary."""


@operation("GET", "/v1/resources")
def resources(request: Request) -> ResourcesResponse:
    """List every resource with its newest version and its aliases."""
    repository = _resources(request)
    return ResourcesResponse(
        resources=[_tell_standing(repository, name) for name in repository.names()]
    )


@operation("POST", "/v1/resources", {201: "The version.", **_UNKNOWN}, most_bytes=4 << 20)
def publish(request: Request, params: PublishBody) -> tuple[VersionResponse, int]:
    """Keep a version; what the newest one says already stays that version."""
    values = params.model_dump()
    version = _resources(request).publish(values.pop("name"), values.pop("body"), **values)
    return VersionResponse.of(version), 201


@operation("POST", "/v1/resources/alias", _UNKNOWN)
def alias(request: Request, params: AliasBody) -> StandingResponse:
    """Let an alias mean a version from now on, for every process that asks."""
    repository = _resources(request)
    repository.set_alias(params.name, params.alias, params.version, weight=params.weight)
    return _tell_standing(repository, params.name)


@operation("POST", "/v1/resources/promote", _UNKNOWN)
def promote(request: Request, params: NameBody) -> StandingResponse:
    """Make the canary live for all."""
    repository = _resources(request)
    repository.promote(params.name)
    return _tell_standing(repository, params.name)


@operation("POST", "/v1/resources/rollback", _UNKNOWN)
def rollback(request: Request, params: NameBody) -> StandingResponse:
    """Make live what was live before; once more goes back further."""
    repository = _resources(request)
    repository.rollback(params.name)
    return _tell_standing(repository, params.name)


@operation("GET", "/v1/resources/{name:path}", _UNKNOWN)
def resource(request: Request, params: VersionQuery) -> ResourceResponse | VersionResponse:
    """Read one resource with its versions and aliases; with `version`, that one alone."""
    repository, name = _resources(request), request.path_params["name"]
    if (number := params.version) is not None:
        return VersionResponse.of(repository.get(name, parse_version(number)))
    versions = [VersionResponse.of(version) for version in repository.versions(name)]
    withdrawals = [WithdrawalResponse.of(withdrawal) for withdrawal in repository.withdrawals(name)]
    standing = describe_resource(repository, name)
    return ResourceResponse(**standing, versions=versions, withdrawals=withdrawals)


def _resources(request: Request) -> Resources:
    repository: Resources = request.app.state.repositories.resources
    return repository


def _tell_standing(repository: Resources, name: str) -> StandingResponse:
    return StandingResponse(**describe_resource(repository, name))

"""One operation of the HTTP API: its route, what it takes, what it answers, and how that is said.

The route and its part of the OpenAPI document are made of the same thing, so that neither is there
without the other.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_origin

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.answers import JSON, RefusalError, base_type

LINES: Final = "application/x-ndjson"
_MOST_FAULTS: Final = 5
_BODY_BYTES: Final = 1 << 20


class Asked(BaseModel):
    """A request model: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Told(BaseModel):
    """A response model."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Refusal(Told):
    """The reason for a refusal."""

    code: int
    """Of google.rpc.Code, as OTLP wants it."""
    message: str
    """What is wrong, and after a semicolon what to do."""


A = TypeVar("A", bound=Asked)
Schema: TypeAlias = type[BaseModel] | Mapping[str, Any]


class Answer(NamedTuple):
    """One way in which an operation answers.

    Attributes:
        says: What it means.
        content: What it looks like, by media type.
        headers: What else it says, by header.
    """

    says: str
    content: Mapping[str, Schema] = {}
    headers: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the API: method, path, models and handler.

    Attributes:
        method: Of HTTP.
        path: As Starlette writes it.
        handler: Serves it.
        says: What it does, in one sentence; more of it after an empty line.
        answers: By status; refusals stand in the document by themselves.
        query: What may stand in the query.
        body: What the body is, where it is JSON.
        bodies: What else it may be, by media type.
        is_open: Whether everybody on this machine may, without the key.
        needs_body: Whether there must be one.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    says: str
    answers: Mapping[int, Answer]
    query: type[Asked] | None = None
    body: type[Asked] | None = None
    bodies: Mapping[str, Schema] = field(default_factory=dict)
    is_open: bool = False
    needs_body: bool = True

    @property
    def route(self) -> Route:
        """The route that serves it."""
        return Route(self.path, self.handler, methods=[self.method])


def routes(operations: Iterable[Operation]) -> list[Route]:
    """The routes of operations."""
    return [each.route for each in operations]


async def body_of(request: Request, model: type[A], *, most_bytes: int = _BODY_BYTES) -> A:
    """The JSON body of a request, checked; one that is empty is an empty object.

    Raises:
        RefusalError: It is no JSON, too long, or not what is asked for.
    """
    body = await request.app.state.bodies.read(request)
    if len(body) > most_bytes:
        raise RefusalError(413, f"a body may have {most_bytes} bytes here")
    if body and base_type(request.headers.get("content-type")) != JSON:
        raise RefusalError(415, f"send {JSON}")
    try:
        return model.model_validate_json(body or b"{}", strict=True)
    except ValidationError as exc:
        raise RefusalError(400, _word_errors(exc)) from exc


def query_of(request: Request, model: type[A]) -> A:
    """The query of a request, checked.

    Raises:
        RefusalError: It names what is not known, or something cannot be understood.
    """
    found: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if name in model.model_fields and _is_list(model, name):
            found[name] = values
        elif len(values) > 1:
            raise RefusalError(400, f"{name} stands {len(values)} times in the query; give one")
        else:
            found[name] = values[0]
    try:
        return model.model_validate(found)
    except ValidationError as exc:
        raise RefusalError(400, _word_errors(exc)) from exc


def told(
    answer: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer as JSON."""
    return Response(answer.model_dump_json(), status, headers, media_type=JSON)


def told_plain(answer: object, status: int = 200) -> Response:
    """An answer of plain values as JSON."""
    return Response(orjson.dumps(answer, default=str), status, media_type=JSON)


def _is_list(model: type[Asked], name: str) -> bool:
    return get_origin(model.model_fields[name].annotation) is list


def _word_errors(found: ValidationError) -> str:
    """Word the validation errors by field, without the values."""
    faults = [
        f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}"
        for fault in found.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = len(faults) - _MOST_FAULTS
    return "; ".join([*faults[:_MOST_FAULTS], *([f"and {more} more"] if more > 0 else [])])

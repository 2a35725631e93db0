"""One operation of the HTTP API: a function, whose types are its checks and documentation.

It takes the request and, as ``params``, a model of the query (GET) or of the JSON body (POST), and
returns a model, with a status where that is not 200, or a response of its own. One that is no
coroutine function runs in a reader's thread and may read the store.

Source: OpenAPI Specification 3.1.1.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.responses import JSON, RefusalError, base_type
from lightning_otel.serve.viewer.page import run
from lightning_otel.types.values import suggest_name

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas by media type."""

_MOST_FAULTS: Final = 5
_BODY_BYTES: Final = 1 << 20
_PARAMETER: Final = re.compile(r"{(\w+)(?::\w+)?}")
_REF: Final = "#/components/schemas/{model}"
_REFUSALS: Final[Mapping[int, str]] = {
    400: "Something in it cannot be understood; the message says what.",
    401: "It needs the key.",
    403: "It comes from another site.",
    408: "Its body took too long.",
    413: "It is too long.",
    415: "It is no JSON.",
    421: "This server is not called so.",
    503: "Too much at once, or the store cannot be read or written now; come again.",
}
_BODY_ONLY: Final = frozenset({408, 413, 415})
_SAYS: Final = """\
Spans in by OTLP, rewards by feedback, transitions out, and training asked for. Reading needs the
key of the store (`Authorization: Bearer KEY`); sending spans and feedback does not on loopback.
Times are Unix nanoseconds; a query also takes `10m` and ISO 8601 (UTC if it names no zone). A
refusal is JSON, too, and says why."""


class RequestModel(BaseModel):
    """A request model: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ResponseModel(BaseModel):
    """A response model, made of an object with attributes or of keywords."""

    model_config = ConfigDict(
        use_attribute_docstrings=True, from_attributes=True, populate_by_name=True
    )

    @classmethod
    def of(cls, source: object) -> Self:
        """Return what an object's attributes say."""
        return cls.model_validate(source)


class Parts(NamedTuple):
    """An answer that is sent in parts, as they are made."""

    parts: Iterator[bytes]
    media_type: str
    headers: Mapping[str, str] | None = None


class Refusal(ResponseModel):
    """The reason for a refusal."""

    code: int
    """Of google.rpc.Code, as OTLP wants it."""
    message: str
    """What is wrong, and after a semicolon what to do."""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One operation of the API.

    Attributes:
        work: The function that serves it.
        description: Its summary; more of it after an empty line.
        params: The model of its query or body.
        answer_type: The type of its answer, where that is JSON.
        answers: Its answers by status, beside the refusals that all have.
        content: Forms of an answer that is not of that type.
        bodies: Forms of a body that is not ``params``.
        is_open: Whether everybody on this machine may ask for it, without the key.
    """

    method: Literal["GET", "POST"]
    path: str
    work: Callable[..., Any]
    description: str
    params: type[RequestModel] | None
    answer_type: Any
    answers: Mapping[int, str]
    content: Schemas = field(default_factory=dict)
    bodies: Schemas = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    most_bytes: int = _BODY_BYTES

    @property
    def route(self) -> Route:
        """The route that serves it."""
        return Route(self.path, self.serve, methods=[self.method])

    async def serve(self, request: Request) -> Response:
        """Answer a request."""
        arguments = [request]
        if self.params is not None:
            read = _read_query if self.method == "GET" else self._read_body
            arguments.append(await read(request, self.params))
        if inspect.iscoroutinefunction(self.work):
            result = await self.work(*arguments)
        else:
            # Anybody here may give feedback: who has the key does not wait for that.
            readers = request.app.state.feedback_readers if self.is_open else None
            result = await run(request, lambda _: self.work(*arguments), readers=readers)
        if isinstance(result, Response):
            return result
        if isinstance(result, Parts):
            answer: Response = await request.app.state.streams.answer(*result)
            return answer
        body, status = result if isinstance(result, tuple) else (result, 200)
        return Response(body.model_dump_json(), status, media_type=JSON)

    async def _read_body(self, request: Request, model: type[RequestModel]) -> Any:
        body = await request.app.state.bodies.read(request)
        if len(body) > self.most_bytes:
            raise RefusalError(413, f"a body may have {self.most_bytes} bytes here")
        if body and base_type(request.headers.get("content-type")) != JSON:
            raise RefusalError(415, f"send {JSON}")
        try:
            return model.model_validate_json(body or b"{}", strict=True)
        except ValidationError as exc:
            raise RefusalError(400, _word_errors(exc, model)) from exc

    def describe(self, schemas: Mapping[Any, Any], models: Mapping[str, Any]) -> dict[str, Any]:
        """Return its part of the OpenAPI document, of the schemas of all types and models."""
        summary, _, more = self.description.partition("\n\n")
        words = re.findall(r"\w+", _PARAMETER.sub(r"by_\1", self.path))
        description: dict[str, Any] = {
            "operationId": "_".join([self.method.lower(), *words]),
            "summary": summary,
            "responses": self._describe_responses(schemas),
            "security": [{}, {"key": []}] if self.is_open else [{"key": []}],
        }
        if more:
            description["description"] = more
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(self.path)
        ]
        model = {} if self.params is None else models[self.params.__name__]
        if self.method == "GET":
            parameters += map(_describe_parameter, model.get("properties", {}).items())
        else:
            content = self.bodies or {JSON: schemas[self.params, "validation"]}
            description["requestBody"] = {
                "required": self.is_open or "required" in model,
                "content": {kind: {"schema": schema} for kind, schema in content.items()},
            }
        return {**description, **({"parameters": parameters} if parameters else {})}

    def _describe_responses(self, schemas: Mapping[Any, Any]) -> dict[str, Any]:
        responses: dict[str, Any] = {}
        for status, meaning in sorted({**_REFUSALS, **self.answers}.items()):
            if status in _BODY_ONLY and self.method == "GET":
                continue
            if status == 401 and self.is_open:
                meaning = "It needs the token, where this server has one."
            is_served = status < 300
            model = schemas[
                self.answer_type if is_served and not self.content else Refusal, "serialization"
            ]
            content = self.content if is_served and self.content else {JSON: model}
            responses[str(status)] = {
                "description": meaning,
                "content": {kind: {"schema": schema} for kind, schema in content.items()},
            }
            if is_served and self.headers:
                responses[str(status)]["headers"] = {
                    name: {"description": text, "schema": {"type": "string"}}
                    for name, text in self.headers.items()
                }
        return responses


def operation(
    method: Literal["GET", "POST"], path: str, answers: Mapping[int, str] | None = None, **more: Any
) -> Callable[[Callable[..., Any]], ApiOperation]:
    """Make an operation of a function; what follows the path is as in :class:`ApiOperation`."""

    def make(work: Callable[..., Any]) -> ApiOperation:
        types = get_type_hints(work)
        description, answer = inspect.getdoc(work) or "", types["return"]
        if get_origin(answer) is tuple:
            answer = get_args(answer)[0]
        is_model = isinstance(answer, type) and issubclass(answer, ResponseModel)
        served = {200: (is_model and inspect.getdoc(answer)) or "The answer."}
        served = {} if any(status < 300 for status in answers or {}) else served
        served |= answers or {}
        return ApiOperation(
            method, path, work, description, types.get("params"), answer, served, **more
        )

    return make


async def _read_query(request: Request, model: type[RequestModel]) -> Any:
    texts: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        field = model.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is list:
            texts[name] = values
        elif len(values) > 1:
            raise RefusalError(400, f"{name} stands {len(values)} times in the query; give one")
        else:
            texts[name] = values[0]
    try:
        return model.model_validate(texts)
    except ValidationError as exc:
        raise RefusalError(400, _word_errors(exc, model)) from exc


def write_json(value: Mapping[str, Any], name: str, most_chars: int) -> str:
    """Return a part of a body as JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as exc:
        raise RefusalError(400, f"{name} contains NaN or infinity") from exc
    if len(text) > most_chars:
        raise RefusalError(413, f"{name} may have {most_chars} characters")
    return text


def _word_errors(error: ValidationError, model: type[RequestModel]) -> str:
    """Word the validation errors by field, without the values."""
    faults = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        name, text = ".".join(map(str, fault["loc"])) or "the body", fault["msg"]
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
            text = f"unknown; {suggest_name(name, list(model.model_fields))}"
        faults.append(f"{name}: {text}")
    more = len(faults) - _MOST_FAULTS
    return "; ".join([*faults[:_MOST_FAULTS], *([f"and {more} more"] if more > 0 else [])])


def document(operations: Iterable[ApiOperation]) -> dict[str, Any]:
    """Return the OpenAPI document of some operations."""
    routes = list(operations)
    params: set[tuple[Any, JsonSchemaMode]] = {(item.params, "validation") for item in routes}
    answers: set[tuple[Any, JsonSchemaMode]] = {
        (Refusal if item.content else item.answer_type, "serialization") for item in routes
    }
    schemas, definitions = TypeAdapter.json_schemas(
        [(*key, TypeAdapter(key[0])) for key in sorted({*params, *answers}, key=str) if key[0]],
        ref_template=_REF,
    )
    models = definitions["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for item in routes:
        methods = paths.setdefault(_PARAMETER.sub(r"{\1}", item.path), {})
        methods[item.method.lower()] = item.describe(schemas, models)
    key = {
        "type": "http",
        "scheme": "bearer",
        "description": "What `lightning-otel serve` prints, or the token it was given.",
    }
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "lightning-otel",
            "version": version("lightning-otel"),
            "description": _SAYS,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": models, "securitySchemes": {"key": key}},
    }


def _describe_parameter(field: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a parameter of a query, which may be left out, but not be null."""
    name, schema = field
    properties = {k: v for k, v in schema.items() if k not in ("title", "description", "anyOf")}
    if properties.get("default", "") is None:
        del properties["default"]
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    parameter = {
        "name": name,
        "in": "query",
        "schema": {**properties, **(kinds[0] if kinds else {})},
    }
    return parameter | {key: schema[key] for key in ("description",) if key in schema}

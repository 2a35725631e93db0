"""The OpenAPI document: what this server serves, made of the operations that serve it.

Source: OpenAPI Specification 3.1.1.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api import operations
from lightning_otel.serve.api.operation import Answer, Operation, Refusal, Schema, told_plain

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
Times are Unix nanoseconds. A refusal is JSON, too, and says why."""


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The document of some operations."""
    each_operation = list(operations)
    models = sorted(_collect_models(each_operation), key=lambda model: model.__name__)
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for each in each_operation:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _describe_operation(each, found["$defs"])
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
        "components": {
            "schemas": found["$defs"],
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "What `lightning-otel serve` prints, or the token it was given.",
                }
            },
        },
    }


def _collect_models(operations: Iterable[Operation]) -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = {Refusal}
    for each in operations:
        given = [each.query, each.body, *each.bodies.values()]
        for answer in each.answers.values():
            given += answer.content.values()
        for schema in given:
            found |= _find_named_models(schema)
    return found


def _find_named_models(schema: object) -> set[type[BaseModel]]:
    """The models that a schema names."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return {schema}
    if isinstance(schema, Mapping):
        return set().union(*map(_find_named_models, schema.values()))
    if isinstance(schema, (list, tuple)):
        return set().union(*map(_find_named_models, schema))
    return set()


def _make_schema(schema: object) -> Any:
    """A schema with a reference for each model in it."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return {"$ref": _REF.format(model=schema.__name__)}
    if isinstance(schema, Mapping):
        return {name: _make_schema(value) for name, value in schema.items()}
    if isinstance(schema, (list, tuple)):
        return [_make_schema(each) for each in schema]
    return schema


def _describe_operation(operation: Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    summary, _, more = operation.says.partition("\n\n")
    made: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": summary,
        "responses": _describe_responses(operation),
        "security": [{}, {"key": []}] if operation.is_open else [{"key": []}],
    }
    if more:
        made["description"] = more
    if parameters := [*_in_path(operation), *_in_query(operation, schemas)]:
        made["parameters"] = parameters
    bodies: dict[str, Schema] = dict(operation.bodies)
    if operation.body is not None:
        bodies[JSON] = operation.body
    if bodies:
        content = {kind: {"schema": _make_schema(schema)} for kind, schema in bodies.items()}
        made["requestBody"] = {"required": operation.needs_body, "content": content}
    return made


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", _PARAMETER.sub(r"by_\1", operation.path))
    return "_".join([operation.method.lower(), *words])


def _describe_responses(operation: Operation) -> dict[str, Any]:
    found = {
        str(status): _describe_response(answer) for status, answer in operation.answers.items()
    }
    for status, says in _REFUSALS.items():
        if status in _BODY_ONLY and operation.method == "GET":
            continue
        if status == 401 and operation.is_open:
            says = "It needs the token, where this server has one."
        found.setdefault(str(status), _describe_response(Answer(says)))
    return dict(sorted(found.items()))


def _describe_response(answer: Answer) -> dict[str, Any]:
    content = answer.content or {JSON: Refusal}
    made: dict[str, Any] = {
        "description": answer.says,
        "content": {kind: {"schema": _make_schema(schema)} for kind, schema in content.items()},
    }
    if answer.headers:
        made["headers"] = {
            name: {"description": says, "schema": {"type": "string"}}
            for name, says in answer.headers.items()
        }
    return made


def _in_path(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]


def _in_query(operation: Operation, schemas: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each field of the query's model is a parameter."""
    if operation.query is None:
        return []
    found: list[dict[str, Any]] = []
    for name, schema in schemas[operation.query.__name__]["properties"].items():
        given = {key: value for key, value in schema.items() if key not in ("title", "description")}
        one: dict[str, Any] = {"name": name, "in": "query", "schema": _without_null(given)}
        if "description" in schema:
            one["description"] = schema["description"]
        found.append(one)
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of what may be left out, but not be null, as nothing in a query can be."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if "default" in schema and schema["default"] is not None:
        rest["default"] = schema["default"]
    return (
        {**rest, **kinds[0]} if len(kinds) == 1 else {**rest, **({"anyOf": kinds} if kinds else {})}
    )


async def openapi(request: Request) -> Response:
    """This document."""
    return told_plain(await run_in_threadpool(_describe_api))


@cache
def _describe_api() -> dict[str, Any]:
    return document(operations())


OPERATIONS: Final = (
    Operation(
        "GET", "/openapi.json", openapi, "This document.",
        {200: Answer("OpenAPI 3.1.", {JSON: {"type": "object"}})},
    ),
)  # fmt: skip

"""The OpenAPI document: valid, whole, and kept by what is served, whatever is asked.

``LIGHTNING_TEST_EXAMPLES`` is how many requests are made up for each operation.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.applications import Starlette
from starlette.routing import Match
from tests.acting import act
from tests.pages import DOCS, blocks, part, python, ran
from tests.serve.api.conftest import Client
from tests.serve.serving import Serving
from tests.viewer.client import Answer

from lightning_otel import Store
from lightning_otel.serve import otlp
from lightning_otel.serve.api import MEMBERS, ROUTES, LazyRoutes, operations
from lightning_otel.serve.api.events import EventBroker
from lightning_otel.serve.api.operation import document
from lightning_otel.serve.api.repositories import Repositories
from lightning_otel.serve.app import make_app
from lightning_otel.serve.ingest import Ingester
from lightning_otel.serve.server import make_access
from lightning_otel.serve.viewer import ROUTES as PAGES

PAGE = DOCS / "service.md"
DOCUMENT = document(operations())
OPERATIONS = [
    (method, path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if path != "/v1/events"  # which does not end; it has tests of its own
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["10m", "-1", "1e400", "NaN", "\x00", "live", "re:(", "'; --", "../..", "é"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


def test_document_is_valid() -> None:
    """By the specification's own schema."""
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_document_tells_of_every_route_and_of_no_other(store: Store) -> None:
    """What the app serves beside pages for people, method by method, each by one member alone."""
    ingester = Ingester(store)
    repositories = Repositories(store)
    guard: Any = make_app(
        store,
        ingester,
        make_access("127.0.0.1", ""),
        repositories,
        EventBroker(store, repositories),
    )
    ingester.close()
    app: Starlette = guard._app

    assert [route for route in app.routes if route not in PAGES] == [*otlp.ROUTES, *ROUTES]
    members = {name: LazyRoutes(name, roots) for name, roots in MEMBERS.items()}
    for name in MEMBERS:
        for each in operations([name]):
            scope = {"type": "http", "path": each.path}
            own = [other for other in MEMBERS if members[other].matches(scope)[0] is Match.FULL]
            # Spans are taken without the API's models; a call of gRPC is none of HTTP's operations.
            assert own == ([name] if each.path != "/v1/traces" else []), each.path
            told = DOCUMENT["paths"][each.path.replace(":path}", "}")][each.method.lower()]
            assert told["summary"]
            assert ("requestBody" in told) == (each.method == "POST")
    served = {(each.method.lower(), each.path.replace(":path}", "}")) for each in operations()}
    told = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert served == told


def test_server_loads_what_is_asked_for(run_python: Callable[..., str]) -> None:
    """Neither the API's models nor what the state beside a store needs, while nobody asks."""
    script = (
        "import sys, lightning_otel.serve.server as _\n"
        "print([name for name in ('pydantic', 'sqlalchemy', 'duckdb') if name in sys.modules])"
    )

    assert run_python(script) == "[]\n"


def test_document_is_served(client: Client) -> None:
    """As it stands here."""
    assert client.get("/openapi.json") == json.loads(json.dumps(DOCUMENT))


def test_page_runs_and_names_every_operation(tmp_path: Path) -> None:
    """The server's store has two steps of an agent; its OpenAPI document lists the operations."""
    here = part(PAGE, __file__)
    path = tmp_path / ".lightning" / "traces.duckdb"
    store = Store(path)
    for name, task in (("r1", {"category": "image"}), ("r2", None)):
        act(store, name, task=task)
    with Serving(path, "--port", "0") as running:
        program = python(here)
        program[-1] = program[-1].replace("http://127.0.0.1:4318", running.url)
        done = ran(program, tmp_path)
        answer = running.ask("GET", "/openapi.json", authorization=f"Bearer {running.key}")

    assert done.stdout == "".join(blocks(here, "text"))
    page = PAGE.read_text()
    for operation in json.loads(answer.body)["paths"]:
        tail = operation.rpartition("/")[2].partition(":")[0].partition("{")[0]
        assert operation.partition("{")[0] in page or f"…/{tail}" in page, operation


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that may be a reference."""
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def plausible(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema may allow, and such at its edges."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of(*map(plausible, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "integer":
        return st.sampled_from([0, 1, 2, 2**31, 2**63, -1])
    if kind == "number":
        return st.sampled_from([0, 1, -1, 0.5, 5, 1e308])
    if kind == "boolean":
        return st.booleans()
    if kind == "array":
        return st.lists(SCALARS, max_size=2)
    if kind == "object":
        return st.dictionaries(st.text("ab_", min_size=1, max_size=3), SCALARS, max_size=2)
    return st.sampled_from(
        ["r1", "a" * 16, "b" * 32, "", "x" * 300, "\x00", "10m", "'\"", "apo", "%"]
    )


@st.composite
def requests(draw: st.DrawFn, method: str, path: str) -> tuple[str, bytes]:
    """An address and a body of an operation, more or less as it wants them."""
    told = DOCUMENT["paths"][path][method]
    query: list[tuple[str, str]] = []
    for parameter in told.get("parameters", []):
        if parameter["in"] == "path":
            text = draw(st.sampled_from(["r1", "x", "a/b", "..", "\x00", "é", "%", "a" * 2000]))
            path = path.replace(f"{{{parameter['name']}}}", quote(text, safe=""))
        elif draw(st.integers(0, 3)) == 0:
            value = draw(plausible(parameter["schema"]) | SCALARS)
            query.append((parameter["name"], str(value)))
    if draw(st.integers(0, 9)) == 0:
        query.append((draw(st.text("ab", max_size=3)), draw(st.text(max_size=5))))
    address = f"{path}?{urlencode(query, errors='replace')}" if query else path
    if method == "get":
        return address, b""
    content = told["requestBody"]["content"].get("application/json", {"schema": {}})
    properties = resolved(content["schema"]).get("properties", {})
    body: dict[str, Any] = {
        name: draw(plausible(schema) | VALUES)
        for name, schema in properties.items()
        if draw(st.booleans())
    }
    given = draw(st.just(body) | st.just(body) | st.just(body) | VALUES)
    return address, json.dumps(given).encode("utf-8", "replace")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_asked_is_answered_or_refused(client: Client, method: str, path: str) -> None:
    """Never a 5xx, whatever stands in address and body; a refusal says why, in JSON."""
    statuses = DOCUMENT["paths"][path][method]["responses"]

    @settings(
        max_examples=max(4, settings().max_examples // 6),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(asked=requests(method, path))
    def ask(asked: tuple[str, bytes]) -> None:
        address, body = asked
        answer: Answer = client.ask(method.upper(), address, body or None)
        assert answer.status < 500, (address, body, answer.body)
        if path != "/v1/traces":
            assert str(answer.status) in {*statuses, "404"}, (address, body, answer)
        if answer.status >= 400:
            assert json.loads(answer.body)["message"]

    ask()

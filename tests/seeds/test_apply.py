"""What was learnt reaches an unchanged program of ``lightning_otel.agl``; each is a new process."""

import json
from collections.abc import Callable

import pytest

from lightning_otel import Resources, Store, Trainer
from lightning_otel.state import State
from lightning_otel.testing import ScriptedServer, scripted_server

PROGRAM = """
import json, sys, threading, time
import openai
import lightning_otel.agl as agl
client = openai.OpenAI()
if "without sqlalchemy" in sys.argv:
    sys.modules["sqlalchemy"] = None

def simple_agent(query):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": query}]
    client.chat.completions.create(model="m", messages=messages)

def outer():
    with agl.context(store=agl.LightningStore()):
        simple_agent("x")

begun = time.monotonic()
BLOCK
threads = [each.name for each in threading.enumerate() if each.name == "lightning-otel-apply"]
loaded = [name for name in ("sqlalchemy",) if sys.modules.get(name)]
print(json.dumps({"s": time.monotonic() - begun, "threads": threads, "loaded": loaded}))
"""
CONTEXT = "outer()"
DECORATED = "agl.auto_trace()(lambda: simple_agent('x'))()"
TOLD_NOT_TO = """
with agl.auto_trace(apply=False):
    outer()
"""
WAYS = {
    "context": (CONTEXT, {}, "learnt"),
    "decorator": (DECORATED, {}, "learnt"),
    "no extra": (CONTEXT, {"argument": "without sqlalchemy"}, "learnt"),
    "another store's": (CONTEXT, {"LIGHTNING_OTEL_STATE": "other.duckdb"}, "own"),
    "switched off": (CONTEXT, {"LIGHTNING_OTEL_APPLY": "0"}, "own"),
    "told not to": (CONTEXT.replace("outer()", "agl.context(apply=False)(outer)()"), {}, "own"),
    "within one that is told not to": (TOLD_NOT_TO, {}, "own"),
    "shared, not asked": (
        CONTEXT, {"LIGHTNING_OTEL_STATE": "postgresql+psycopg://u@127.0.0.1:9/none"}, "own"
    ),
}  # fmt: skip


@pytest.fixture
def run(
    run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, dict[str, object]]]:
    """Runs the program; gives the system message that its server was sent, and what it tells."""

    def go(block: str, **more: str) -> tuple[str, dict[str, object]]:
        argument = more.pop("argument", "")
        with scripted_server(lambda body: "fine") as server:
            for name, value in {
                "OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none", **more,
            }.items():  # fmt: skip
                monkeypatch.setenv(name, value)
            out = run_python(PROGRAM.replace("BLOCK", block), argument)
            return system_of(server), json.loads(out)

    return go


def system_of(server: ScriptedServer) -> str:
    """The system message of the one request."""
    (request,) = server.requests
    return str(request["messages"][0]["content"])


@pytest.mark.parametrize("way", WAYS)
def test_published_prompt_is_in_the_first_request(
    run: Callable[..., tuple[str, dict[str, object]]], way: str
) -> None:
    """By default, with no library loaded for it; and not where somebody said no."""
    block, environment, expected = WAYS[way]
    Resources().publish("system_prompt", "learnt")

    sent, facts = run(block, **environment)

    assert (sent, facts["loaded"]) == (expected, [])
    steps = list(Store().transitions())
    stamps = [dict(step.resources) for step in steps]
    assert stamps == [{"system_prompt": "1"} if expected == "learnt" else {}]


def test_nothing_happens_where_nothing_was_published(
    run: Callable[..., tuple[str, dict[str, object]]],
) -> None:
    """Without a state, and with one that holds runs alone: no thread, no library, no file."""
    assert run(CONTEXT)[1]["threads"] == []
    assert not State.beside(Store()).is_made
    with scripted_server(lambda body: "fine"):
        Trainer(lambda task: 1.0, "baseline").fit(["a"])

    sent, facts = run(CONTEXT)

    assert (sent, facts["threads"], facts["loaded"]) == ("own", [], [])

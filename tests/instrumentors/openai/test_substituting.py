"""Requests made with live resources: only when told, sent as recorded, and never to harm."""

import copy
import inspect
import json
import logging
import os
import pickle
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import trace
from tests.instrumentors.conftest import broken
from tests.instrumentors.openai.test_surfaces import (
    ASKED,
    HISTORY,
    JSON_SURFACES,
    TOOL,
    asked_of,
    sent,
)

from lightning_otel import Recording, Resources, Store, auto_trace, capture, carried, context
from lightning_otel.demo.server import DemoServer, LogEntry
from lightning_otel.errors import StoreError
from lightning_otel.instrumentors import substitution
from lightning_otel.instrumentors.openai import options
from lightning_otel.instrumentors.substitution import requests as substituting
from lightning_otel.instrumentors.substitution import watcher
from lightning_otel.state import State
from lightning_otel.tracing import Traced
from lightning_otel.types import conventions as c

SHAPES = [
    "chat sampling", "chat history", "chat raw", "chat stream",
    "chat stream helper", "responses", "responses items", "responses stream", "embeddings many",
    "completions many", "by hand", "chat parse",
]  # fmt: skip
BETTER = "Answer with one word."
EXAMPLES: Any = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "two"}]
SHOWN: Any = [{"role": "system", "content": BETTER}, *EXAMPLES]


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request waits for what is live at that moment; the pace is tested by itself."""
    monkeypatch.setattr("lightning_otel.resources.FRESH_S", 0.0)
    monkeypatch.setattr(watcher, "FRESH_S", 0.0)
    monkeypatch.setattr(watcher, "STALE_S", 0.0)
    monkeypatch.setattr(watcher, "CATCH_UP_S", 5.0)
    monkeypatch.setattr(watcher, "FIRST_S", 20.0)


@dataclass
class Scene:
    """A store with its resources, and a client of a server."""

    store: Store
    resources: Resources
    server: DemoServer
    client: openai.OpenAI

    def publish(self, name: str, body: Any, **options: Any) -> None:
        self.resources.publish(name, body, **options)

    def applied(self, **options: Any) -> Traced:
        return auto_trace(store=self.store, apply=True, **options)

    def ask(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "toy", "messages": ASKED, **fields})

    @property
    def prompts(self) -> list[str | None]:
        return [prompt_of(exchange) for exchange in self.server.log]


@pytest.fixture
def scene(store: Store, server: DemoServer, client: openai.OpenAI) -> Scene:
    """Resources that nobody has published yet."""
    return Scene(store, Resources(State(store.name)), server, client)


def versions(recording: Recording) -> list[str | None]:
    return [step.resource_version for path in recording.trajectories() for step in path.transitions]


def prompt_of(exchange: LogEntry) -> str | None:
    """The system prompt that a server was sent; None if there was none."""
    body = exchange.request or {}
    if "instructions" in body:
        return str(body["instructions"])
    items = body.get("messages", body.get("input"))
    first = items[0] if isinstance(items, list) else None
    if not isinstance(first, dict) or first.get("role") != "system":
        return None
    return str(first["content"])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_surface_is_sent_with_what_is_live_and_recorded_so(
    name: str, is_async: bool, facts: Any, scene: Scene
) -> None:
    """On every surface the server gets the prompt, and the span says what the server got."""
    scene.publish("system_prompt", BETTER)
    scene.publish("endpoint", {"sampling": {"temperature": 0.75}})
    knows_prompts = name.startswith(("chat", "responses", "beta", "by hand"))

    with scene.applied() as recording:
        asked_of(name, scene.server, is_async=is_async)

    (exchange,) = scene.server.log
    (span,) = facts.calls(recording)
    attributes = dict(span.attributes)
    stamped = json.loads(attributes.pop(c.RESOURCES, "{}")).get("*", {})
    more = {"output_type": "json"} if name in JSON_SURFACES else {}
    facts.agree(replace(span, attributes=attributes), exchange, **more)
    assert prompt_of(exchange) == (BETTER if knows_prompts else None)
    if "embeddings" in name:
        assert stamped == {}
        assert "temperature" not in (exchange.request or {})
    else:
        assert stamped == {"endpoint": "1"} | ({"system_prompt": "1"} if knows_prompts else {})
        assert (exchange.request or {})["temperature"] == 0.75


@pytest.mark.parametrize("name", ["chat stream", "responses items", "embeddings"])
@pytest.mark.parametrize(("live", "is_asked"), [("system_prompt", False), ("another", True)])
def test_nothing_to_apply_sends_the_agents_own_bytes(
    name: str, live: str, is_asked: bool, scene: Scene
) -> None:
    """Without `apply`, or without a resource, requests are those of an agent without us."""
    scene.publish(live, BETTER)
    with DemoServer() as untouched:
        expected = asked_of(name, untouched)
        (wanted,) = untouched.log

    with auto_trace(store=scene.store, apply=is_asked) as recording:
        found = asked_of(name, scene.server)

    (exchange,) = scene.server.log
    assert (found, exchange.sent, sent(exchange)) == (expected, wanted.sent, sent(wanted))
    assert all(c.RESOURCES not in span.attributes for span in recording.spans())


def test_agents_objects_stay_as_they_are(scene: Scene) -> None:
    """Messages, tools and bodies that the agent keeps are the same objects with the same words."""
    scene.publish("system_prompt", SHOWN)
    scene.publish("endpoint", {"model": "tuned", "sampling": {"stop": ["END"]}})
    messages = copy.deepcopy([*ASKED, *HISTORY])
    extra = {"temperature": 0.5, "stop": ["x"]}
    before = copy.deepcopy([messages, TOOL, extra])

    with scene.applied():
        for _ in range(2):
            scene.ask(messages=messages, tools=[TOOL], extra_body=extra)

    assert [messages, TOOL, extra] == before
    first, second = (exchange.request or {} for exchange in scene.server.log)
    assert first == second
    assert first["messages"] == [*SHOWN, *messages[1:]]
    assert (first["model"], first["stop"], first["temperature"]) == ("tuned", ["END"], 0.5)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


CHAT, RESPONSES, COMPLETIONS = "/chat/completions", "/responses", "/completions"
SAMPLING = {"max_tokens": 9, "top_p": 0.5, "seed": 7, "reasoning_effort": "low"}
BODIES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "no prompt": (CHAT, SHOWN, {"messages": [user("q")]}, {"messages": [*SHOWN, user("q")]}),
    "developer": (
        CHAT, SHOWN, {"messages": [{"role": "developer", "content": "d"}, user("q")]},
        {"messages": [{"role": "developer", "content": BETTER}, *EXAMPLES, user("q")]},
    ),
    "two prompts": (
        CHAT, SHOWN, {"messages": [system("one"), system("two"), user("q")]},
        {"messages": [SHOWN[0], system("two"), *EXAMPLES, user("q")]},
    ),
    "prompt alone": (CHAT, SHOWN, {"messages": [system("alone")]}, {"messages": SHOWN}),
    "own prompt in it": (
        CHAT, "{system_prompt} The task: {task}. Write {{x}}.", {"messages": ASKED},
        {"messages": [system('Be brief. The task: {"n":1}. Write {x}.'), *ASKED[1:]]},
    ),
    "unknown placeholder": (CHAT, "Say {thing}", {"messages": ASKED}, {"messages": ASKED}),
    "input": (
        RESPONSES, SHOWN, {"input": "q"}, {"instructions": BETTER, "input": [*EXAMPLES, user("q")]}
    ),
    "instructions": (
        RESPONSES, SHOWN, {"input": "q", "instructions": "own"},
        {"instructions": BETTER, "input": [*EXAMPLES, user("q")]},
    ),
    "prompt in the input": (
        RESPONSES, SHOWN, {"input": [system("own"), user("q")]}, {"input": [*SHOWN, user("q")]}
    ),
    # The server holds the conversation, with its examples.
    "conversation": (
        RESPONSES, SHOWN, {"input": "q", "previous_response_id": "resp_1"},
        {"instructions": BETTER, "input": "q", "previous_response_id": "resp_1"},
    ),
    # A limit has one name in a request, and nothing is sent that an API refuses.
    "sampling of a chat": (
        CHAT, SAMPLING, {"messages": ASKED, "max_completion_tokens": 3, "top_p": 0.9},
        {"messages": ASKED, "max_completion_tokens": 9, "top_p": 0.5, "seed": 7,
         "reasoning_effort": "low"},
    ),
    "sampling of a response": (
        RESPONSES, SAMPLING, {"input": "q", "reasoning": {"summary": "auto"}},
        {"input": "q", "max_output_tokens": 9, "top_p": 0.5,
         "reasoning": {"summary": "auto", "effort": "low"}},
    ),
    "sampling of a completion": (
        COMPLETIONS, SAMPLING, {"prompt": "q"},
        {"prompt": "q", "max_tokens": 9, "top_p": 0.5, "seed": 7},
    ),
}  # fmt: skip
"""By name: the path, the prompt or the sampling that is live, the agent's body and the sent one."""


@pytest.mark.parametrize("name", BODIES)
def test_request_is_written_anew(name: str, caplog: pytest.LogCaptureFixture, scene: Scene) -> None:
    """The prompt stands where the agent's stood, examples before the talk."""
    path, live, body, expected = BODIES[name]
    if isinstance(live, dict):
        scene.publish("endpoint", {"sampling": live})
    else:
        scene.publish("system_prompt", live)

    with scene.applied(task={"n": 1}):
        for _ in range(2):
            scene.client.post(path, body={"model": "toy", **copy.deepcopy(body)}, cast_to=object)

    assert [each.request for each in scene.server.log] == [{"model": "toy", **expected}] * 2
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["system_prompt@1 needs thing" in text for text in told] == [True] * (body == expected)


def test_endpoint_elsewhere_gets_the_request_but_not_the_keys(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    """Another server is asked, without the client's secrets; its own server gets them as ever."""
    headers = {"X-Gateway-Key": "secret", "User-Agent": "mine"}
    scene.client = scene.client.with_options(default_headers=headers)
    with DemoServer() as other:
        scene.publish("endpoint", {"base_url": other.base_url, "model": "tuned"})
        with scene.applied() as recording:
            scene.ask(extra_headers={"X-Own": "secret"})
            monkeypatch.setenv("LIGHTNING_OTEL_ENDPOINT_KEY", "theirs")
            scene.ask()
            scene.publish("endpoint", {"base_url": scene.server.base_url + "/"}, alias="live")
        with scene.applied():
            scene.ask()

        first, second = other.log
        (port,) = {
            span.attributes[c.SERVER_PORT]
            for span in recording.spans()
            if c.SERVER_PORT in span.attributes
        }
        assert str(port) in other.base_url
    (home,) = scene.server.log
    assert (first.request or {})["model"] == "tuned"
    assert first.headers["authorization"] == "Bearer none"
    assert second.headers["authorization"] == "Bearer theirs"
    assert first.headers["user-agent"] == "mine"
    assert not {"x-gateway-key", "x-own"} & first.headers.keys()
    assert (home.path, home.headers["authorization"]) == ("/v1/chat/completions", "Bearer k")


PLANNERS = [("system_prompt", "for all"), ("planner/system_prompt", "own")]
NUMBERED = [("system_prompt", text) for text in ("one", "two", "three")]
PINNED: list[tuple[list[tuple[str, str]], dict[str, Any], str, str]] = [
    (NUMBERED, {}, "three", "system_prompt@3"),
    (NUMBERED, {"resources": {"*": {"system_prompt": 2}}}, "two", "system_prompt@2"),
    (NUMBERED, {"resources": {"*": {"system_prompt": "mine"}}}, "Be brief.", "system_prompt@mine"),
    (NUMBERED, {"resources": {"*": {"system_prompt": 9}}}, "Be brief.", "system_prompt@9"),
    (PLANNERS, {}, "for all", "system_prompt@1"),
    (PLANNERS, {"agent": "planner"}, "own", "planner/system_prompt@1"),
    (PLANNERS, {"agent": "writer"}, "for all", "system_prompt@1"),
    # Both may be stamped, as a runner does, though there is no such version of the common one.
    ([*PLANNERS, ("planner/system_prompt", "two")],
     {"agent": "planner", "resources": {"*": {"system_prompt": 2, "planner/system_prompt": 2}}},
     "two", "planner/system_prompt@2,system_prompt@2"),
]  # fmt: skip


@pytest.mark.parametrize(("published", "options", "prompt", "version"), PINNED)
def test_recording_says_who_is_given_which_version(
    published: list[tuple[str, str]],
    options: dict[str, Any],
    prompt: str,
    version: str,
    caplog: pytest.LogCaptureFixture,
    scene: Scene,
) -> None:
    """What is pinned is given, and what is no version of ours is left."""
    for name, text in published:
        scene.publish(name, text, alias="live")

    with scene.applied(**options) as recording:
        scene.ask()

    assert (scene.prompts, versions(recording)) == ([prompt], [version])
    assert ("system_prompt@9 is not applied" in caplog.text) == version.endswith("9")


def test_agent_is_who_a_block_or_a_span_says(scene: Scene) -> None:
    """Within one recording each agent has its own."""
    for name, text in PLANNERS:
        scene.publish(name, text)

    with scene.applied():
        scene.ask()
        with context(agent="planner"):
            scene.ask()
        named = {c.AGENT_NAME: "planner"}
        with trace.get_tracer("its own").start_as_current_span("agent", attributes=named):
            scene.ask()

    assert scene.prompts == ["for all", "own", "own"]


def test_canary_is_given_to_whole_rollouts(scene: Scene) -> None:
    """All requests of a rollout are made with one version, and the share is as set."""
    scene.publish("system_prompt", "one")
    scene.publish("system_prompt", "two", alias="canary", weight=0.5)

    for n in range(24):
        with scene.applied(rollout_id=f"r{n}"):
            scene.ask()
            scene.ask()

    found = scene.prompts
    assert found[::2] == found[1::2]
    expected = [scene.resources.assigned(f"r{n}")["system_prompt"].format() for n in range(24)]
    assert found[::2] == expected
    assert len(set(expected)) == 2


def test_inner_blocks_and_judges_decide_for_themselves(scene: Scene) -> None:
    """What is named inside goes first; a reward evaluator that asks a model has its own words."""
    scene.publish("system_prompt", BETTER)

    def judge(recording: Recording) -> float:
        scene.ask(messages=[{"role": "system", "content": "Judge."}])
        return 1.0

    with scene.applied(reward_evaluator=judge):
        with auto_trace(apply=False):
            scene.ask()
        with auto_trace():
            scene.ask()
        carried(scene.ask)()

    assert scene.prompts == ["Be brief.", BETTER, BETTER, "Judge."]


def test_rollout_ends_with_what_its_first_request_was_given(scene: Scene) -> None:
    """In all its parts and processes; one that begins within it has what is live by then."""
    scene.publish("system_prompt", "one")

    with scene.applied() as recording:
        scene.ask()
        scene.publish("system_prompt", "two", alias="live")
        scene.publish("planner/system_prompt", "three")
        packed = pickle.dumps(carried(capture.current_frame))
        with context(agent="planner", apply=True):
            scene.ask()
        with auto_trace(store=scene.store, rollout_id="another"):
            scene.ask()
        scene.ask()
    with scene.applied(agent="planner"):
        scene.ask()
    held: Any = pickle.loads(packed)().assigner

    assert scene.prompts == ["one", "one", "two", "one", "three"]
    assert set(versions(recording)) == {"system_prompt@1"}
    assert str(held.assign("any", None, {})["system_prompt"]) == "system_prompt@1"


@pytest.mark.parametrize(
    ("value", "option", "is_on"),
    [("1", None, True), ("true", False, False), ("0", None, False), ("0", True, True)],
)
def test_environment_decides_where_no_option_does(
    value: str,
    option: bool | None,
    is_on: bool,
    monkeypatch: pytest.MonkeyPatch,
    scene: Scene,
) -> None:
    """What is named in the program goes before the environment."""
    scene.publish("system_prompt", BETTER)
    monkeypatch.setenv("LIGHTNING_OTEL_APPLY", value)
    monkeypatch.setenv("LIGHTNING_OTEL_RETOKENIZATION_FIX", value)

    with auto_trace(store=scene.store, apply=option, enable_retokenization_fix=option):
        scene.ask()

    assert (scene.prompts == [BETTER]) is is_on
    assert ("return_token_ids" in (scene.server.log[0].request or {})) is is_on


def test_state_elsewhere_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    """Agents whose spans go to stores of their own may share what they are given."""
    shared = tmp_path / "shared" / "traces.duckdb"
    Resources(State(shared)).publish("system_prompt", BETTER)
    monkeypatch.setenv("LIGHTNING_OTEL_STATE", str(shared))

    with scene.applied():
        scene.ask()

    assert scene.prompts == [BETTER]


def test_every_fault_of_ours_sends_the_agents_own_request(
    monkeypatch: pytest.MonkeyPatch, faults_allowed: None, scene: Scene
) -> None:
    """Each function of substitution fails in turn; the agent gets its answer, the span is kept."""
    scene.publish("system_prompt", SHOWN)
    scene.publish("endpoint", {"base_url": scene.server.base_url, "model": "tuned"})
    scene.resources.set_alias("endpoint", "canary", 1, weight=0.0)
    places: list[tuple[Any, str]] = [
        (module, name)
        for module in (substituting, options, watcher, substitution)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__.startswith(
            ("lightning_otel.instrumentors.substitution", options.__name__)
        )
    ]
    places += [(watcher.Watch, name) for name in ("assign", "begin_reading")]
    places += [(watcher.RolloutVersions, "assign"), (substitution.Standing, "choose")]
    not_reached = {
        "_instructed_responses", "_input_message", "_limit_name", "stamps", "_begin_anew",
        "foreign_headers", "is_plain", "note_unfit",
        "note_change", "resource_of", "standings_of",  # what was read before is kept
    }  # fmt: skip

    for owner, name in places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, broken)
            with scene.applied() as recording:
                answer = scene.ask()
        assert answer.choices[0].message.content
        is_reached = name not in not_reached and (owner, name) != (substitution, "assign_versions")
        assert (prompt_of(scene.server.log[-1]) != BETTER) is is_reached, name
        assert ((scene.server.log[-1].request or {})["model"] == "toy") is is_reached, name
        assert (versions(recording) == [None]) is is_reached, name


def test_damaged_state_leaves_requests_as_they_are(
    caplog: pytest.LogCaptureFixture, scene: Scene
) -> None:
    """It is told once, and the agent goes on."""
    folder = Path(f"{scene.store.name}.d")
    folder.mkdir(parents=True)
    (folder / "state.sqlite").write_bytes(b"not a database" * 100)

    with scene.applied():
        scene.ask()
        scene.ask()

    assert scene.prompts == ["Be brief."] * 2
    told = [record.message for record in caplog.records if "not applied" in record.message]
    assert len(told) == 1


class Hanging:
    """A reader that never answers: a database behind a dead network does so for minutes."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def standings(self) -> Any:
        self.end.wait(30)
        return {}

    def get(self, name: str, version: int | str) -> Any:
        raise AssertionError


def test_state_that_hangs_holds_up_only_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one waits as long as it may, and the rest not at all."""
    monkeypatch.setattr(watcher, "FIRST_S", 0.2)
    reader = Hanging()
    watch = watcher.Watch(lambda: reader)
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        assert watch.assign("key", None, {}) == {}
        took.append(time.perf_counter() - begun)
    reader.end.set()

    assert 0.15 < took[0] < 5
    assert max(took[1:]) < 0.1


class Locked:
    """A reader that fails at first: a database that another process has locked does so."""

    def __init__(self) -> None:
        self.tries = 0

    def standings(self) -> Any:
        self.tries += 1
        if self.tries == 1:
            raise StoreError("the database is locked")
        return {}

    def get(self, name: str, version: int | str) -> Any:
        return f"{name}@{version}"


def test_pinned_version_is_given_though_the_first_reading_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the request would be made with what the agent wrote, and count for the version."""
    monkeypatch.setattr(watcher, "FRESH_S", 60)
    reader: Any = Locked()

    given = watcher.Watch(lambda: reader).assign("key", None, {"system_prompt": 1})

    assert given == {"system_prompt": "system_prompt@1"}


def test_forked_child_reads_for_itself(scene: Scene) -> None:
    """Whatever the parent was reading as it forked, nobody in the child waits for that."""
    scene.publish("system_prompt", BETTER)
    reader = Hanging()
    watch = watcher.watch_of(f"{scene.resources.state.name} forked", lambda: reader)
    watch._open = lambda: Resources(scene.resources.state)
    child = os.fork()
    if not child:
        found = watch.assign("key", None, {})
        os._exit(0 if str(found.get("system_prompt")) == "system_prompt@1" else 1)
    reader.end.set()

    assert os.waitpid(child, 0)[1] == 0

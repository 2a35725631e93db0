"""Requests made with live resources: only when told, sent as recorded, and never to harm."""

import copy
import inspect
import json
import logging
import os
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import trace
from tests.instrumentors.openai.test_surfaces import (
    ASKED,
    HISTORY,
    JSON_SURFACES,
    TOOL,
    asked_of,
    sent,
)

from lightning_otel import Store, auto_trace, capture, carried, context, emit_reward
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.resources import Resources
from lightning_otel.resources.comparing import version_in
from lightning_otel.state import State
from lightning_otel.substitution import Given, assigning, watching
from lightning_otel.substitution import requests as substituting
from lightning_otel.tracing import Recording, Traced

SHAPES = [
    "chat sampling", "chat history", "chat raw", "chat stream",
    "chat stream helper", "responses", "responses items", "responses stream", "embeddings many",
    "completions many", "by hand", "chat parse",
]  # fmt: skip
BETTER = "Answer with one word."
EXAMPLES: Any = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "two"}]


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request waits for what is live at that moment; the pace is tested by itself."""
    monkeypatch.setattr("lightning_otel.resources.FRESH_S", 0.0)
    monkeypatch.setattr(watching, "FRESH_S", 0.0)
    monkeypatch.setattr(watching, "STALE_S", 0.0)
    monkeypatch.setattr(watching, "CATCH_UP_S", 5.0)
    monkeypatch.setattr(watching, "FIRST_S", 20.0)
    monkeypatch.setattr(substituting, "_told", set())
    monkeypatch.setattr(watching, "_told", set())


@pytest.fixture
def resources(store: Store) -> Resources:
    """The resources beside the store."""
    return Resources(State(store.name))


def client_of(server: DemoServer, **options: Any) -> openai.OpenAI:
    """A client of a server."""
    return openai.OpenAI(base_url=server.base_url, api_key="k", **{"max_retries": 0, **options})


def applied(store: Store, **options: Any) -> Traced:
    """A recording whose requests are made with what is live."""
    return auto_trace(store=store, apply=True, **options)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """One call of the chat API."""
    return client.chat.completions.create(**{"model": "toy", "messages": ASKED, **fields})


def asked(server: DemoServer) -> dict[str, Any]:
    """The body that was asked last."""
    request = server.log[-1].request
    assert request is not None
    return dict(request)


def versions(recording: Recording) -> list[str | None]:
    """What each step of a recording says it was made with."""
    return [step.resource_version for path in recording.trajectories() for step in path.transitions]


def prompt_of(exchange: Exchange) -> str | None:
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
    name: str, is_async: bool, store: Store, server: DemoServer, facts: Any, resources: Resources
) -> None:
    """On every surface the server gets the prompt, and the span says what the server got."""
    resources.publish("system_prompt", BETTER)
    resources.publish("endpoint", {"sampling": {"temperature": 0.75}})
    knows_prompts = name.startswith(("chat", "responses", "beta", "by hand"))

    with applied(store) as recording:
        asked_of(name, server, is_async=is_async)

    (exchange,) = server.log
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
@pytest.mark.parametrize("is_asked", [False, True])
def test_nothing_to_apply_sends_the_agents_own_bytes(
    name: str, is_asked: bool, store: Store, server: DemoServer, resources: Resources
) -> None:
    """Without `apply`, or without a resource, requests are those of an agent without us."""
    if not is_asked:
        resources.publish("system_prompt", BETTER)
        resources.publish("endpoint", {"model": "other"})
    else:
        resources.publish("another_prompt", BETTER)
    with DemoServer() as untouched:
        expected = asked_of(name, untouched)
        (wanted,) = untouched.log

    with auto_trace(store=store, apply=is_asked) as recording:
        found = asked_of(name, server)

    (exchange,) = server.log
    assert found == expected
    assert exchange.sent == wanted.sent
    assert sent(exchange) == sent(wanted)
    assert all(c.RESOURCES not in span.attributes for span in recording.spans())


def test_agents_objects_stay_as_they_are(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """Messages, tools and bodies that the agent keeps are the same objects with the same words."""
    resources.publish("system_prompt", [{"role": "system", "content": BETTER}, *EXAMPLES])
    resources.publish("endpoint", {"model": "tuned", "sampling": {"stop": ["END"]}})
    messages = copy.deepcopy([*ASKED, *HISTORY])
    extra = {"temperature": 0.5, "stop": ["x"]}
    before = copy.deepcopy([messages, TOOL, extra])

    with applied(store), client_of(server) as client:
        for _ in range(2):
            ask(client, messages=messages, tools=[TOOL], extra_body=extra)

    assert [messages, TOOL, extra] == before
    first, second = (exchange.request or {} for exchange in server.log)
    assert first == second
    assert first["messages"] == [
        {"role": "system", "content": BETTER},
        *EXAMPLES,
        *messages[1:],
    ]
    assert (first["model"], first["stop"], first["temperature"]) == ("tuned", ["END"], 0.5)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "q"}], ["system", "user", "assistant", "user"]),
        (
            [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}],
            ["developer", "user", "assistant", "user"],
        ),
        (
            [
                {"role": "system", "content": "one"},
                {"role": "system", "content": "two"},
                {"role": "user", "content": "q"},
            ],
            ["system", "system", "user", "assistant", "user"],
        ),
        ([{"role": "system", "content": "alone"}], ["system", "user", "assistant"]),
    ],
)
def test_prompt_stands_where_the_agents_stood(
    messages: Any, expected: list[str], store: Store, server: DemoServer, resources: Resources
) -> None:
    """The first system message is replaced, or put in front; examples come before the talk."""
    resources.publish("system_prompt", [{"role": "system", "content": BETTER}, *EXAMPLES])

    with applied(store), client_of(server) as client:
        ask(client, messages=messages)

    found = asked(server)["messages"]
    assert [message["role"] for message in found] == expected
    assert found[0]["content"] == BETTER
    assert messages[-1]["content"] in (found[-1]["content"], "alone")


def test_responses_get_instructions_or_input(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """Where the agent wrote its prompt; a conversation that the server holds has examples."""
    resources.publish("system_prompt", [{"role": "system", "content": BETTER}, *EXAMPLES])
    system = {"role": "system", "content": "own"}
    question = {"role": "user", "content": "q"}

    with applied(store), client_of(server) as client:
        client.responses.create(model="toy", input="q")
        plain = asked(server)
        client.responses.create(model="toy", input="q", instructions="own")
        instructed = asked(server)
        client.responses.create(model="toy", input=[system, question])  # type: ignore[list-item]  # as people write it
        in_input = asked(server)
        client.responses.create(model="toy", input="q", previous_response_id="resp_1")
        going_on = asked(server)

    assert plain["instructions"] == instructed["instructions"] == BETTER
    assert plain["input"] == instructed["input"] == [*EXAMPLES, question]
    assert "instructions" not in in_input
    assert in_input["input"] == [{"role": "system", "content": BETTER}, *EXAMPLES, question]
    assert (going_on["instructions"], going_on["input"]) == (BETTER, "q")


def test_placeholders_are_the_task_and_the_agents_own_prompt(
    store: Store, server: DemoServer, resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    """Others cannot be known: such a request stays as it is, which is told once."""
    resources.publish("system_prompt", "{system_prompt} The task: {task}. Write {{x}}.")

    with client_of(server) as client:
        with applied(store, task={"n": 1}):
            ask(client)
        known = asked(server)["messages"][0]["content"]
        resources.publish("system_prompt", "Say {thing}", alias="live")
        with applied(store, task={"n": 1}):
            for _ in range(2):
                ask(client)

    assert known == 'Be brief. The task: {"n":1}. Write {x}.'
    assert asked(server)["messages"] == ASKED
    (told,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "system_prompt@2 needs thing" in told


def test_sampling_is_named_as_each_api_names_it(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """A limit has one name in a request, and nothing is sent that an API refuses."""
    sampling = {"max_tokens": 9, "top_p": 0.5, "seed": 7, "reasoning_effort": "low"}
    resources.publish("endpoint", {"model": "tuned", "sampling": sampling})

    with applied(store), client_of(server) as client:
        ask(client, max_completion_tokens=3, extra_body={"top_p": 0.9})
        chat = asked(server)
        client.responses.create(model="toy", input="q", reasoning={"summary": "auto"})
        responses = asked(server)
        client.completions.create(model="toy", prompt="q")
        completions = asked(server)

    assert {**chat, "messages": 0} == {
        "messages": 0, "model": "tuned", "max_completion_tokens": 9, "top_p": 0.5, "seed": 7,
        "reasoning_effort": "low",
    }  # fmt: skip
    assert responses == {
        "input": "q", "model": "tuned", "max_output_tokens": 9, "top_p": 0.5,
        "reasoning": {"summary": "auto", "effort": "low"},
    }  # fmt: skip
    assert completions == {
        "model": "tuned", "prompt": "q", "max_tokens": 9, "top_p": 0.5, "seed": 7,
    }  # fmt: skip


def test_endpoint_elsewhere_gets_the_request_but_not_the_keys(
    store: Store, server: DemoServer, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server is asked, without the client's secrets; the span names that server."""
    headers = {"X-Gateway-Key": "secret", "User-Agent": "mine"}
    with DemoServer() as other, client_of(server, default_headers=headers) as client:
        resources.publish("endpoint", {"base_url": other.base_url, "model": "tuned"})
        with applied(store) as recording:
            ask(client, extra_headers={"X-Own": "secret"})
            monkeypatch.setenv("LIGHTNING_OTEL_ENDPOINT_KEY", "theirs")
            ask(client)

        first, second = other.log
        (port,) = {
            span.attributes[c.SERVER_PORT]
            for span in recording.spans()
            if c.SERVER_PORT in span.attributes
        }
        assert str(port) in other.base_url
    assert server.log == []
    assert (first.request or {})["model"] == "tuned"
    assert first.headers["authorization"] == "Bearer none"
    assert second.headers["authorization"] == "Bearer theirs"
    assert first.headers["user-agent"] == "mine"
    assert not {"x-gateway-key", "x-own"} & first.headers.keys()


def test_endpoint_at_home_keeps_the_key(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """The client's own server gets what the client sends it."""
    resources.publish("endpoint", {"base_url": server.base_url + "/", "model": "tuned"})

    with applied(store), client_of(server) as client:
        ask(client)

    (exchange,) = server.log
    assert exchange.headers["authorization"] == "Bearer k"
    assert exchange.path == "/v1/chat/completions"


def test_agents_get_their_own_resources(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """An agent is who the recording, its span or a framework says; the others get the common."""
    resources.publish("system_prompt", "for all")
    resources.publish("planner/system_prompt", "for the planner")

    with applied(store) as recording, client_of(server) as client:
        ask(client)
        with context(agent="planner"):
            ask(client)
        named = {c.AGENT_NAME: "planner"}
        with trace.get_tracer("its own").start_as_current_span("agent", attributes=named):
            ask(client)
        with context(agent="writer"):
            ask(client)

    prompts = [prompt_of(exchange) for exchange in server.log]
    assert prompts == ["for all", "for the planner", "for the planner", "for all"]
    steps = [step for path in recording.trajectories() for step in path.transitions]
    assert {(step.agent, step.resource_version) for step in steps} == {
        ("", "system_prompt@1"),
        ("planner", "planner/system_prompt@1"),
        ("writer", "system_prompt@1"),
    }


def test_named_versions_are_pinned(
    store: Store, server: DemoServer, resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    """What a recording says is at work is what it is given; what is no version of ours is left."""
    for text in ("one", "two", "three"):
        resources.publish("system_prompt", text, alias="live")

    with client_of(server) as client:
        for named in ({"*": {"system_prompt": 2}}, {"*": {"system_prompt": "mine"}}):
            with applied(store, resources=named) as recording:
                ask(client)
            ((version,),) = [versions(recording)]
            assert version == f"system_prompt@{named['*']['system_prompt']}"
        with applied(store, resources={"*": {"system_prompt": 9}}):
            ask(client)

    assert [prompt_of(exchange) for exchange in server.log] == ["two", "Be brief.", "Be brief."]
    assert "system_prompt@9 is not applied" in caplog.text


def test_pinned_version_is_given_however_new_it_is(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """Whoever is held to a version published a moment ago never works with another one."""
    resources.publish("system_prompt", "one")

    with client_of(server) as client:
        with applied(store):
            ask(client)
        for version in (2, 3):
            resources.publish("system_prompt", f"number {version}")
            with applied(store, resources={"*": {"system_prompt": version}}):
                ask(client)

    assert [prompt_of(each) for each in server.log] == ["one", "number 2", "number 3"]


def test_pinned_version_of_an_agents_own_goes_before_a_plain_one(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """Both may be stamped, as a runner does, though there is no such version of the common one."""
    resources.publish("system_prompt", "for all")
    for text in ("one", "two"):
        resources.publish("planner/system_prompt", text)
    named = {"*": {"system_prompt": 2, "planner/system_prompt": 2}}

    with applied(store, agent="planner", resources=named) as recording, client_of(server) as client:
        ask(client)

    assert prompt_of(server.log[-1]) == "two"
    ((step,),) = [path.transitions for path in recording.trajectories()]
    assert version_in("planner/system_prompt", step) == 2
    assert version_in("system_prompt", step) is None


def test_canary_is_given_to_whole_rollouts(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """All requests of a rollout are made with one version, and the share is as set."""
    resources.publish("system_prompt", "one")
    resources.publish("system_prompt", "two", alias="canary", weight=0.5)

    with client_of(server) as client:
        for n in range(24):
            with applied(store, rollout_id=f"r{n}"):
                ask(client)
                ask(client)

    prompts = [prompt_of(exchange) for exchange in server.log]
    assert prompts[::2] == prompts[1::2]
    expected = [resources.assigned(f"r{n}")["system_prompt"].format() for n in range(24)]
    assert prompts[::2] == expected
    assert len(set(expected)) == 2


def test_whoever_judges_is_not_given_the_agents_prompt(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """A reward evaluator that asks a model asks in its own words."""
    resources.publish("system_prompt", BETTER)

    with client_of(server) as client:

        def judge(recording: Recording) -> float:
            ask(client, messages=[{"role": "system", "content": "Judge."}])
            return 1.0

        with applied(store, reward_evaluator=judge):
            ask(client)

    assert [prompt_of(exchange) for exchange in server.log] == [BETTER, "Judge."]


def test_resources_are_applied_where_nothing_is_collected(
    store: Store, server: DemoServer, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two switches know nothing of each other."""
    resources.publish("system_prompt", BETTER)
    monkeypatch.setenv("LIGHTNING_OTEL_COLLECT", "0")

    with client_of(server) as client:
        with applied(store) as recording:
            ask(client)
            emit_reward(1.0)
        with auto_trace(store=store) as neither:
            ask(client)
            emit_reward(1.0)

    assert [prompt_of(exchange) for exchange in server.log] == [BETTER, "Be brief."]
    assert (recording.spans(), neither.spans(), neither.rollout_id) == ([], [], "")
    assert store.spans().rows() == []


def test_inner_recordings_decide_for_themselves(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """What is named inside goes before what is named outside."""
    resources.publish("system_prompt", BETTER)

    with client_of(server) as client, applied(store):
        with auto_trace(apply=False):
            ask(client)
        with auto_trace():
            ask(client)
        carried(ask)(client)

    prompts = [prompt_of(exchange) for exchange in server.log]
    assert prompts == ["Be brief.", BETTER, BETTER]


def test_rollout_ends_with_what_its_first_request_was_given(
    store: Store, server: DemoServer, resources: Resources
) -> None:
    """In all its parts and processes; one that begins within it has what is live by then."""
    resources.publish("system_prompt", "one")

    with client_of(server) as client:
        with applied(store) as recording:
            ask(client)
            resources.publish("system_prompt", "two", alias="live")
            resources.publish("planner/system_prompt", "three")
            packed = pickle.dumps(carried(capture.applied))
            with context(agent="planner", apply=True):
                ask(client)
            with auto_trace(store=store, rollout_id="another"):
                ask(client)
            ask(client)
        with applied(store, agent="planner"):
            ask(client)
    held: Any = pickle.loads(packed)()

    prompts = [prompt_of(exchange) for exchange in server.log]
    assert prompts == ["one", "one", "two", "one", "three"]
    assert set(versions(recording)) == {"system_prompt@1"}
    assert str(held.given("any", None, {})["system_prompt"]) == "system_prompt@1"


@pytest.mark.parametrize(
    ("value", "option", "is_applied"),
    [("1", None, True), ("true", False, False), ("0", None, False), ("0", True, True)],
)
def test_environment_decides_where_no_option_does(
    value: str,
    option: bool | None,
    is_applied: bool,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is named in the program goes before the environment."""
    monkeypatch.setenv("LIGHTNING_OTEL_APPLY", value)

    with auto_trace(store=store, apply=option):
        assert (capture.applied() is not None) is is_applied


def test_state_elsewhere_is_named_by_the_environment(
    store: Store, server: DemoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents whose spans go to stores of their own may share what they are given."""
    shared = tmp_path / "shared" / "traces.duckdb"
    Resources(State(shared)).publish("system_prompt", BETTER)
    monkeypatch.setenv("LIGHTNING_OTEL_STATE", str(shared))

    with applied(store), client_of(server) as client:
        ask(client)

    assert prompt_of(server.log[-1]) == BETTER


def test_every_fault_of_ours_sends_the_agents_own_request(
    store: Store,
    server: DemoServer,
    resources: Resources,
    monkeypatch: pytest.MonkeyPatch,
    faults_allowed: None,
) -> None:
    """Each function of substitution fails in turn; the agent gets its answer, the span is kept."""
    resources.publish("system_prompt", [{"role": "system", "content": BETTER}, *EXAMPLES])
    resources.publish("endpoint", {"base_url": server.base_url, "model": "tuned"})
    resources.set_alias("endpoint", "canary", 1, weight=0.0)
    places: list[tuple[Any, str]] = [
        (module, name)
        for module in (substituting, watching, assigning)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__.startswith(("lightning_otel.substitution", substituting.__name__))
    ]
    places += [(watching.Watch, name) for name in ("given_of", "latest", "_refresh_loop")]
    places += [(watching.Held, "given"), (Given, "of")]
    not_reached = {
        "_instructed_responses",
        "_input_message",
        "_limit_name",
        "stamps",
        "_begin_anew",
    }
    not_reached |= {"_read_pin", "_tell_once", "note_change"}

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    client = client_of(server)
    for owner, name in places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, broken)
            with applied(store) as recording:
                answer = ask(client)
        assert answer.choices[0].message.content
        is_reached = name not in not_reached and (owner, name) != (assigning, "assigned")
        assert (asked(server)["messages"] == ASKED) is is_reached, name
        assert (asked(server)["model"] == "toy") is is_reached, name
        assert (versions(recording) == [None]) is is_reached, name
    client.close()


def test_damaged_state_leaves_requests_as_they_are(
    store: Store, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and the agent goes on."""
    folder = Path(f"{store.name}.d")
    folder.mkdir(parents=True)
    (folder / "state.sqlite").write_bytes(b"not a database" * 100)

    with applied(store), client_of(server) as client:
        ask(client)
        ask(client)

    assert asked(server)["messages"] == ASKED
    told = [record.message for record in caplog.records if "not applied" in record.message]
    assert len(told) == 1


class Hanging:
    """A reader that never answers: a database behind a dead network does so for minutes."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def standings(self) -> Any:
        """Nothing, after a long while."""
        self.end.wait(30)
        return {}

    def get(self, name: str, version: int | str) -> Any:
        """Is never asked."""
        raise AssertionError


def test_state_that_hangs_holds_up_only_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That one waits as long as it may, and the rest not at all."""
    monkeypatch.setattr(watching, "FIRST_S", 0.2)
    reader = Hanging()
    watch = watching.Watch(lambda: reader)
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        assert watch.given("key", None, {}) == {}
        took.append(time.perf_counter() - begun)
    reader.end.set()

    assert 0.15 < took[0] < 5
    assert max(took[1:]) < 0.1


def test_forked_child_reads_for_itself(resources: Resources) -> None:
    """Whatever the parent was reading as it forked, nobody in the child waits for that."""
    resources.publish("system_prompt", BETTER)
    reader = Hanging()
    watch = watching.watch_of(f"{resources.state.name} forked", lambda: reader)
    watch._open = lambda: Resources(resources.state)
    child = os.fork()
    if not child:
        found = watch.given("key", None, {})
        os._exit(0 if str(found.get("system_prompt")) == "system_prompt@1" else 1)
    reader.end.set()

    assert os.waitpid(child, 0)[1] == 0

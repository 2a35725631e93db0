"""Rewards as annotations in Phoenix, by a server that answers as Phoenix 20.26 does."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.command import invoke
from tests.listening import Handler

from lightning_otel import Store, auto_trace, emit_action, emit_feedback, emit_reward

Invoke = Callable[..., Any]


class Phoenix:
    """Takes spans, which land when ``misses`` requests asked in vain, and annotations of them."""

    def __init__(self) -> None:
        self.misses = 0
        self.lost: set[str] = set()
        self.spans: set[str] = set()
        self.annotations: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.paths: list[str] = []
        phoenix = self

        class Answers(Handler):
            def do_POST(self) -> None:
                status, answer, kind = phoenix.answer(self.path, self.read_body())
                self.send(answer, kind, status)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        self.paths.append(path)
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            scopes = (scope for one in request.resource_spans for scope in one.scope_spans)
            self.spans |= {span.span_id.hex() for scope in scopes for span in scope.spans}
            return 200, b"", "application/x-protobuf"
        data = json.loads(body)["data"]
        missing = {one["span_id"] for one in data} - (self.spans - self.lost)
        if missing or (data and self.misses):
            self.misses = max(0, self.misses - 1)
            return 404, b"Spans with IDs do not exist.", "text/plain"
        if any(one["name"] == "note" for one in data):
            return 400, b"The name 'note' is reserved.", "text/plain"
        for one in data:
            self.annotations[one["span_id"], one["name"], one["identifier"]] = one
        return (
            200,
            json.dumps({"data": [{"id": "U3Bhbg=="} for _ in data]}).encode(),
            ("application/json"),
        )


@pytest.fixture
def phoenix() -> Iterator[Phoenix]:
    found = Phoenix()
    yield found
    found.server.shutdown()
    found.server.server_close()


def send(spawn: Invoke, phoenix: Phoenix, store: Store, *more: str) -> Any:
    command = ["export", "otlp", "--phoenix", "--to", phoenix.url, "--once", *more]
    return spawn(*command, "--store", store.name)


def test_rewards_arrive_as_annotations_of_the_calls_that_earned_them(
    store: Store, spawn: Invoke, phoenix: Phoenix
) -> None:
    """Each once, though the spans land late; a second run sends what is new alone."""
    with auto_trace(store=store, rollout_id="r"):
        first = emit_action("one")
        emit_reward("useful", 0.25, span_id=first)
        last = emit_action("two")
        reward = emit_reward({"primary": 1.0, "style": 0.5}, primary="primary")
    phoenix.misses = 2

    done = send(spawn, phoenix, store)
    count = len(phoenix.paths)
    again = send(spawn, phoenix, store)

    assert (done.returncode, again.returncode) == (0, 0), done.stderr
    assert "Phoenix: 2 rewards delivered" in done.stderr
    assert "Phoenix: 0 rewards delivered" in again.stderr
    assert set(phoenix.paths) == {"/v1/traces", "/v1/span_annotations?sync=true"}
    assert len(phoenix.paths) == count + 2  # empty ones, to know whether it answers
    scores = {key[:2]: one["result"]["score"] for key, one in phoenix.annotations.items()}
    assert scores == {(first, "useful"): 0.25, (last, "primary"): 1.0, (last, "style"): 0.5}
    assert phoenix.annotations[str(last), "primary", str(reward)] == {
        "span_id": last, "name": "primary", "annotator_kind": "CODE", "identifier": reward,
        "result": {"score": 1.0, "explanation": None}, "metadata": {"rollout_id": "r"},
    }  # fmt: skip


def test_annotations_that_cannot_be_taken_hold_back_no_other(
    store: Store, spawn: Invoke, phoenix: Phoenix
) -> None:
    """A reserved name is told and left out; a span that is not there waits for the next time."""
    with auto_trace(store=store):
        emit_action("one")
        emit_reward({"note": 1.0})
        emit_reward("fine", 0.5)
        emit_reward(0.5, rollout_id="elsewhere")

    done = send(spawn, phoenix, store)

    assert done.returncode == 1
    assert "Phoenix: 1 reward delivered, 1 REJECTED: HTTP 400" in done.stderr
    assert "1 REJECTED: the reward belongs to no span" in done.stderr
    with auto_trace(store=store):
        phoenix.lost = {str(emit_action("two"))}
        emit_reward(1.0)
    late = send(spawn, phoenix, store)
    phoenix.lost = set()
    then = send(spawn, phoenix, store)

    assert "Phoenix: 0 rewards delivered, 1 NOT delivered: HTTP 404" in late.stderr
    assert (late.returncode, then.returncode) == (1, 0)
    assert sorted(name for _, name, _ in phoenix.annotations) == ["fine", "primary"]


def test_grpc_takes_no_annotations(
    store: Store, spawn: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of Phoenix itself is asked for."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    store.add([])

    done = spawn(
        "export", "otlp", "--phoenix", "--to", "http://127.0.0.1:4317", "--store", store.name
    )

    assert done.returncode == 2
    assert "takes no annotations" in done.stderr


def test_labels_are_of_people_and_replace_their_earlier_ones(
    store: Store, phoenix: Phoenix
) -> None:
    """Each person has one annotation of a name; what is retracted by then is no failure."""
    with auto_trace(store=store, rollout_id="r"):
        action = emit_action("one")

    def give(*, is_used: bool, author: str = "ana") -> str:
        span_id = emit_feedback(
            used_result=is_used, name="good", author=author, rollout_id="r", store=store
        )
        return str(span_id)

    give(is_used=True)
    give(is_used=True, author="bo")
    first = send(invoke, phoenix, store)
    last = give(is_used=False)
    second = send(invoke, phoenix, store)
    invoke("reward", give(is_used=True, author="eve"), "--retract", "--store", store.name)
    third = send(invoke, phoenix, store)

    assert [done.returncode for done in (first, second, third)] == [0, 0, 0], third.stderr
    given = {key: one["result"]["score"] for key, one in phoenix.annotations.items()}
    (negative,) = (row["value"] for row in store.sql("FROM rewards WHERE span_id = ?", [last]))
    assert given == {(action, "good", "ana"): negative, (action, "good", "bo"): -negative}
    assert {one["annotator_kind"] for one in phoenix.annotations.values()} == {"HUMAN"}

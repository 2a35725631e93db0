"""Transitions, rollouts and status by HTTP: what the store says, whole, a page at a time."""

import io
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.api.conftest import Client

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def filled(client: Client) -> Client:
    """Nine rollouts of one step, every third without a reward."""
    for index in range(9):
        client.act(f"r{index}", None if index % 3 == 2 else index / 10, category="image")
    return client


LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"


def lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


def test_transitions_are_those_of_the_store(filled: Client) -> None:
    """In each form the same rows; JSON Lines where none is named."""
    want = [step.span_id for step in filled.store.transitions()]

    def rows(kind: str) -> bytes:
        answer = filled.ask("GET", "/v1/transitions", accept=kind)
        assert answer.headers["content-type"] == (LINES if kind == "*/*" else kind)
        return answer.body

    arrow = pyarrow.ipc.open_stream(rows(ARROW)).read_all()
    file = parquet.read_table(io.BytesIO(rows(PARQUET)))
    assert [row["span_id"] for row in lines(rows("*/*"))] == want
    assert arrow.column("span_id").to_pylist() == want
    assert file.column("span_id").to_pylist() == want
    assert "observation" in arrow.column_names
    narrow = filled.ask("GET", "/v1/transitions?bodies=false", accept=LINES)
    assert [row["span_id"] for row in lines(narrow.body)] == want
    assert "observation" not in lines(narrow.body)[0]
    assert filled.ask("GET", "/v1/transitions", accept="text/csv").status == 406


def test_pages_of_transitions_are_all_of_them_once(filled: Client) -> None:
    """Each page holds whole rollouts; what is recorded meanwhile stands on the last one."""
    found: list[list[str]] = []
    query = "limit=2"
    while query:
        answer = filled.ask("GET", f"/v1/transitions?{query}")
        found.append([row["rollout_id"] for row in lines(answer.body)])
        cursor = answer.headers.get("next-cursor", "")
        query = cursor and f"limit=2&cursor={cursor}"
        assert f"cursor={cursor}" in answer.headers.get("link", "cursor=")

    assert found == [[f"r{index}" for index in range(9)][n : n + 2] for n in range(0, 9, 2)]
    two = filled.ask("GET", "/v1/transitions?limit=1&rollout_id=r1&rollout_id=r3")
    assert "rollout_id=r1&rollout_id=r3&cursor=" in dict(two.headers)["link"]
    with_all = filled.ask("GET", "/v1/transitions?limit=2", accept=ARROW)
    assert pyarrow.ipc.open_stream(with_all.body).read_all().num_rows == 2


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("rollout_id=r1&rollout_id=r3", ["r1", "r3"]),
        ("since=1h&rollout_id=r1", ["r1"]),
        ("until=2020-01-01", []),
        ("credit=discounted&gamma=0.5&min_reward=0.4&max_reward=0.6", ["r4", "r6"]),
        ("limit=2&rollout_id=r7&rollout_id=r8", ["r7", "r8"]),
        ("limit=2&rollout_id=nosuch", []),
    ],
)
def test_transitions_are_selected(filled: Client, query: str, names: list[str]) -> None:
    """By the keywords of docs/transitions.md."""
    answer = filled.ask("GET", f"/v1/transitions?{query}")

    assert answer.status == 200
    assert [row["rollout_id"] for row in lines(answer.body)] == names


def test_report_tells_what_was_left_out(filled: Client) -> None:
    """As a last line, where it is asked for; it is the store's own."""
    want = filled.store.report()

    *rows, last = lines(filled.ask("GET", "/v1/transitions?report=1&min_reward=0.4").body)

    assert [row["rollout_id"] for row in rows] == ["r4", "r6", "r7"]
    assert last["report"]["transitions"] == want.transitions == 9
    assert last["report"]["left_out"] == want.reasons()
    assert last["cursor"] is None
    assert filled.ask("GET", "/v1/transitions?report=1", accept=ARROW).status == 400


def test_rollouts_come_in_pages_the_newest_first(filled: Client) -> None:
    """Every one once, with how many there are."""
    found: list[str] = []
    query: str | None = "limit=4"
    while query:
        page = filled.get(f"/v1/rollouts?{query}")
        assert page["total"] == 9
        found += [each["rollout_id"] for each in page["rollouts"]]
        query = page["next_cursor"] and f"limit=4&cursor={page['next_cursor']}"

    assert found == [f"r{index}" for index in reversed(range(9))]
    assert filled.get("/v1/rollouts?rewarded=false")["total"] == 3
    assert filled.get("/v1/rollouts?status=failed")["rollouts"] == []
    (one,) = filled.get("/v1/rollouts/r4")["attempts"]
    assert (one["reward"], one["task"], one["status"]) == (0.4, {"category": "image"}, "succeeded")
    assert filled.ask("GET", "/v1/rollouts/nosuch").status == 404


def test_queued_rollouts_are_found(filled: Client) -> None:
    """One that nobody has run yet has no attempt, and stands in the queue."""
    from lightning_otel import Queue
    from lightning_otel.state import State

    (put,) = Queue(State(filled.store.name)).put(["2+2"])

    found = filled.get(f"/v1/rollouts/{put.rollout_id}")

    assert found["attempts"] == []
    assert found["queued"]["status"] == "queuing"
    assert filled.get("/v1/status")["queued"]["queuing"] == 1


def test_nothing_is_read_without_the_key(filled: Client) -> None:
    """Any user of the machine reaches the port; that it serves is told to anybody."""
    paths = (
        "/v1/transitions", "/v1/rollouts", "/v1/rollouts/r1", "/v1/resources", "/v1/events",
        "/v1/status", "/metrics", "/training/status", "/openapi.json",
    )  # fmt: skip

    assert {filled.ask("GET", path, authorization="").status for path in paths} == {401}
    assert filled.ask("GET", "/healthz", authorization="").status == 200
    assert filled.ask("POST", "/training/trigger", {}, authorization="").status == 401
    assert filled.ask("POST", "/optimize", {}, authorization="").status == 401
    assert filled.ask("POST", "/v1/resources", {}, authorization="").status == 401


def test_metrics_are_read_by_prometheus(filled: Client) -> None:
    """Its own parser finds every number; what cannot be a label's value is escaped."""
    filled.ask("GET", "/nosuch")
    answer = filled.ask("GET", "/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.body.decode()))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert all(family.documentation and family.type != "unknown" for family in families)
    assert found[("lightning_otel_rollouts", "succeeded")] == 9
    assert found[("lightning_otel_spans_stored_total",)] == 0
    assert found[("lightning_otel_requests_refused_total", "404")] >= 1
    assert found[("lightning_otel_store_size_bytes",)] > 0
    assert found[("lightning_otel_settle_lag_seconds",)] >= 0
    assert found[("lightning_otel_training_requests", "waiting")] == 0

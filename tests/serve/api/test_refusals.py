"""What the API refuses: with the status and the reason, in JSON; nothing of it is kept."""

import json

import pytest
from tests.serve.api.conftest import Client
from tests.serve.serving import JSON

FEEDBACK = (
    (b"{", 400, "Invalid JSON"),
    (b"[]", 400, "the body"),
    (b'{"rollout_id": "r", "reward": NaN}', 400, "finite"),
    (b'{"rollout_id": "r", "reward": 1e999}', 400, "finite"),
    (b'{"rollout_id": "r", "reward": 1, "metadata": {"x": NaN}}', 400, "metadata"),
    ({"reward": 1}, 400, "names nothing that it judges"),
    ({"rollout_id": "r"}, 400, "there is no feedback; give reward"),
    ({"rollout_id": "r", "reward": 1.1}, 400, "reward: Input should be less than or equal"),
    ({"rollout_id": "r", "reward": "1"}, 400, "reward"),
    ({"rollout_id": "r", "rating": 6}, 400, "rating"),
    ({"rollout_id": "r", "metadata": {"rating": 6}}, 400, "from 0 to 5"),
    ({"rollout_id": "r", "rating": 1, "metadata": {"rating": 2}}, 400, "differ"),
    ({"rollout_id": "r", "trace_id": "a" * 32, "reward": 1}, 400, "judges one thing"),
    ({"trace_id": "x", "reward": 1}, 400, "trace_id"),
    ({"span_id": "g" * 16, "reward": 1}, 400, "span_id"),
    ({"rollout_id": "", "reward": 1}, 400, "rollout_id"),
    ({"rollout_id": "r\x00", "reward": 1}, 400, "rollout_id"),
    ({"rollout_id": "r", "reward": 1, "surprise": 1}, 400, "surprise"),
    ({"rollout_id": "r", "reward": 1, "feedback_id": "x" * 201}, 400, "feedback_id"),
    ({"rollout_id": "r", "reward": 1, "metadata": {"x": "y" * 20_000}}, 413, "metadata"),
    ({"rollout_id": "r", "reward": 1, "text": "y" * 10_000_000}, 413, "1048576 bytes"),
    (b'{"rollout_id": "\\ud800", "reward": 1}', 400, "JSON"),
    (b'{"metadata":' * 300 + b"1" + b"}" * 300, 400, "JSON"),
)
QUERIES = (
    "/v1/transitions?limit=0", "/v1/transitions?limit=x", "/v1/transitions?limit=1e9",
    "/v1/transitions?cursor=x", "/v1/transitions?cursor=W10", "/v1/transitions?since=soon",
    "/v1/transitions?min_reward=nan", "/v1/transitions?min_reward=inf",
    "/v1/transitions?capture=all", "/v1/transitions?agents=", "/v1/transitions?agents=re:(",
    "/v1/transitions?rewarded=maybe", "/v1/transitions?surprise=1",
    "/v1/transitions?limit=1&limit=2", "/v1/transitions?since=99999999999999999999",
    "/v1/transitions?credit=none", "/v1/rollouts?limit=1001", "/v1/rollouts?status=odd",
    "/v1/rollouts?cursor=WzEsMl0", "/v1/rollouts?since=-", "/training/status?limit=-1",
)  # fmt: skip
POSTS = (
    ("/v1/resources", {"name": "x"}, 400),
    ("/v1/resources", {"name": "a@b", "body": "x"}, 400),
    ("/v1/resources", {"name": "x", "body": {"template": 1}}, 400),
    ("/v1/resources", {"name": "x", "body": "x", "parent": 9}, 404),
    ("/v1/resources", {"name": "x", "body": "x", "weight": 2}, 400),
    ("/v1/resources", {"name": "x", "body": "y" * 10_000_000}, 413),
    ("/v1/resources", {"name": "x", "body": "sk-" + "a1b2c3d4" * 5}, 400),
    ("/v1/resources", {"name": "x", "body": "y", "parent": 2**70}, 400),
    ("/v1/resources/alias", {"name": "nosuch", "alias": "live", "version": 1}, 404),
    ("/v1/resources/alias", {"name": "nosuch", "alias": "no word", "version": 1}, 400),
    ("/v1/resources/alias", {"name": "nosuch", "alias": "live"}, 400),
    ("/v1/resources/promote", {"name": "nosuch"}, 404),
    ("/v1/resources/rollback", {"name": "nosuch"}, 404),
    ("/v1/resources/rollback", {}, 400),
    ("/training/trigger", {"algorithm": "nosuch"}, 400),
    ("/training/trigger", {"options": {"a-b": 1}}, 400),
    ("/training/trigger", {"max_iterations": 0}, 400),
    ("/training/trigger", {"agent": "os:system"}, 400),
    ("/training/trigger", {"category": "a[b]"}, 400),
    ("/training/trigger", {"idempotency_key": "a", "options": {"x": "y" * 20_000}}, 413),
)
HEADERS = (
    ({"content_type": "application/x-www-form-urlencoded"}, 415),
    ({"content_type": "text/plain"}, 415),
    ({"content_type": "application/x-protobuf"}, 415),
    ({}, 415),
    ({"content_type": JSON, "Origin": "http://evil.example"}, 403),
    ({"content_type": JSON, "Host": "evil.example"}, 421),
)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        *(("POST", "/v1/feedback", *row) for row in FEEDBACK),
        *(("GET", path, None, 400, "") for path in QUERIES),
        *(("POST", *row, "") for row in POSTS),
    ],
)
def test_absurd_questions_are_refused(
    client: Client, method: str, path: str, body: object, status: int, says: str
) -> None:
    """With a reason in JSON; and nothing of it is kept."""
    answer = client.ask(method, path, body)

    assert answer.status == status
    assert json.loads(answer.body)["message"]
    assert says in json.loads(answer.body)["message"]
    stands = client.get("/v1/status")
    assert (stands["pending_feedback"]["count"], stands["training_requests"]["waiting"]) == (0, 0)
    assert client.get("/v1/resources")["resources"] == []


@pytest.mark.parametrize(("headers", "status"), HEADERS)
def test_feedback_of_another_form_or_site_is_refused(
    client: Client, headers: dict[str, str], status: int
) -> None:
    """Whatever a page elsewhere could send without being asked."""
    body = b"rollout_id=r&reward=1"
    assert client.running.ask("POST", "/v1/feedback", body, **headers).status == status

"""What OpenAI's server keeps: background responses and conversations, joined as they are read."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.adapter.forest import text_of
from tests.command import invoke
from tests.instrumentors.loopback import serving

from lightning_otel import Store, auto_trace, emit_reward


def response(number: int, text: str, **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": f"m{number}", "role": "assistant", "status": "completed",
            "content": [part]}  # fmt: skip
    usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
    return {"id": f"resp_{number}", "object": "response", "created_at": 1, "model": "m",
            "status": "completed", "output": [item], "usage": usage, "tools": [],
            **fields}  # fmt: skip


class Keeper:
    """Keeps responses and conversations as the API does; a background one is over at last."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._looks: dict[str, int] = {}

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> Any:
        path, _, query = path.partition("?")
        names = path.removeprefix("/v1/").split("/")
        if names[0] == "conversations":
            return {"id": "conv_1", "object": "conversation", "created_at": 1, "metadata": {},
                    "data": [], "has_more": False, "first_id": "", "last_id": ""}  # fmt: skip
        if len(names) == 1:
            number = len(self._made) + 1
            made = response(number, f"answer {number}", background=bool(body.get("background")))
            self._made[made["id"]] = made
            waiting = {**made, "status": "queued", "output": [], "usage": None}
            if body.get("stream"):
                return [{"type": "response.created", "response": waiting, "sequence_number": 0},
                        *events_of(made)]  # fmt: skip
            return waiting if body.get("background") else made
        made = self._made.get(names[1])
        if made is None or names[-1] == "cancel":
            return made and {**made, "status": "cancelled", "output": [], "usage": None}
        if "stream=true" in query:
            return events_of(made)
        looks = self._looks[names[1]] = self._looks.get(names[1], 0) + 1
        return made if looks > 1 else {**made, "status": "in_progress", "output": []}


def events_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0,
             "item_id": "m", "delta": "ans", "logprobs": [], "sequence_number": 1}  # fmt: skip
    return [delta, {"type": "response.completed", "response": made, "sequence_number": 2}]


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(Keeper()) as base_url,
        openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as opened,
    ):
        yield opened


def told(step: Any) -> list[tuple[str, Any]]:
    return [(item["role"], text_of([item])) for item in step.observation]


def poll(client: openai.OpenAI, made: Any) -> Any:
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    return made


def resume(client: openai.OpenAI, made: Any) -> Any:
    events = list(client.responses.retrieve(made.id, stream=True, starting_after=1))
    return events[-1].response  # type: ignore[union-attr]


def take_raw(client: openai.OpenAI, made: Any) -> Any:
    client.responses.retrieve(made.id)
    raw = client.responses.with_raw_response.retrieve(made.id)
    return raw.parse()


@pytest.mark.parametrize("finish", [poll, resume, take_raw])
@pytest.mark.parametrize("is_stream", [False, True])
def test_background_answer_completes_its_call(
    finish: Any, is_stream: bool, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Retrieved in the same rollout; what goes on from it has its history."""
    store = Store(tmp_path / "s.duckdb")
    with auto_trace(store=store):
        made: Any = client.responses.create(
            model="m", input="think", background=True, stream=is_stream
        )
        if is_stream:
            with made as stream:
                made = next(iter(stream)).response
        assert finish(client, made).output_text == "answer 1"
        client.responses.create(model="m", input="and?", previous_response_id=made.id)
        emit_reward(1.0)

    for _ in ("live", "settled"):
        first, second = store.transitions()
        assert first.action[0]["parts"] == [{"type": "text", "content": "answer 1"}]
        assert (first.finish_reason, first.output_tokens) == ("stop", 7)
        assert told(second) == [("user", "think"), ("assistant", "answer 1"), ("user", "and?")]
        assert second.reward == 1.0
        assert [span.name for span in store.spans()].count(
            "retrieve_response"
        ) == 1  # no look in vain
        store.settle()


@pytest.mark.parametrize("is_stream", [False, True])
def test_background_answer_is_retrieved_asynchronously(is_stream: bool, tmp_path: Path) -> None:
    """As by the synchronous client; of a stream that is left early nothing is known."""

    async def work(base_url: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
            for text in ("one", "two"):
                made = await client.responses.create(model="m", input=text, background=True)
                if is_stream:
                    async for _ in await client.responses.retrieve(made.id, stream=True):
                        if text == "two":
                            break
                else:
                    for _ in range(2 if text == "one" else 1):
                        await client.responses.retrieve(made.id)

    store = Store(tmp_path / "s.duckdb")
    with serving(Keeper()) as base_url, auto_trace(store=store):
        asyncio.run(work(base_url))
    step, *more = store.transitions()
    assert step.action[0]["parts"][0]["content"] == "answer 1"
    if not is_stream:  # of the other stream all may have come as the program left
        assert more == []
        assert [reason.split(":")[0] for reason in store.report().reasons()] == ["unanswered"]


def test_background_answer_is_found_in_another_rollout(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """As in a web server that takes the work, and another request that fetches it."""
    store = Store(tmp_path / "s.duckdb")
    with auto_trace(store=store, rollout_id="asked"):
        made = client.responses.create(model="m", input="think", background=True)
    (reason,) = store.report().reasons()
    assert reason.startswith("unanswered:")
    with auto_trace(store=store, rollout_id="fetched"):
        poll(client, made)

    for _ in ("live", "settled"):
        (step,) = store.transitions(rollout_id="asked")
        assert step.action[0]["parts"] == [{"type": "text", "content": "answer 1"}]
        store.settle()


def test_cancelled_answer_is_no_step(client: openai.OpenAI, tmp_path: Path) -> None:
    """It failed as the program wished; nothing else is said of it."""
    store = Store(tmp_path / "s.duckdb")
    with auto_trace(store=store):
        made = client.responses.create(model="m", input="think", background=True)
        client.responses.cancel(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_none")
    assert list(store.transitions()) == []
    assert list(store.report().reasons()) == ["failed: cancelled"]


def test_answer_that_failed_is_no_step(tmp_path: Path) -> None:
    """Whatever came of it before."""
    store, error = Store(tmp_path / "s.duckdb"), {"code": "server_error", "message": "broken"}
    failed = response(1, "", status="failed", output=[], error=error)
    events = [events_of(failed)[0], {"type": "response.failed", "response": failed}]
    with (
        serving(lambda *_: events) as base_url,
        openai.OpenAI(base_url=base_url, api_key="k") as client,
        auto_trace(store=store),
    ):
        list(client.responses.create(model="m", input="think", stream=True))
    assert list(store.transitions()) == []
    assert list(store.report().reasons()) == ["failed: server_error"]


@pytest.mark.parametrize("rollouts", ["one", "many"])
def test_conversation_on_the_server_is_joined(
    rollouts: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    """What the program put into it, and each turn; instructions are those of the request."""
    store, said = Store(tmp_path / "s.duckdb"), [("system", "Be brief."), ("user", "Hello.")]

    def within(number: int) -> Any:
        return auto_trace(store=store, rollout_id=f"r{number if rollouts == 'many' else 0}")

    with within(0):
        kept = client.conversations.create(
            items=[{"type": "message", "role": "system", "content": "Be brief."}]
        )
        client.conversations.items.create(
            kept.id, items=[{"type": "message", "role": "user", "content": "Hello."}]
        )
    expected = []
    for turn in range(3):
        with within(turn):
            client.responses.create(
                model="m", conversation=kept.id, input=f"turn {turn}", instructions="Now."
            )
        expected.append([("system", "Now."), *said, ("user", f"turn {turn}")])
        said += [("user", f"turn {turn}"), ("assistant", f"answer {turn + 1}")]

    for _ in ("live", "settled"):
        assert [told(step) for step in store.transitions()] == expected
        if rollouts == "many":
            (step,) = store.transitions(rollout_id="r2")
            assert told(step) == expected[2]
        store.settle()


@pytest.mark.parametrize("case", ["an answer elsewhere", "begun elsewhere", "an item was deleted"])
def test_conversation_that_is_not_known_trains_nothing(
    case: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Nobody knows what was said before."""
    store = Store(tmp_path / "s.duckdb")
    with auto_trace(store=store):
        if case == "an answer elsewhere":
            client.responses.create(model="m", input="and?", previous_response_id="resp_elsewhere")
        if case == "an item was deleted":
            client.conversations.create()
            client.conversations.items.delete("item_1", conversation_id="conv_1")
        client.responses.create(model="m", input="and?", conversation="conv_1")
        client.responses.create(model="m", input="more", conversation={"id": "conv_1"})
        emit_reward(1.0)
    for step in store.transitions():
        assert step.observation[0]["parts"][0]["type"] == "openai.previous_response"
    for name in ("sft", "openai-sft", "kto"):
        done = invoke("export", name, tmp_path / f"{name}.jsonl", "--store", store.name)
        assert (tmp_path / f"{name}.jsonl").read_text() == "", name
        assert "its history is on the server" in done.stderr, name


def test_answers_that_go_on_from_each_other_have_no_history(tmp_path: Path) -> None:
    """A server that gives ids anew may tell a circle."""
    store, ids = Store(tmp_path / "s.duckdb"), iter(["a", "b"])
    with (
        serving(lambda *_: response(1, "yes", id=next(ids))) as base_url,
        openai.OpenAI(base_url=base_url, api_key="k") as client,
        auto_trace(store=store),
    ):
        client.responses.create(model="m", input="one", previous_response_id="b")
        client.responses.create(model="m", input="two", previous_response_id="a")
    for step in store.transitions():
        assert step.observation[0]["parts"][0]["type"] == "openai.previous_response"

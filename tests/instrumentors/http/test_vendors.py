"""``anthropic`` and ``google-genai``: transitions say what went over the wire, on every surface."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.instrumentors.http.drawn import VENDORS
from tests.instrumentors.http.wire import Answer, Wire

from lightning_otel import Store, auto_trace

CONVERSATIONS = 25
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}

pytestmark = pytest.mark.filterwarnings("ignore")


def ask_anthropic(url: str, sent: list[Any], *, is_stream: bool) -> Any:
    """Ask in this thread; gives the answer as the SDK tells it."""
    import anthropic

    given: Any = {"model": "m", "max_tokens": 9, "messages": sent}
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        if not is_stream:
            return client.messages.create(**given).to_dict()["content"]
        with client.messages.stream(**given) as stream:
            return stream.get_final_message().to_dict()["content"]


async def ask_anthropic_async(url: str, sent: list[Any], *, is_stream: bool) -> Any:
    import anthropic

    given: Any = {"model": "m", "max_tokens": 9, "messages": sent}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        if not is_stream:
            return (await client.messages.create(**given)).to_dict()["content"]
        async with client.messages.stream(**given) as stream:
            return (await stream.get_final_message()).to_dict()["content"]


def make_genai(url: str, **options: Any) -> Any:
    from google import genai

    return genai.Client(api_key="k", http_options={"base_url": url, **options})


def ask_genai(url: str, sent: list[Any], *, is_stream: bool) -> Any:
    given: Any = {"model": "m", "contents": sent}
    client = make_genai(url)
    if not is_stream:
        return len(client.models.generate_content(**given).candidates)
    return len(list(client.models.generate_content_stream(**given)))


async def ask_genai_async(url: str, sent: list[Any], *, is_stream: bool, **options: Any) -> Any:
    """Ask in a coroutine: over aiohttp where that is there."""
    given: Any = {"model": "m", "contents": sent}
    client = make_genai(url, **options)
    if not is_stream:
        found: Any = len((await client.aio.models.generate_content(**given)).candidates)
    else:
        stream = await client.aio.models.generate_content_stream(**given)
        found = len([chunk async for chunk in stream])
    await client.aio.aclose()
    return found


async def ask_genai_httpx(url: str, sent: list[Any], *, is_stream: bool) -> Any:
    """Ask in a coroutine over httpx, though aiohttp is there."""
    import httpx
    from google.genai.types import HttpOptions

    if "httpx_async_client" not in HttpOptions.model_fields:
        pytest.skip("it takes httpx where there is no aiohttp")
    client = httpx.AsyncClient()
    return await ask_genai_async(url, sent, is_stream=is_stream, httpx_async_client=client)


WAYS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "anthropic": ("anthropic", "anthropic", ask_anthropic),
    "anthropic async": ("anthropic", "anthropic", ask_anthropic_async),
    "genai": ("google.genai", "gemini", ask_genai),
    "genai async": ("google.genai", "gemini", ask_genai_async),
    "genai async httpx": ("google.genai", "gemini", ask_genai_httpx),
}


def ask(way: str, url: str, sent: list[Any], *, is_stream: bool) -> Any:
    work = WAYS[way][2](url, sent, is_stream=is_stream)
    return asyncio.run(work) if asyncio.iscoroutine(work) else work


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_transitions_say_what_went_over_the_wire(
    way: str, is_stream: bool, wire: Wire, tmp_path: Path
) -> None:
    """Every message, tool call, result, image, thought and signature; the program gets the same."""
    module, api, _ = WAYS[way]
    pytest.importorskip(module)
    draw, vendor, place = random.Random(way), VENDORS[api], tmp_path / "s.duckdb"
    expected, requests = {}, []
    for number in range(CONVERSATIONS):
        sent, said, answer, parts = vendor.draw(draw, number)
        whole = vendor.whole(answer)
        body = vendor.stream(answer, draw) if is_stream else json.dumps(whole).encode()
        wire.answers = [Answer(body, headers=EVENTS if is_stream else JSON)]
        untraced = ask(way, wire.url, sent, is_stream=is_stream)
        requests.append(wire.asked[-1])
        with auto_trace(store=place, rollout_id=f"r{number}"):
            assert ask(way, wire.url, sent, is_stream=is_stream) == untraced
        assert wire.asked[-1][2] == requests[-1][2]
        expected[f"r{number}"] = (said, parts)

    steps = list(Store(place).transitions())
    assert len(steps) == CONVERSATIONS
    for step in steps:
        said, parts = expected[step.rollout_id]
        assert [{"role": m["role"], "parts": [*m["parts"]]} for m in step.observation] == said
        assert [*step.action[0]["parts"]] == parts


@pytest.mark.parametrize("way", WAYS)
def test_stream_that_is_cut_keeps_what_came(way: str, wire: Wire, store: Store) -> None:
    """The program gets the exception that it gets without us; the call has failed."""
    module, api, _ = WAYS[way]
    pytest.importorskip(module)
    sent, _, answer, _ = VENDORS[api].draw(random.Random(1), 1)
    body = VENDORS[api].stream(answer, random.Random(1))
    wire.answers = [Answer(body[: len(body) // 2], headers=EVENTS, is_cut=True)]

    def failure() -> tuple[type, str]:
        try:
            ask(way, wire.url, sent, is_stream=True)
        except Exception as exc:  # noqa: BLE001  # each library has its own
            return type(exc), str(exc)
        raise AssertionError("it came whole")

    untraced = failure()
    with auto_trace(store=store) as recording:
        assert failure() == untraced
    calls = [span for span in recording.spans() if "gen_ai.request.model" in span.attributes]
    ours = [span for span in calls if span.scope == "lightning_otel"]
    assert [span.status for span in ours] == ["ERROR"]
    assert "gen_ai.output.messages" in ours[0].attributes
    assert store.transitions().report().calls == 1

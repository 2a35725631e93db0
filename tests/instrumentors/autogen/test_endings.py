"""Runs that end before their end: cancelled, left, broken. Each span ends once, and says how."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from tests.instrumentors.autogen.programs import agent
from tests.instrumentors.autogen.stage import Stage

from lightning_otel import uninstrument
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

CANCELLED = "asyncio.exceptions.CancelledError"


@pytest.fixture(autouse=True)
def _nothing_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """OpenTelemetry never complains of a context."""
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        yield
    assert [r.getMessage() for r in caplog.records if r.name.startswith("opentelemetry")] == []


def team_of(client: Any, **more: Any) -> Any:
    return RoundRobinGroupChat(
        [agent("writer", client, **more), agent("critic", client)], max_turns=2, name="pair"
    )


def error_of(span: Span) -> tuple[str, object]:
    return span.status, span.attributes.get(c.ERROR_TYPE)


def test_cancelled_team_fails_every_open_span(stage: Stage, silent: Any) -> None:
    """By its token; the model's call, the agent and the team are cancelled, and say so."""
    stage.server = silent

    async def program(client: Any) -> None:
        token = CancellationToken()
        task = asyncio.create_task(team_of(client).run(task="go", cancellation_token=token))
        await silent.asked(1)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stage.trace(program)

    stage.check_shape()
    failed = stage.named("chat toy", "invoke_agent writer", "invoke_workflow pair")
    assert [error_of(span) for span in failed] == [("ERROR", CANCELLED)] * 3


@pytest.mark.parametrize("way", ["break", "aclose", "held"])
@pytest.mark.parametrize("kind", ["team", "speaking agent"])
def test_abandoned_stream_ends_its_spans(stage: Stage, kind: str, way: str) -> None:
    """A stream that is left ends its span, marked as abandoned, however it is left."""
    stage.server.chunk_delay_s = 0.05

    async def program(client: Any) -> None:
        is_speaking = kind == "speaking agent"
        writer = agent("writer", client, model_client_stream=is_speaking)
        stream = (team_of(client) if kind == "team" else writer).run_stream(task="go")
        async for item in stream:
            if not is_speaking or type(item).__name__ == "ModelClientStreamingChunkEvent":
                break
        if way == "aclose":
            await stream.aclose()
        elif way == "break":
            del stream
        for _ in range(50):
            await asyncio.sleep(0.01)

    stage.trace(program)

    stage.check_shape()
    left = stage.named("invoke_workflow pair" if kind == "team" else "invoke_agent writer")
    if kind == "speaking agent" and way != "held":
        left += stage.calls()
    assert [span.attributes.get(c.ABANDONED) for span in left] == [True] * len(left)
    assert {span.status for span in left} == {"UNSET"}


def test_stream_left_after_its_result_was_not_abandoned(stage: Stage) -> None:
    """Who stops reading once the result is there has read it all."""

    async def program(client: Any) -> None:
        stream = agent("writer", client).run_stream(task="go")
        async for item in stream:
            if hasattr(item, "stop_reason"):
                break
        await stream.aclose()

    stage.trace(program)

    (span,) = stage.named("invoke_agent writer")
    assert c.ABANDONED not in span.attributes
    stage.check()


@pytest.mark.parametrize("model", ["fail-400", "html"])
def test_error_of_a_team_reads_as_without_us(stage: Stage, model: str) -> None:
    """AutoGen writes a traceback into it, in which our functions are not to stand."""
    stage.server.fault = model

    async def program(client: Any) -> str:
        inner = RoundRobinGroupChat([agent("writer", client)], max_turns=1, name="inner")
        with pytest.raises(RuntimeError) as caught:
            await RoundRobinGroupChat([inner], max_turns=1).run(task="go")
        return str(caught.value)

    traced = stage.trace(program)
    stage.check_shape()
    (inner,) = stage.named("invoke_workflow inner")
    (turn,) = stage.named("invoke_agent writer")
    uninstrument()

    assert traced == stage.run(program)
    assert "Traceback" in traced
    assert [error_of(inner), turn.status] == [("ERROR", "RuntimeError"), "ERROR"]


def test_stream_dropped_with_its_loop_is_ended(
    stage: Stage, run_python: Callable[..., str]
) -> None:
    """Where no loop is left to close the stream, it ends when it is freed.

    In a process of its own: after a thousand other tests the generator was never freed.
    """
    ended = run_python(
        f"""
        import asyncio, gc
        from autogen_ext.models.replay import ReplayChatCompletionClient
        from lightning_otel import auto_trace
        from tests.instrumentors.autogen.programs import agent

        with auto_trace(store={stage.store.name!r}) as recording:
            loop = asyncio.new_event_loop()
            stream = agent("writer", ReplayChatCompletionClient(["one"])).run_stream(task="go")
            loop.run_until_complete(anext(stream))
            loop.close()
            del stream
            gc.collect()
            for span in recording.spans():
                if span.name == "invoke_agent writer":
                    print(span.end_ns is not None, span.attributes[{c.ABANDONED!r}])
        """
    )

    assert ended.split() == ["True", "True"]


def test_team_that_runs_already_refuses_as_without_us(stage: Stage) -> None:
    """The refused run is a failed span; the one under way keeps its agents."""

    async def program(client: Any) -> None:
        team = team_of(client)
        stream = team.run_stream(task="go")
        await anext(stream)
        with pytest.raises(ValueError, match="already running"):
            await team.run(task="more")
        async for _ in stream:
            pass

    stage.trace(program)

    stage.check()
    refused, whole = sorted(
        stage.named("invoke_workflow pair"), key=lambda span: span.status == "UNSET"
    )
    assert error_of(refused) == ("ERROR", "ValueError")
    (turn,) = stage.named("invoke_agent writer")
    assert turn.parent_span_id == whole.span_id

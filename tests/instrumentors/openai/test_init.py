"""The instrumentor itself: on, off, beside others, and where the content may go."""

import functools
from typing import Any

import openai
import pytest
import wrapt
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_otel import Store, auto_trace, instrument, uninstrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

ASKED: Any = [{"role": "user", "content": "hello"}]


def ask(client: openai.OpenAI) -> str | None:
    answer = client.chat.completions.create(model="toy", messages=ASKED)
    return answer.choices[0].message.content


def call_of(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [found for found in exporter.get_finished_spans() if found.name == "chat toy"]
    return span


def test_instrumentor_switched_off_in_mid_stream_lets_the_stream_end(
    store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """A stream that was begun traced is read, and its span ended, whatever happens meanwhile."""
    with auto_trace(store=store) as recording:
        stream = client.chat.completions.create(model="toy", messages=ASKED, stream=True)
        next(iter(stream))
        uninstrument()
        list(stream)

    (span,) = facts.calls(recording)
    facts.agree(span, server.log[0])


def wrapped(how: str, seen: list[str], inherited: Any) -> Any:
    """Another tool's wrapper around the method that a subclass inherits."""

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append("called")
        return inherited(*args, **kwargs)

    def noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append("called")
        return wrapped(*args, **kwargs)

    if how == "wrapt":
        return wrapt.FunctionWrapper(inherited, noted)
    return inherited if how == "bare" else functools.wraps(inherited)(theirs)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("how", ["function", "wrapt", "bare"])
def test_wrapper_of_another_tool_in_a_subclass_hides_no_request(
    how: str,
    is_first: bool,
    store: Store,
    client: openai.OpenAI,
    facts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put there before ours or after, each request is one span: on, off and on again."""
    seen: list[str] = []
    if not is_first:
        instrument()
    theirs = wrapped(how, seen, openai.OpenAI.request)
    monkeypatch.setattr(openai.OpenAI, "request", theirs, raising=False)
    found = []

    for _ in range(2):
        with auto_trace(store=store) as recording:
            ask(client)
        found.append(len(facts.calls(recording)))
        uninstrument()
        ask(client)

    assert found == [1, 1]
    assert vars(openai.OpenAI)["request"] is theirs
    assert seen == ([] if how == "bare" else ["called"] * 4)


def test_instrumentor_leaves_a_subclass_its_own_method(
    store: Store, server: DemoServer, facts: Any
) -> None:
    """A client that overrides the method and calls the inherited one is not wrapped again."""

    class Own(openai.OpenAI):
        def request(self, *args: Any, **kwargs: Any) -> Any:
            return super().request(*args, **kwargs)

    before = Own.request

    with auto_trace(store=store) as recording:
        assert Own.request is before
        with Own(base_url=server.base_url, api_key="k") as own:
            ask(own)

    assert len(facts.calls(recording)) == 1


CONTENT = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)


@pytest.mark.parametrize(
    ("variable", "value", "is_kept", "is_exported"),
    [
        ("", "", True, False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT", False, False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "EVENT_ONLY", False, False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY", True, True),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true", True, True),
        ("LIGHTNING_OTEL_EXPORT_CONTENT", "1", True, True),
    ],
)
@pytest.mark.pain(2)
def test_content_goes_where_the_settings_allow(
    variable: str,
    value: str,
    is_kept: bool,
    is_exported: bool,
    store: Store,
    client: openai.OpenAI,
    facts: Any,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into our store unless forbidden, to another exporter only if allowed; facts always."""
    if variable:
        monkeypatch.setenv(variable, value)

    with auto_trace(store=store) as recording:
        ask(client)

    (kept,) = facts.calls(recording)
    shown = call_of(exported).attributes or {}
    assert [key in kept.attributes for key in CONTENT] == [is_kept, is_kept]
    assert [key in shown for key in CONTENT] == [is_exported, is_exported]
    assert shown[c.RESPONSE_ID] == kept.attributes[c.RESPONSE_ID]
    assert shown[c.OUTPUT_TOKENS] == kept.attributes[c.OUTPUT_TOKENS]

"""S9: what was said stays here unless it may leave, wherever a program puts it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forwarding.collector import Endpoint
from tests.listening import Handler, listen

from lightning_otel import Store
from lightning_otel.types import conventions as c

AGENT = Path(__file__).with_name("quoting_agent.py")
CANARIES = set(re.findall(r"CANARY-[a-z]+", AGENT.read_text())) | {"CANARY-stream"}
SETTING = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class QuotingModel(Handler):
    """A model server that quotes what it refuses, calls a tool, or breaks off a stream."""

    def do_POST(self) -> None:
        """Answer by the model that is named."""
        body = json.loads(self.read_body())
        status, kind, model = 200, "application/json", body["model"]
        said: dict[str, object] = {"role": "assistant", "content": "hi"}
        if model.startswith("call:"):
            function = {"name": model[5:], "arguments": '{"text": "x"}'}
            said["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        answer: object = {"id": "c", "object": "chat.completion", "created": 1, "model": model,
                          "choices": [choice]}  # fmt: skip
        if model == "refuse":
            quoted = body["messages"][-1]["content"]
            status, answer = 400, {"error": {"message": f"cannot take {quoted!r}", "type": "bad"}}
        text = json.dumps(answer).encode()
        if model == "break":
            kind = "text/event-stream"
            text = b'data: {"error": {"type": "broken", "message": "CANARY-stream"}}\n\n'
        self.send(text, kind, status)


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Address of the model server."""
    with listen(QuotingModel) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize(
    ("settings", "is_kept", "is_sent"),
    [
        ({}, True, False),
        ({SETTING: "NO_CONTENT"}, False, False),
        ({"LIGHTNING_OTEL_EXPORT_CONTENT": "1"}, True, True),
    ],
    ids=["default", "NO_CONTENT", "EXPORT_CONTENT"],
)
def test_what_was_said_goes_only_where_it_may(
    tmp_path: Path, base_url: str, settings: dict[str, str], *, is_kept: bool, is_sent: bool
) -> None:
    """Error texts, stop sequences, names and events that quote it are content; types are not."""
    place, endpoint = tmp_path / "store" / "traces.duckdb", Endpoint()
    command = (sys.executable, "-m", "lightning_otel", "run", "--store", str(place), "--", "python")
    done = subprocess.run(
        [*command, str(AGENT), base_url],
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint.url, **settings},
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    endpoint.close()

    assert done.returncode == 0, done.stderr
    opened = Store(place)
    opened.settle()
    kept = b"".join(path.read_bytes() for path in place.parent.rglob("*") if path.is_file())
    if is_kept:  # compressed there
        kept += str(opened.sql("SELECT * FROM spans").dicts()).encode()
    sent = b"".join(span.SerializeToString() for span in endpoint.spans)
    assert canaries_in(kept) == (CANARIES if is_kept else set())
    assert canaries_in(sent) == (CANARIES if is_sent else set())
    spans = opened.spans().rows()
    assert {span.span_id for span in spans} == {span.span_id.hex() for span in endpoint.spans}
    types = {span.attributes.get(c.ERROR_TYPE) for span in spans if span.status == "ERROR"}
    assert types >= {"RuntimeError", "openai.BadRequestError", "broken", "OSError", "ValueError"}
    assert sum(span.status.code == 2 for span in endpoint.spans) > 8


def canaries_in(text: bytes) -> set[str]:
    return {canary for canary in CANARIES if canary.encode() in text}

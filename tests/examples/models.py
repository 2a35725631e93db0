"""A server of two other vendors' APIs, which asks for tools and says what they gave."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from tests.instrumentors.http.drawn import SIGNATURE, VENDORS
from tests.listening import Handler, listen


class Asked(NamedTuple):
    """A request: its path, its body, and what was answered."""

    path: str
    body: Any
    answer: dict[str, Any]


def _answer_anthropic(body: Any) -> list[Any]:
    last = body["messages"][-1]["content"]
    if (body.get("output_config") or {}).get("format"):
        return [{"type": "text", "text": '{"answer": 391}'}]
    if not isinstance(last, str):
        results = [block["content"] for block in last if block["type"] == "tool_result"]
        return [{"type": "text", "text": f"It is {' and '.join(results)}."}]
    products = re.findall(r"\d+\*\d+", last) if body.get("tools") else []
    if not products:
        return [{"type": "text", "text": f"You asked: {last}"}]
    thought = {"type": "thinking", "thinking": "I must multiply.", "signature": SIGNATURE}
    calls = [
        {
            "type": "tool_use",
            "id": f"toolu_{i}",
            "name": "calculator",
            "input": {"expression": each},
        }
        for i, each in enumerate(products)
    ]
    return [thought, *calls]


def _answer_gemini(body: Any) -> list[Any]:
    parts = body["contents"][-1]["parts"]
    results = [part["functionResponse"] for part in parts if "functionResponse" in part]
    if results:
        told = [str(result["response"]["result"]) for result in results]
        return [{"text": f"It is {' and '.join(told)}."}]
    asked = parts[-1]["text"]
    products = re.findall(r"\d+\*\d+", asked) if body.get("tools") else []
    if not products:
        return [{"text": f"You asked: {asked}"}]
    calls = [
        {"functionCall": {"name": "calculator", "args": {"expression": each}}} for each in products
    ]
    return [{**calls[0], "thoughtSignature": SIGNATURE}, *calls[1:]]


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    log_of: ClassVar[list[Asked]]

    def do_POST(self) -> None:
        body = json.loads(self.read_body())
        is_anthropic = self.path.partition("?")[0].endswith("/v1/messages")
        vendor = VENDORS["anthropic" if is_anthropic else "gemini"]
        answer = _answer_anthropic(body) if is_anthropic else _answer_gemini(body)
        is_stream = body.get("stream") or ":streamGenerateContent" in self.path
        whole = {**vendor.whole(answer)}
        data = vendor.stream(answer, random.Random(1)) if is_stream else json.dumps(whole).encode()
        # A record that has no id of the answer is known by the model that was asked.
        data = data.replace(b'"model": "m"', b'"model": "%s"' % body.get("model", "m").encode())
        self.log_of.append(Asked(self.path, body, whole))
        self.send(data, "text/event-stream" if is_stream else "application/json")


@contextmanager
def serve_models() -> Iterator[tuple[str, list[Asked]]]:
    """Run one; gives its address and its log."""
    log: list[Asked] = []
    with listen(_Handler, log_of=log) as url:
        yield url, log

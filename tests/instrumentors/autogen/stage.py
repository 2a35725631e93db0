"""AutoGen programs before the demo server, and what their spans must say, from its log alone."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.instrumentors.contract.drivers import INFO
from tests.instrumentors.outline import calls_of, outline

from lightning_otel import Recording, Store, auto_trace
from lightning_otel.demo.policy import Reply, ToolCall, message_text
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

_WHO = re.compile(r"You are (\w+)\.")
_CHOICES = re.compile(r"from \['(\w+)'")
_DONE = "the work is done"


def who(body: Mapping[str, Any]) -> str | None:
    """The agent that asks, as its system message says; None if no agent does."""
    found = _WHO.search(message_text(body["messages"][0]))
    return found[1] if found else None


class Cast:
    """Plays every model of a chat: calls each tool it is offered once, then says who it is."""

    def reply(self, body: Mapping[str, Any], rng: Any) -> Reply:
        """A choice of speaker, a plan, a call of tools, or a few words."""
        messages = body["messages"]
        asked = message_text(messages[-1])
        if "is_request_satisfied" in asked:
            return Reply(text=self._ledger(messages))
        if who(body) is None and (choice := _CHOICES.search(message_text(messages[0]))):
            return Reply(text=choice[1])
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        called = [message for message in messages if message.get("tool_calls")]
        if names and not called:
            return calls(rng, {name: self._arguments(name) for name in names})
        return Reply(text=f"{who(body) or 'nobody'} says that {_DONE}")

    def _ledger(self, messages: list[Any]) -> str:
        is_done = any("writer says" in message_text(message) for message in messages)
        answers = {
            "is_request_satisfied": is_done,
            "is_in_loop": False,
            "is_progress_being_made": True,
            "next_speaker": "writer",
            "instruction_or_question": "write",
        }
        return json.dumps({key: {"reason": "r", "answer": value} for key, value in answers.items()})

    def _arguments(self, name: str) -> dict[str, str]:
        if name.startswith("transfer_to"):
            return {}
        return {"expression": "6*7"} if name in ("calculator", "broken") else {"task": "help"}


def calls(rng: Any, wanted: Mapping[str, Any]) -> Reply:
    made = tuple(
        ToolCall(
            f"call_{rng.getrandbits(64):016x}", name, json.dumps(arguments, separators=(",", ":"))
        )
        for name, arguments in wanted.items()
    )
    return Reply(text="", tool_calls=made, finish_reason="tool_calls")


class Stage:
    """Runs programs against the server, traced and not, and checks what was recorded."""

    def __init__(self, server: DemoServer, store: Store, facts: Any) -> None:
        self.server = server
        self.store = store
        self.facts = facts
        self.recording: Recording | None = None

    def client(self, **more: Any) -> Any:
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        return OpenAIChatCompletionClient(
            model="toy",
            base_url=self.server.base_url,
            api_key="k",
            model_info=INFO,
            max_retries=0,
            **more,
        )

    def run(self, program: Callable[[Any], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            client = self.client()
            try:
                return await program(client)
            finally:
                await client.close()

        return asyncio.run(main())

    def trace(self, program: Callable[[Any], Awaitable[Any]]) -> Any:
        with auto_trace(store=self.store) as self.recording:
            return self.run(program)

    @property
    def spans(self) -> list[Span]:
        """What was recorded, but the making of agents."""
        assert self.recording is not None
        return [
            span
            for span in self.recording.spans()
            if span.attributes.get(c.OPERATION) != c.CREATE_AGENT
        ]

    def named(self, *names: str) -> list[Span]:
        return [span for span in self.spans if span.name in names]

    def path(self, span: Span) -> list[str]:
        """The names of the spans around a span, the outermost first, without the rollout's."""
        by_id = {known.span_id: known for known in self.spans}
        found: list[str] = []
        while (around := by_id.get(span.parent_span_id or "")) is not None:
            span = around
            found.append(span.name)
        return found[-2::-1]

    def calls(self) -> list[Span]:
        assert self.recording is not None
        return calls_of(self.recording)

    def check(self) -> None:
        """Assert that the calls are those of the log, in one tree; whose they are, programs say."""
        by_id = {exchange.response_id: exchange for exchange in self.server.log}
        assert len(self.calls()) == len(by_id)
        for span in self.calls():
            exchange = by_id[str(span.attributes[c.RESPONSE_ID])]
            wanted = (exchange.request or {}).get("response_format", {}).get("type")
            more = {"output_type": "json"} if wanted in ("json_object", "json_schema") else {}
            if c.AGENT_NAME in span.attributes:  # a manager's
                more["agent"] = span.attributes[c.AGENT_NAME]
            self.facts.agree(span, exchange, **more)
        self.check_shape()

    def check_shape(self) -> None:
        """Assert that there is one tree, and that every span of it is ours and has ended."""
        assert self.recording is not None
        outline(self.recording)
        assert {span.scope for span in self.spans} == {c.SCOPE}

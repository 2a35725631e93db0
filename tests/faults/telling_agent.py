"""An agent that puts its secrets everywhere a program may: Usage: telling_agent.py BASE_URL SHAPED.

Secrets of a known shape also stand where text is kept, in messages and errors; those of no shape
only where no value may be kept at all.
"""

import contextlib
import logging
import os
import sys

import openai
from opentelemetry import trace

import lightning_otel as lo

logging.basicConfig(level=logging.DEBUG)
base_url, shaped, *_ = sys.argv[1:]
bare = os.environ["BARE_SECRET"]
with_user = base_url.replace("://", f"://user-{bare}:{bare}@")

client = openai.OpenAI(
    base_url=base_url,
    api_key=f"{bare}-key",
    organization=f"{bare}-organization",
    project=f"{bare}-project",
    default_headers={"X-Default": f"{bare}-header"},
    default_query={"default-key": f"{bare}-query"},
    max_retries=0,
)
more = {
    "extra_headers": {"Authorization": f"Bearer {bare}", "X-Api-Key": bare, "Cookie": bare},
    "extra_query": {"key": f"{bare}-query"},
    "extra_body": {"api_key": bare, "mcp_headers": {"Authorization": bare}, "password": bare},
    "timeout": 30,
}
asked = [{"role": "user", "content": f"my key is {shaped}, what of it?"}]


def call(model: str, **options: object) -> None:
    """Ask each way; what fails has failed."""
    with contextlib.suppress(openai.OpenAIError):
        client.chat.completions.create(model=model, messages=asked, user=shaped, **options)
    with contextlib.suppress(openai.OpenAIError):
        for _ in client.chat.completions.create(
            model=model, messages=asked, stream=True, metadata={"key": shaped}, **options
        ):
            pass
    with contextlib.suppress(openai.OpenAIError):
        client.responses.create(
            model=model,
            input=f"Bearer {shaped}",
            instructions=shaped,
            tools=[
                {
                    "type": "mcp",
                    "server_label": "x",
                    "server_url": "https://example.invalid/mcp",
                    "headers": {"Authorization": f"Bearer {shaped}"},
                    "authorization": shaped,
                }
            ],
            **options,
        )


with lo.auto_trace():
    for model in ("toy", "fail-400", "fail-401", "fail-500", "cut"):
        call(model, **more)
    with contextlib.suppress(openai.OpenAIError):
        openai.OpenAI(base_url=with_user, api_key=bare).embeddings.create(model="toy", input="x")
    with contextlib.suppress(openai.OpenAIError):
        # Nobody listens there.
        gone = openai.OpenAI(base_url=f"http://{bare}:{bare}@127.0.0.1:9/v1", api_key=bare)
        gone.with_options(max_retries=0).models.list()
    azure = openai.AzureOpenAI(
        azure_endpoint=base_url.removesuffix("/v1"), api_key=bare, api_version="2024-10-21"
    )
    with contextlib.suppress(openai.OpenAIError):
        azure.chat.completions.create(model="toy", messages=asked)
    lo.emit_message(f"here it is: {shaped}")
    lo.emit_object({"key": shaped, "deep": [{"token": f"Bearer {shaped}"}]})
    lo.emit_action("login", {"password": shaped})
    lo.emit_observation(f"export KEY={shaped}")
    try:
        raise ValueError(f"401 for {shaped}")
    except ValueError as exc:
        lo.emit_exception(exc)
    with contextlib.suppress(RuntimeError), lo.operation("work", key=shaped):
        raise RuntimeError(f"cannot use {shaped}")
    lo.emit_reward(1.0)
    with trace.get_tracer("theirs").start_as_current_span("theirs") as span:
        span.set_attribute("note", "a span of the program's own")

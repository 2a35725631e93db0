"""A program with instrumentors of other families switched on beside ours, and what came of it.

Run by `test_live.py` in a process of its own, for an instrumentor patches its library for good:
`program.py SCENARIO ORDER NAME …`; prints one line of JSON.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_otel as lo
from lightning_otel import uninstrument
from lightning_otel.demo.agent import TOOLS, solve
from lightning_otel.demo.server import DemoServer
from lightning_otel.views.doctor import examine

NAMES = {
    "official": "opentelemetry.instrumentation.genai.openai:OpenAIInstrumentor",
    "openinference": "openinference.instrumentation.openai:OpenAIInstrumentor",
    "openllmetry": "opentelemetry.instrumentation.openai:OpenAIInstrumentor",
    "openinference-langchain": "openinference.instrumentation.langchain:LangChainInstrumentor",
    "openllmetry-langchain": "opentelemetry.instrumentation.langchain:LangchainInstrumentor",
}
ASKED: dict[str, Any] = {
    "model": "toy-policy",
    "logprobs": True,
    "extra_body": {"return_token_ids": True},
}
Outcome = list[Any]


def switch_on(names: list[str]) -> None:
    """Switch the foreign instrumentors on, as `opentelemetry-instrument` does."""
    for name in names:
        module, _, kind = NAMES[name].partition(":")
        getattr(import_module(module), kind)().instrument()


def _question(text: str) -> dict[str, Any]:
    return {**ASKED, "messages": [{"role": "user", "content": text}], "tools": TOOLS}


def tools(base_url: str) -> Outcome:
    """A tool loop of two rounds."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key="k") as client:
        return [solve(client, "What is 17*23?")]


def stream(base_url: str) -> Outcome:
    """A stream read to its end, and one left early."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key="k") as client:
        asked = {**_question("Say it again"), "stream": True}
        chunks = [chunk.model_dump() for chunk in client.chat.completions.create(**asked)]
        with client.chat.completions.create(**asked) as left:
            for _ in left:
                break
    return [[chunk["choices"] for chunk in chunks]]


def concurrent(base_url: str) -> Outcome:
    """Eight equal requests at once."""
    import openai

    async def all_at_once() -> Outcome:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
            create = client.chat.completions.create
            found = await asyncio.gather(*(create(**_question("Same for all")) for _ in range(8)))
            streamed = await create(**_question("One more"), stream=True)
            return [
                *(reply.choices[0].message.content for reply in found),
                [chunk.choices[0].delta.content async for chunk in streamed if chunk.choices],
            ]

    return asyncio.run(all_at_once())


def failing(base_url: str) -> Outcome:
    """A request the server refuses, then one it answers."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        with suppress(openai.BadRequestError):
            client.chat.completions.create(**_question("No") | {"model": "fail-400"})
        return [client.chat.completions.create(**_question("Yes")).choices[0].message.content]


def langchain(base_url: str) -> Outcome:
    """A LangChain agent with a tool."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def calculator(expression: str) -> str:
        """Work out an arithmetic expression."""
        left, right = expression.split("*")
        return str(int(left) * int(right))

    model = ChatOpenAI(
        model="toy-policy",
        base_url=base_url,
        api_key="k",  # type: ignore[arg-type]  # what users write
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    agent = create_agent(model, [calculator], name="calc")
    asked = {"messages": [{"role": "user", "content": "What is 17*23?"}]}
    return [agent.invoke(asked)["messages"][-1].content]


SCENARIOS: dict[str, Callable[[str], Outcome]] = {
    each.__name__: each for each in (tools, stream, concurrent, failing, langchain)
}


def places() -> dict[str, object]:
    """What stands in the client's classes as ``request``, where one has its own."""
    import openai
    from openai import _base_client as base

    owners = (
        base.SyncAPIClient, base.AsyncAPIClient, openai.OpenAI, openai.AsyncOpenAI,
        openai.AzureOpenAI, openai.AsyncAzureOpenAI,
    )  # fmt: skip
    return {owner.__name__: vars(owner).get("request") for owner in owners}


def main() -> None:
    """Run the scenario and print what the program saw, and what was recorded."""
    scenario, order, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, DemoServer() as server:
        store = lo.Store(Path(folder) / "traces.duckdb")
        before: dict[str, object] = {}
        if order == "theirs-first":
            switch_on(names)
            before = places()
        with lo.auto_trace(store=store) as recording:
            if order == "ours-first":
                switch_on(names)
                # In the base classes stands ours, which goes.
                before = {n: p for n, p in places().items() if not n.endswith("APIClient")}
            outcome = SCENARIOS[scenario](server.base_url)
        notes = [each.text for each in examine(store) if each.level == "note"]
        uninstrument()
        after = places()
        found = lo.TripletAdapter().explain(recording.spans())
        steps = {id(s): s for path in found.trajectories for s in path.transitions}.values()
        print(  # noqa: T201  # a command's output
            json.dumps(
                {
                    "outcome": outcome,
                    "answered": [each.response_id for each in server.log if each.status == 200],
                    "gone": sum(each.response is None for each in server.log),
                    "steps": sorted(str(step.response_id) for step in steps),
                    "levels": sorted({step.capture for step in steps}),
                    "agents": sorted({step.agent for step in steps}),
                    "calls": found.report.calls,
                    "dropped": found.report.reasons(),
                    "scopes": sorted({span.scope for span in recording.spans()}),
                    "notes": notes,
                    "replaced": [name for name in before if after[name] is not before[name]],
                    "rollouts": len({span.rollout_id for span in recording.spans()}),
                }
            )
        )


if __name__ == "__main__":
    main()

"""Records agents under Agent Lightning 0.3's own tracer, as its store keeps their spans.

    python make_agents.py BASE_URL openai_agents|langgraph FILE

Run in an environment with agentlightning 0.3.0, openai-agents and langchain, against a model that
calls the first tool it is offered and then answers.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

BASE_URL, NAME, FILE = sys.argv[1:]
os.environ.update(OPENAI_BASE_URL=BASE_URL, OPENAI_API_KEY="k", AGENTOPS_LOG_LEVEL="CRITICAL")

import agentlightning as agl  # noqa: E402  # it reads them

KEPT = ("service.instance.id", "telemetry.sdk.version")


def calculator(expression: str) -> str:
    """Work it out."""
    return "42"


async def openai_agents(tracer: Any) -> None:
    """A handoff, an agent with a tool, and a judge, each rewarded."""
    from agents import Agent, Runner, function_tool, set_default_openai_api

    set_default_openai_api("chat_completions")
    tools: Any = [function_tool(calculator)]
    math = Agent(name="MathAgent", instructions="You do math", tools=tools, model="toy")
    judge = Agent(name="Judge", instructions="You judge", model="toy")
    main = Agent(name="Main Agent", instructions="You lead", handoffs=[math], model="toy")
    for agent, reward in ((main, 0.0), (math, 1.0), (judge, 0.5)):
        await Runner.run(agent, "What is 6*7?")
        agl.emit_reward(reward)


async def langgraph(tracer: Any) -> None:
    """Two graphs, one with a tool, each rewarded."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    told: Any = {"callbacks": [tracer.get_langchain_handler()]}
    for name, tools, reward in (("planner", [tool(calculator)], 1.0), ("critic", [], 0.25)):
        graph = create_agent(ChatOpenAI(model="toy"), tools, name=name)
        graph.invoke({"messages": [("user", "What is 6*7?")]}, told)
        agl.emit_reward(reward)


async def main() -> None:
    """Record one of them."""
    tracer = agl.AgentOpsTracer()
    tracer.init()
    tracer.init_worker(0)
    async with tracer.trace_context("work"):
        await {"openai_agents": openai_agents, "langgraph": langgraph}[NAME](tracer)
    lines = []
    for span in tracer.get_last_trace():
        stored = json.loads(span.model_dump_json())
        held = stored["resource"]["attributes"]
        stored["resource"]["attributes"] = {key: held[key] for key in KEPT if key in held}
        lines.append(json.dumps(stored, separators=(",", ":")))
    Path(FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


asyncio.run(main())

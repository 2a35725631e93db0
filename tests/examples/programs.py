"""What each program under ``examples/`` must be recorded as: its calls' agents, and its tools.

A line here is the program's own expectation, worked out from its source by hand. ``shows`` names
the columns of the README's matrix for which the program stands as proof; its test fails if it does
not show them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COLUMNS = ("call", "tools", "stream", "async", "agent", "token ids")


@dataclass(frozen=True, slots=True)
class Program:
    """One agent program and what it does.

    Attributes:
        name: The file's name, without its ending.
        source: Row of the README's matrix.
        needs: Modules it imports.
        agents: Number of calls by the agent that made them; ``""`` where none is named.
        tools: Number of tool executions that are spans, by agent and tool.
        shows: Columns of the matrix it proves.
    """

    name: str
    source: str
    needs: tuple[str, ...]
    agents: Mapping[str, int]
    shows: tuple[str, ...]
    tools: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return EXAMPLES / f"{self.name}.py"


OPENAI = "openai"
LANGCHAIN = "LangChain"
LANGGRAPH = "LangGraph"
AUTOGEN = "AutoGen"
AGENTS = "OpenAI Agents SDK"
CREWAI = "CrewAI"
AG2 = "ag2 0.x"
LITELLM = "LiteLLM"
BY_HAND = "httpx, requests, aiohttp, urllib3"

_OPENAI = ("openai",)
_LANGCHAIN = ("langchain_openai",)
_AUTOGEN = ("autogen_agentchat", "autogen_ext.models.openai")
_AGENTS = ("agents",)

PROGRAMS = (
    Program("openai_tools", OPENAI, _OPENAI, agents={"": 5}, shows=("call", "tools", "token ids")),
    Program("openai_gather", OPENAI, _OPENAI, agents={"": 17}, shows=("async",)),
    Program("openai_stream", OPENAI, _OPENAI, agents={"": 4}, shows=("stream",)),
    Program("openai_responses", OPENAI, _OPENAI, agents={"": 3}, shows=("call", "tools")),
    Program("openai_parse", OPENAI, _OPENAI, agents={"": 3}, shows=("call", "token ids")),
    Program(
        "langchain_chain",
        LANGCHAIN,
        _LANGCHAIN,
        agents={"": 11},
        shows=("call", "stream", "async", "token ids"),
    ),
    Program(
        "langchain_agent",
        LANGCHAIN,
        ("langchain", *_LANGCHAIN),
        agents={"accountant": 3, "reporter": 2},
        tools={
            ("accountant", "calculator"): 2,
            ("accountant", "failing_lookup"): 1,
            ("reporter", "get_weather"): 1,
        },
        shows=("tools", "agent"),
    ),
    Program("langchain_fallback", LANGCHAIN, _LANGCHAIN, agents={"": 10}, shows=("call",)),
    Program("langchain_rag", LANGCHAIN, ("numpy", *_LANGCHAIN), agents={"": 7}, shows=("call",)),
    Program(
        "langchain_structured",
        LANGCHAIN,
        _LANGCHAIN,
        agents={"": 5},
        tools={("", "calculator"): 1},
        shows=("tools",),
    ),
    Program(
        "langgraph_branch",
        LANGGRAPH,
        ("langgraph", *_LANGCHAIN),
        agents={"draft": 3, "polish": 2, "shorten": 1},
        shows=("call", "stream", "async", "agent", "token ids"),
    ),
    Program(
        "autogen_roundrobin",
        AUTOGEN,
        _AUTOGEN,
        agents={"solver": 8, "critic": 4},
        tools={("solver", "calculator"): 2},
        shows=("call", "tools", "async", "agent", "token ids"),
    ),
    Program(
        "autogen_selector",
        AUTOGEN,
        _AUTOGEN,
        agents={"SelectorGroupChatManager": 4, "planner": 2, "writer": 1, "editor": 1},
        shows=("stream",),
    ),
    Program(
        "autogen_swarm",
        AUTOGEN,
        _AUTOGEN,
        agents={"triage": 1, "cashier": 1},
        tools={("triage", "transfer_to_cashier"): 1, ("cashier", "get_refund"): 1},
        shows=("agent",),
    ),
    Program(
        "autogen_agent_tool",
        AUTOGEN,
        _AUTOGEN,
        agents={"host": 3, "poet": 1, "singer": 1, "drummer": 1},
        tools={("host", "poet"): 1, ("host", "band"): 1},
        shows=("tools", "agent"),
    ),
    Program(
        "agents_handoff",
        AGENTS,
        _AGENTS,
        agents={"front": 1, "accountant": 5, "translator": 1, "clerk": 3},
        tools={("accountant", "calculator"): 2, ("accountant", "translate"): 1},
        shows=("call", "tools", "async", "agent", "token ids"),
    ),
    Program(
        "agents_stream",
        AGENTS,
        _AGENTS,
        agents={"desk": 1, "reporter": 3},
        tools={("reporter", "get_weather"): 1},
        shows=("stream",),
    ),
    Program(
        "crewai_crew",
        CREWAI,
        ("crewai",),
        agents={"accountant": 2, "writer": 1},
        tools={("accountant", "calculator"): 1},
        shows=("call", "tools", "agent"),
    ),
    Program(
        "crewai_async",
        CREWAI,
        ("crewai",),
        agents={"poet": 2},
        shows=("stream", "async", "token ids"),
    ),
    Program(
        "ag2_chat",
        AG2,
        ("autogen.agentchat.conversable_agent",),
        agents={
            "assistant": 2,
            "speaker_selection_agent": 3,
            "writer": 1,
            "editor": 1,
            "planner": 1,
        },
        tools={("user", "calculator"): 1},
        shows=("call", "tools", "agent", "token ids"),
    ),
    Program(
        "ag2_async",
        AG2,
        ("autogen.agentchat.conversable_agent",),
        agents={"alpha": 1, "beta": 1},
        shows=("stream", "async"),
    ),
    Program(
        "litellm_loop",
        LITELLM,
        ("litellm",),
        agents={"": 6},
        shows=("call", "tools", "stream", "async", "token ids"),
    ),
    Program(
        "httpx_loop",
        BY_HAND,
        ("httpx", "requests"),
        agents={"": 6},
        shows=("call", "tools", "stream", "async", "token ids"),
    ),
)

CLIENTS = (
    Program(
        "clients/anthropic_tools",
        "anthropic",
        ("anthropic",),
        agents={"": 6},
        shows=("call", "tools", "stream", "async"),
    ),
    Program(
        "clients/anthropic_parse",
        "anthropic",
        ("anthropic",),
        agents={"": 6},
        shows=("call", "stream", "async"),
    ),
    Program(
        "clients/langchain_claude",
        "langchain-anthropic",
        ("langchain_anthropic",),
        agents={"": 9},
        shows=("call", "tools", "stream", "async"),
    ),
    Program(
        "clients/genai_chat",
        "google-genai",
        ("google.genai",),
        agents={"": 8},
        shows=("call", "tools", "stream", "async"),
    ),
)
"""Programs that ask models of other vendors."""

FRAMEWORKS = {
    "pydantic_ai_agents": "pydantic_ai",
    "smolagents_agents": "smolagents",
    "dspy_react": "dspy",
    "adk_agents": "google.adk",
    "strands_agents": "strands",
    "haystack_agents": "haystack",
    "agno_agents": "agno",
    "llama_index_agents": "llama_index.core",
    "agent_framework_agents": "agent_framework",
    "semantic_kernel_agents": "semantic_kernel",
}
"""Programs of frameworks that no instrumentor of ours patches, and what they import."""

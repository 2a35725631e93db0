"""The libraries that are recorded, and the instrumentor of each."""

from collections.abc import Mapping
from typing import Final

INSTRUMENTORS: Final[Mapping[str, str]] = {
    "openai": "lightning_otel.instrumentors.openai:OpenAIInstrumentor",
    "langchain_core": "lightning_otel.instrumentors.langchain:LangChainInstrumentor",
    "autogen_core": "lightning_otel.instrumentors.autogen:AutoGenInstrumentor",
    "agents": "lightning_otel.instrumentors.openai_agents:OpenAIAgentsInstrumentor",
    "crewai": "lightning_otel.instrumentors.crewai:CrewAIInstrumentor",
    "litellm": "lightning_otel.instrumentors.openai.litellm:LiteLLMInstrumentor",
    "autogen": "lightning_otel.instrumentors.ag2:AG2Instrumentor",
    "ag2": "lightning_otel.instrumentors.ag2:AG2Instrumentor",
    "mcp": "lightning_otel.instrumentors.mcp:MCPInstrumentor",
    "httpx": "lightning_otel.instrumentors.http.httpx:HTTPXInstrumentor",
    "httpx2": "lightning_otel.instrumentors.http.httpx:HTTPX2Instrumentor",
    "aiohttp": "lightning_otel.instrumentors.http.aiohttp:AiohttpInstrumentor",
    "urllib3": "lightning_otel.instrumentors.http.urllib3:Urllib3Instrumentor",
    **dict.fromkeys(
        ("anthropic", "groq", "together"),
        "lightning_otel.instrumentors.http.retries:RetriesInstrumentor",
    ),
}
"""The library each instrumentor is for, and where it stands: imported when its library is."""
ENTRIES: Final = {
    "langchain_core": "langchain", "autogen_core": "autogen", "agents": "openai-agents",
    "autogen": "ag2", **dict.fromkeys(("anthropic", "groq", "together"), "retries"),
}  # fmt: skip
"""Names of entry points, where they are not those of the libraries."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "autogen_core": (
        "autogen_agentchat.agents", "autogen_agentchat.teams", "autogen_ext.tools.mcp._workbench",
    ),
}  # fmt: skip
"""Modules that import a library, which is switched on in their midst: they are patched after."""

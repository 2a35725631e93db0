"""For the tests of agents: what was captured in a block, and a scripted model."""

from lightning_otel.testing.capture import Captured, CapturedCall, CapturedTool, captured
from lightning_otel.testing.server import ScriptedServer, failure, scripted_server, tool_call

__all__ = [
    "Captured",
    "CapturedCall",
    "CapturedTool",
    "ScriptedServer",
    "captured",
    "failure",
    "scripted_server",
    "tool_call",
]

"""For the tests of whoever builds agents: what was captured in a block, and a scripted model.

Nothing here is imported by what records; pytest is imported by ``fixtures`` alone.
"""

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

"""The start of each Python process under ``lightning-otel run``.

``run`` puts this folder on ``PYTHONPATH``; its ``sitecustomize`` is for that alone.
"""

from dataclasses import replace

from lightning_otel import capture, config
from lightning_otel import conventions as c
from lightning_otel.provider import start_run_child


def start() -> None:
    """Switch tracing on and take over what the run says of the whole program."""
    start_run_child()
    agent = config.RUN_AGENT.read() or None
    frame = capture.current_frame()
    if agent and frame is not None:
        stamps = {c.AGENT_NAME: agent, **frame.stamps}
        capture.process.frame = replace(frame, stamps=stamps)

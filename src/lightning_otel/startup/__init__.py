"""What each Python process under ``lightning-otel run`` begins with.

``run`` puts this folder on ``PYTHONPATH``; its ``sitecustomize`` is for that alone.
"""

import os
from dataclasses import replace

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.provider import start_run_child

AGENT_ENV = "LIGHTNING_OTEL_RUN_AGENT"
"""Who acts where the program does not say: the run's ``--agent``."""


def start() -> None:
    """Switch tracing on and take over what the run says of the whole program."""
    start_run_child()
    agent = os.environ.get(AGENT_ENV)  # noqa: TID251  # between run and its child, no setting
    frame = capture.current_frame()
    if agent and frame is not None:
        stamps = {c.AGENT_NAME: agent, **frame.stamps}
        capture.set_process_frame(replace(frame, stamps=stamps))

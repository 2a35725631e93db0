"""Rollouts of several agents, models, versions and tools, some of which fail."""

import json
import random
from collections.abc import Iterator
from typing import Any, Final

from tests.viewer.spans import call, said, span

from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c

_AGENTS: Final = {"planner": ("plan", "gpt-4o"), "researcher": ("search", "gpt-4o-mini"),
                  "coder": ("run_python", "claude-sonnet-4-5")}  # fmt: skip
_FAULTS: Final = {"search": ("httpx.ReadTimeout", "The read operation timed out"),
                  "run_python": ("KeyError", "'customer_id'")}  # fmt: skip
_TASKS: Final = ("Refund order 4711", "Find the cheapest flight to Oslo", "Merge the two tables")
_STACK: Final = 'Traceback (most recent call last):\n  File "tools.py", line 7\n'


def make_rollout(
    rank: int, start_ns: int, fault: str = "", *, survives: bool = False
) -> Iterator[Span]:
    """Make the spans of three agents; the tool ``fault`` raises, through its agent and the root.

    Where the rollout ``survives``, its agent catches that.
    """
    chance, task = random.Random(rank), _TASKS[rank % len(_TASKS)]
    own = {c.ROLLOUT_ID: f"rollout-{rank:04d}",
           c.RESOURCES: json.dumps({"*": {"prompt": rank % 3 + 1}})}  # fmt: skip

    def place(number: int, at_s: float, took_s: float, error: str = "", **values: Any) -> Any:
        begin_ns, end_ns = (start_ns + int(time_s * 1e9) for time_s in (at_s, at_s + took_s))
        kind, message = _FAULTS.get(error, ("", ""))
        stack = {c.EXCEPTION_TYPE: kind, c.EXCEPTION_STACKTRACE: f"{_STACK}{kind}: {message}"}
        return {
            "trace_id": f"{rank + 1:032x}", "start_ns": begin_ns, "end_ns": end_ns,
            "attributes": {**own, **values, **({c.ERROR_TYPE: kind} if error else {})},
            "status": "ERROR" if error else "OK", "status_message": message,
            "events": (Event("exception", end_ns, stack),) if error and number == 4 else (),
        }  # fmt: skip

    first, passed = rank * 32, "" if survives else fault
    yield span(first + 1, name=c.SPAN_ROLLOUT, **place(1, 0, 9, passed, **{c.TASK: f'"{task}"'}))
    for order, (agent, (tool, model)) in enumerate(_AGENTS.items()):
        at_s, took_s, at = order * 3, 0.5 + chance.random(), first + order * 8 + 2
        failing, acts = fault if fault == tool else "", {c.AGENT_NAME: agent}
        kept = place(0, at_s, 2.9, failing and passed, **acts, **{c.OPERATION: c.INVOKE_AGENT})
        yield span(at, first + 1, name=f"invoke_agent {agent}", **kept)
        used = {c.REQUEST_MODEL: model, c.INPUT_TOKENS: 900 + rank, c.OUTPUT_TOKENS: 80}
        words = said(("user", task)), said(("assistant", f"I use {tool}."))
        kept = place(1, at_s + 0.1, took_s, **acts, **used)
        yield call(at + 1, at, *words, name=f"chat {model}", **kept)
        acts |= {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool}
        kept = place(4, at_s + took_s + 0.2, took_s / 2, failing, **acts)
        yield span(at + 2, at, name=f"execute_tool {tool}", **kept)
        if failing and passed:
            return
    earned = {c.REWARD_VALUE: chance.choice((0.0, 0.5, 1.0)), c.REWARD_NAME: c.PRIMARY_REWARD}
    yield span(first + 30, first + 1, name=c.SPAN_ANNOTATION, **place(30, 8.9, 0, **earned))

"""An evaluation of Inspect: an agent with a shell solves three samples at once, a model judges."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import model_graded_qa
from inspect_ai.tool import bash


@task
def solve() -> Any:
    """Three samples; their sandbox is this machine."""
    samples = [Sample(f"Mend add, sample {i}", target="it adds", files={"calc.py": "calc.py",
               "check.py": "check.py"}) for i in range(3)]  # fmt: skip
    agent = react(name="coder", prompt="You are a coder.", tools=[bash()])
    return Task(samples, solver=agent, scorer=model_graded_qa(), sandbox="local")

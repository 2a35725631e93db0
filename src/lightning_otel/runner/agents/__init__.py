"""Agents: functions, classes with ``training_rollout``, and a router."""

from lightning_otel.runner.agents.agent import Agent, Answer, Resources
from lightning_otel.runner.agents.functions import (
    FunctionAgent,
    LitAgent,
    agent_of,
    llm_rollout,
    prompt_rollout,
    rollout,
)
from lightning_otel.runner.agents.router import Router

__all__ = [
    "Agent",
    "Answer",
    "FunctionAgent",
    "LitAgent",
    "Resources",
    "Router",
    "agent_of",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
]

"""``agentlightning.algorithm.verl``."""

from lightning_otel.agl.algorithms import VERL

__all__ = ["VERL"]

"""``agentlightning.algorithm.apo``."""

from lightning_otel.agl.algorithms import APO

__all__ = ["APO"]

"""``agentlightning.algorithm``."""

from lightning_otel.agl.algorithms import APO, VERL, BaseAlgorithm, Baseline

__all__ = ["APO", "VERL", "BaseAlgorithm", "Baseline"]

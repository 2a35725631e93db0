"""``from agentlightning.fixes import enable_retokenization_fix``."""

from lightning_otel.provider import enable_retokenization_fix

__all__ = ["enable_retokenization_fix"]

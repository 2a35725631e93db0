"""``agentlightning.types``: its names as ``lightning_otel.agl`` has them."""

from lightning_otel.agl import __getattr__ as __getattr__

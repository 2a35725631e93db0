"""Stores by Agent Lightning's names; every one is a :class:`lightning_otel.Store`."""

import os
from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_otel.algorithms.exchange import Backend, choose_backend, hand_over, read_back
from lightning_otel.dataset import Store
from lightning_otel.store.layout import MEMORY

if TYPE_CHECKING:
    from lightning_otel.agl.trainer import LightningRuntimeConfig

_PLACES: Final = {"local": None, "duckdb": None, "sqlite": None, "memory": MEMORY}
"""What a backend is called here; another is an engine, which a store is named by as a URL."""


class LightningStore(Store):
    """A store by its backend, ``local`` (a file) or ``memory``, or by a path or URL."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, backend: str = "local"
    ) -> None:
        """Name a store; see :class:`lightning_otel.Store`.

        Raises:
            ConfigError: There is no such engine; what to take is said.
        """
        super().__init__(path if path is not None else _PLACES.get(backend, f"{backend}://"))


class MemoryLightningStore(LightningStore):
    """A store in this process, gone with it."""

    def __init__(self) -> None:
        super().__init__(MEMORY)


class MicrosoftLightningStore(LightningStore):
    """A store beside a running one of Agent Lightning 0.3: ``hand_over()`` and ``read_back()``."""

    def __init__(
        self, url: str = "http://127.0.0.1:4747", path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(path)
        self.hand_over = partial(hand_over, self, url)
        self.read_back = partial(read_back, self, url)


def resolve_lightning_store(
    config: "LightningRuntimeConfig | Backend" = "auto",
) -> LightningStore | None:
    """Return the store of a backend, ``auto``, ``builtin`` or ``microsoft``.

    Args:
        config: The backend, or a config that names it and a store; None is returned where that one
            switches collection off.

    Raises:
        ConfigError: Agent Lightning is asked for, and is not installed; or no backend is called so.
    """
    backend, path = (config, None) if isinstance(config, str) else (config.backend, config.store)
    if not isinstance(config, str) and not config.is_collecting:
        return None
    if choose_backend(backend) == "microsoft":
        return MicrosoftLightningStore(path=path)
    return LightningStore(path)

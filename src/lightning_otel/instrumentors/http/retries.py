"""Calls of SDKs with retries: only they know if an answer of 429 is final, and what they raise.

Source: ``_base_client.py`` of the SDKs that Stainless generates, in which each call is one
``request``.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.http import SdkCall

_MODULES: Final = tuple(f"{name}._base_client" for name in ("anthropic", "groq", "together"))


class RetriesInstrumentor(LibraryInstrumentor):
    """Joins the attempts of one call: of ``anthropic``, ``groq`` and ``together``."""

    requires = ()

    def patches(self) -> Mapping[str, Patch]:
        """The modules of the base clients."""
        return dict.fromkeys(_MODULES, self._patch_clients)

    def _patch_clients(self, module: ModuleType) -> None:
        for client in (module.SyncAPIClient, module.AsyncAPIClient):
            self.wrap_calls(client, _begin_call, "request")


def _begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SdkCall:
    return SdkCall()

"""Exchange of spans and rewards with Agent Lightning 0.3's running store, over HTTP."""

import importlib
import logging
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal, get_args

from lightning_otel.algorithms.exchange.exchange import (
    HandOverCounts,
    ReadBackCounts,
    hand_over,
    read_back,
)
from lightning_otel.algorithms.options import Backend
from lightning_otel.errors import ConfigError

__all__ = [
    "Backend",
    "HandOverCounts",
    "ReadBackCounts",
    "choose_backend",
    "hand_over",
    "read_back",
]

log = logging.getLogger(__name__)


FITS: Final = "0.3"
REMEDY: Final = "pip install 'agentlightning==0.3.0', or say backend='builtin'"
_PACKAGE: Final = "agentlightning"


def choose_backend(choice: Backend = "auto", *, unfit: str = "") -> Literal["builtin", "microsoft"]:
    """Choose the backend from the requested and the installed ones; warn where ``auto`` falls back.

    ``unfit`` is the reason why Agent Lightning cannot do what is asked, though it may be installed.
    """
    if choice not in get_args(Backend):
        raise ConfigError(
            f"backend is {choice!r}; it must be one of {', '.join(get_args(Backend))}"
        )
    if choice == "builtin":
        return "builtin"
    reason = explain_missing() or unfit
    if not reason:
        return "microsoft"
    if choice == "microsoft":
        raise ConfigError(f"the backend microsoft cannot be used: {reason}; {REMEDY}")
    log.warning("backend 'auto' is 'builtin' here: %s", reason)
    return "builtin"


def explain_missing() -> str:
    """Return why Agent Lightning cannot be used; empty if it can."""
    try:
        package_version = version(_PACKAGE)
    except PackageNotFoundError:
        return "agentlightning is not installed"
    if package_version.split(".")[:2] != FITS.split("."):
        return f"agentlightning {package_version} is installed, and {FITS} is what fits"
    try:
        with warnings.catch_warnings():  # what it imports warns of its own making
            warnings.simplefilter("ignore")
            importlib.import_module(_PACKAGE)
    except Exception as exc:  # noqa: BLE001  # somebody else's code may raise anything
        return f"agentlightning {package_version} cannot be imported: {type(exc).__name__}: {exc}"
    return ""

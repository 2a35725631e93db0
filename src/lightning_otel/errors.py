"""Every exception lightning-otel raises, named by the boundary that failed.

Capture never raises into the traced program; these come from the store and from above it.
"""

import logging
from typing import ClassVar
from urllib.parse import unquote, urlsplit

_warned: set[str] = set()


def warn_once(text: str, *, key: str = "") -> None:
    """Log a warning, unless this process was warned with the same text or key before."""
    if (key or text) not in _warned:
        _warned.add(key or text)
        logging.getLogger("lightning_otel").warning("%s", text)


_REFUSALS = {
    "it is read-only here: change its owner or mode, or work on a copy": (
        "Permission denied", "Operation not permitted", "Read-only file system",
        "readonly database", "unable to open database file",
    ),
    "its disk is full: make room, and try again": (
        "No space left", "disk is full", "File too large", "quota exceeded",
        "No usable temporary directory", "No files found that match",
    ),
}  # fmt: skip
"""Messages of the system, DuckDB and SQLite where a disk takes nothing, by what to do."""


def disk_remedy(exc: Exception, otherwise: str) -> str:
    """Return what to do where a disk took nothing; something else where that was not the cause."""
    text = str(exc)
    remedies = (
        remedy for remedy, words in _REFUSALS.items() if any(word in text for word in words)
    )
    return next(remedies, otherwise)


def install_command(*extras: str) -> str:
    """Return the command that installs extras, of the checkout that was installed if one was."""
    import importlib.metadata
    import json

    target, option = "lightning-otel", ""
    try:
        text = importlib.metadata.distribution(target).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text or "{}")
    if "dir_info" in origin:  # PEP 610: a folder on this machine
        target = unquote(urlsplit(origin["url"]).path)
        option = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {option}'{target}[{','.join(extras)}]'"


class LightningOtelError(Exception):
    """Base of all errors this package raises on purpose.

    A message says what was tried and with which value; after its first ``"; "``, what to do.

    Attributes:
        why: A fact that explains the failure, where the message cannot tell it; else empty.
    """

    why: ClassVar[str] = ""

    @property
    def what(self) -> str:
        """The failure, in words."""
        return str(self).partition("; ")[0]

    @property
    def remedy(self) -> str:
        """The remedy; empty if the message has none."""
        return str(self).partition("; ")[2]


class ConfigError(LightningOtelError):
    """A setting or argument cannot be used as given."""


class NotInstalledError(ConfigError):
    """A library that this needs is not installed here."""


class StoreError(LightningOtelError):
    """The store could not be opened, read or written."""


class StoreMissingError(StoreError):
    """There is no store at the given path."""

    why = "reading never creates a store"


class StoreDamagedError(StoreError):
    """Something in the store is damaged, and what it held cannot be read."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of lightning-otel."""


class StateError(LightningOtelError):
    """The state could not be read or changed: queue, resources or runs."""


class ChangedError(StateError):
    """Somebody else changed it meanwhile."""


class WorkerError(LightningOtelError):
    """Workers that run an agent cannot be started, or go on dying."""


class QueryError(LightningOtelError):
    """A SQL text is not a single read-only statement, or DuckDB refused it."""


class ReceiveError(LightningOtelError):
    """Received data is malformed."""


class TooLargeError(ReceiveError):
    """Received data is too large."""


class NotFoundError(LightningOtelError):
    """Nothing, or more than one thing, has the id or name that was asked for."""


class CertificateError(LightningOtelError):
    """An export cannot be certified: its rows are not what came of its steps."""


class AdapterError(LightningOtelError):
    """An adapter of somebody else's cannot be loaded, or failed."""


class TrainingError(LightningOtelError):
    """The data cannot be learnt from, or a training run cannot go on."""

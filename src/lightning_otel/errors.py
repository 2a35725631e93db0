"""Every exception lightning-otel raises, named by the boundary that failed.

Capture never raises into the traced program; these come from the store and from above it.
"""


class LightningOtelError(Exception):
    """Base of all errors this package raises on purpose.

    A message says what was tried and with which value; after its first ``"; "``, what to do.
    """

    @property
    def what(self) -> str:
        """What failed."""
        return str(self).partition("; ")[0]

    @property
    def why(self) -> str:
        """Which boundary failed, as the class says it."""
        return (type(self).__doc__ or "").strip().partition("\n")[0]

    @property
    def remedy(self) -> str:
        """What to do about it; empty if the message says nothing of it."""
        return str(self).partition("; ")[2]


class ConfigError(LightningOtelError):
    """A setting or argument cannot be used as given."""


class NotInstalledError(ConfigError):
    """A library that this needs is not installed here."""


class StoreError(LightningOtelError):
    """The store could not be opened, read or written."""


class StoreMissingError(StoreError):
    """Nothing stands at the given path; reading never creates a store."""


class StoreDamagedError(StoreError):
    """Something in the store is damaged, and what it held cannot be read."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of lightning-otel."""


class StateError(LightningOtelError):
    """What is queued, tuned or trained could not be read or changed."""


class ChangedError(StateError):
    """What was decided on was changed by somebody else meanwhile."""


class WorkerError(LightningOtelError):
    """Workers that run an agent cannot be started, or go on dying."""


class QueryError(LightningOtelError):
    """A SQL text is not a single read-only statement, or DuckDB refused it."""


class ReceiveError(LightningOtelError):
    """What was received is not what it says it is."""


class TooLargeError(ReceiveError):
    """What was received is larger than anything it could be worth."""


class NotFoundError(LightningOtelError):
    """Nothing, or more than one thing, has the id or name that was asked for."""


class AdapterError(LightningOtelError):
    """An adapter of somebody else's cannot be loaded, or failed."""


class TrainingError(LightningOtelError):
    """What there is cannot be learnt from, or a training run cannot go on."""

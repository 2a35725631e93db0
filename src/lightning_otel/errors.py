"""Every exception lightning-otel raises, named by the boundary that failed.

Capture never raises into the traced program; these come from the store and from above it.
"""


class LightningOtelError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(LightningOtelError):
    """A setting or argument cannot be used as given."""


class StoreError(LightningOtelError):
    """The store could not be opened, read or written."""


class StoreMissingError(StoreError):
    """Nothing stands at the given path; reading never creates a store."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of lightning-otel."""


class QueryError(LightningOtelError):
    """A SQL text is not a single read-only statement, or DuckDB refused it."""


class NotFoundError(LightningOtelError):
    """No trace, span or rollout matches the given id."""

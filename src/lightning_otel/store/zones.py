"""Times with a zone, on their way to Python as text.

DuckDB makes Python's own of them with pytz, which it does not bring. Frames and Arrow have theirs.
"""

import re
from collections.abc import Iterable
from typing import Final

_ZONED: Final = "TIMESTAMP WITH TIME ZONE"
_END: Final = re.compile(r";\s*(--[^\n]*\s*)*\Z")
"""What may follow a statement, and not one in brackets."""


def as_text(kinds: Iterable[object]) -> str:
    """The list of a SELECT that takes every column, times with a zone as text.

    Args:
        kinds: DuckDB's types of the columns, in order.

    Returns:
        The list; empty if nothing is to be changed.
    """
    found = [str(kind) for kind in kinds]
    if not any(_ZONED in kind for kind in found):
        return ""
    # Within lists, structs and maps as well: only the name of that type is another one.
    return ", ".join(
        f"CAST(#{place} AS {kind.replace(_ZONED, 'VARCHAR')})" if _ZONED in kind else f"#{place}"
        for place, kind in enumerate(found, 1)
    )


def selecting(columns: str, text: str) -> str:
    """A statement that takes such columns of what another gives, in its order."""
    return f"SELECT {columns} FROM ({_END.sub('', text)}\n)"

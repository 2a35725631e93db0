"""A library's async generators inside ours, which go through them one step at a time."""

import sys
from collections.abc import AsyncGenerator, Awaitable
from typing import Any


def first_step(inner: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """The first step of a generator that only the one around it will ever close.

    An event loop closes each generator it knows of; were it told of both, it would close the inner
    one while the outer one does, which is an error.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=_leave_open)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _leave_open(inner: AsyncGenerator[Any, Any]) -> None:
    """Nothing: the generator around it is collected with it, and will close it."""

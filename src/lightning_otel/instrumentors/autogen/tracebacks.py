"""AutoGen writes the traceback of an agent's error into the error of its team.

The program reads that text. So the frames of our own functions, which the exception passed through,
are taken out of the traceback first.
"""

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

from lightning_otel import capture

_OURS: Final = "lightning_otel.instrumentors."


def from_exception(owner: Any) -> Callable[[], None]:
    """Replace ``SerializableException.from_exception``; what is returned puts it back."""
    original = owner.__dict__["from_exception"]

    @functools.wraps(original.__func__)
    def without_us(cls: Any, exc: Any) -> Any:
        capture.guarded(forget_us, exc)
        return original.__func__(cls, exc)

    replacement = classmethod(without_us)
    owner.from_exception = replacement

    def leave() -> None:
        if owner.__dict__["from_exception"] is replacement:
            owner.from_exception = original

    return leave


def forget_us(exc: BaseException) -> None:
    """Take our frames out of an exception's traceback, and of those that led to it."""
    for one in _walk_chain(exc):
        one.__traceback__ = _without_us(one.__traceback__)


def _walk_chain(exc: BaseException) -> Iterator[BaseException]:
    unread: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while unread:
        one = unread.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            unread += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                unread += one.exceptions
            yield one


def _without_us(first: TracebackType | None) -> TracebackType | None:
    while first is not None and _is_ours(first):
        first = first.tb_next
    here = first
    while here is not None:
        while here.tb_next is not None and _is_ours(here.tb_next):
            here.tb_next = here.tb_next.tb_next
        here = here.tb_next
    return first


def _is_ours(entry: TracebackType) -> bool:
    return str(entry.tb_frame.f_globals.get("__name__")).startswith(_OURS)

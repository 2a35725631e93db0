"""Methods of a base class in all its subclasses, those of the program included."""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.library import MARK, as_function

Make = Callable[[Any], Any]


class Family:
    """The subclasses of one class: those there are, and those to come.

    Their methods are replaced where each class defines them, because a library's abstract methods
    hold nothing to replace.
    """

    def __init__(
        self,
        base: type,
        methods: Mapping[str, Make],
        is_left_out: Callable[[type], bool] = lambda cls: False,
    ) -> None:
        """Replace them.

        Args:
            base: The class; its own methods too, unless they are abstract.
            methods: By name what gives the function that is to stand there.
            is_left_out: Whether a class keeps its methods.
        """
        self._base = base
        self._methods = methods
        self._is_left_out = is_left_out
        self._hook = base.__dict__.get("__init_subclass__")
        for cls in _all(base):
            self._adopt(cls)
        self._watch()

    def leave(self) -> None:
        """Put every method back."""
        if self._hook is None:
            if "__init_subclass__" in self._base.__dict__:
                del self._base.__init_subclass__
        else:
            self._base.__init_subclass__ = self._hook  # type: ignore[method-assign]  # a class method
        for cls in _all(self._base):
            for name in self._methods:
                _restore(cls, name)

    def _watch(self) -> None:
        family, hook = self, self._hook
        base: Any = self._base

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807  # the name of the hook
            if hook is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                hook.__func__(cls, **kwargs)
            capture.guarded(family._adopt, cls)

        base.__init_subclass__ = classmethod(__init_subclass__)

    def _adopt(self, cls: type) -> None:
        if self._is_left_out(cls):
            return
        for name, make in self._methods.items():
            original: Any = cls.__dict__.get(name)
            # Another tool's wrapper of wrapt's says that it is a function, too.
            if not isinstance(original, FunctionType) or hasattr(original, MARK):
                continue
            if getattr(original, "__isabstractmethod__", False):
                continue
            wrapper = functools.wraps(original)(make(as_function(cls, original)))
            setattr(wrapper, MARK, original)
            setattr(cls, name, wrapper)


def _all(base: type) -> Iterator[type]:
    """A class and its subclasses, each once."""
    found: dict[type, None] = {base: None}
    unread = [base]
    while unread:
        below: list[type] = type.__subclasses__(unread.pop())
        for cls in below:
            if cls not in found:
                found[cls] = None
                unread.append(cls)
    return iter(found)


def _restore(cls: type, name: str) -> None:
    found = cls.__dict__.get(name)
    original = getattr(found, MARK, None)
    # A wrapper around ours shows our mark too, but what it wraps is ours.
    if found is not None and original is not None and found.__wrapped__ is original:
        setattr(cls, name, original)

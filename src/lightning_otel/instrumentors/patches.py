"""Functions in the place of methods, and back; no library is imported for it."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, Final

from lightning_otel import capture

MARK: Final = "__lightning_otel_wrapped__"


class _ImportFinder:
    """Hands hooks over to wrapt when the program imports the first of their libraries.

    wrapt imports asyncio: a third of the start of a program that calls no model.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Callable[[ModuleType], object], ...]] = {}
        self._lock = threading.RLock()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks:
            return None
        capture.guard_call(self.hand_over)
        return find_spec(name) if name not in self.hooks else None

    def hand_over(self) -> None:
        import wrapt

        # Each library leaves once wrapt has its hooks: a thread that imports it meanwhile waits
        # here. The finder itself stays, as others may be walking through the list it stands in.
        with self._lock:
            for library in list(self.hooks):
                for hook in self.hooks[library]:
                    wrapt.register_post_import_hook(hook, library)
                del self.hooks[library]


_waiting: Final = _ImportFinder()


def when_imported(library: str, function: Callable[[str], object]) -> None:
    """Call a function with a library's name once the program has imported it."""

    def hook(module: ModuleType) -> None:
        capture.guard_call(function, module.__name__)

    _waiting.hooks[library] = (*_waiting.hooks.get(library, ()), hook)
    if "wrapt" in sys.modules:
        _waiting.hand_over()
    elif _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)


def as_function(owner: Any, original: Any) -> Any:
    """Return a method as a function that takes its owner first.

    Another tool's wrapper, such as wrapt's, may take the instance for the first argument.
    """
    # By its very type: wrapt's wrappers say that they are what they wrap.
    if type(original) in (FunctionType, classmethod, staticmethod):
        return original
    if not isinstance(owner, type):
        return original

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(self, type(self))(*args, **kwargs)

    return method


def walk_wrapped(function: Any) -> Iterator[Any]:
    """A function, what it wraps, and so on; a wrapper shows our mark if ours is beneath it."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def subclasses_of(owner: type) -> Iterator[type]:
    """A class's subclasses, those of any depth."""
    classes: list[type] = type.__subclasses__(owner)
    for subclass in classes:
        yield subclass
        yield from subclasses_of(subclass)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Put a function in the place of a method; return False if ours stands there already."""
    original = inspect.getattr_static(owner, name)
    if getattr(original, MARK, None) is not None:
        return False
    wrapper = functools.wraps(original)(make(as_function(owner, original)))
    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper)
    return True


def restore(owner: Any, name: str) -> bool:
    """Put the original method back; False where a wrapper stands before ours, which must stay."""
    method = owner.__dict__.get(name)
    original = getattr(method, MARK, None) if not hasattr(method, "__self__") else None
    # A wrapper around ours shows our mark too, but what it wraps is ours.
    if original is None or method.__wrapped__ is not original:
        return False
    setattr(owner, name, original)
    return True

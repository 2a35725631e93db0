"""Methods of a base class in all its subclasses, those of the program included.

They are replaced where each class defines them, because a library's abstract methods hold nothing
to replace.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.library import LibraryInstrumentor
from lightning_otel.instrumentors.patching import subclasses_of

Make = Callable[[Any], Any]


def wrap_family(
    instrumentor: LibraryInstrumentor,
    base: Any,
    methods: Mapping[str, Make],
    is_left_out: Callable[[type], bool] = lambda cls: False,
) -> Callable[[], None]:
    """Wrap methods in a class and its subclasses: those there are, and those to come.

    Args:
        instrumentor: Puts them back.
        base: The class; its own methods too, unless they are abstract.
        methods: By name what gives the function that is to stand there.
        is_left_out: Whether a class keeps its methods.

    Returns:
        A function that leaves those to come alone again.
    """

    def adopt(cls: type) -> None:
        for name, make in methods.items():
            original: Any = cls.__dict__.get(name)
            # Another tool's wrapper of wrapt's says that it is a function, too.
            is_own = isinstance(original, FunctionType) and not is_left_out(cls)
            if is_own and not getattr(original, "__isabstractmethod__", False):
                instrumentor.wrap(cls, name, make)

    hook = base.__dict__.get("__init_subclass__")

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807  # the name of the hook
        if hook is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            hook.__func__(cls, **kwargs)
        capture.guarded(adopt, cls)

    def leave() -> None:
        if hook is not None:
            base.__init_subclass__ = hook
        elif "__init_subclass__" in base.__dict__:
            del base.__init_subclass__

    for cls in (base, *subclasses_of(base)):
        adopt(cls)
    base.__init_subclass__ = classmethod(__init_subclass__)
    return leave

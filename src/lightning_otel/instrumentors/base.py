"""The base of instrumentors: on a library's import, it replaces methods; it restores them."""

import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any, ClassVar, TypeAlias

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # not in its __all__

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.patches import (
    MARK,
    replace,
    restore,
    subclasses_of,
    walk_wrapped,
)
from lightning_otel.instrumentors.wrappers import Begin, Make, WrappedRun, wrap_call, wrap_generator

Patch: TypeAlias = Callable[[ModuleType], None]

_everywhere: set[type] = set()
"""The instrumentors that were switched on for every call."""


class LibraryInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # the base class is untyped
    """Switches the capture of one library on and off.

    Attributes:
        requires: The releases it is tested with, as requirements.
        is_active: Whether it is on. Under another tool's wrapper our function stays; so each
            asks this first, and passes everything through when it is off.
    """

    requires: ClassVar[Collection[str]]
    is_active = False

    def __init__(self) -> None:
        # The base class makes one instance of each class and hands it out again and again.
        if not hasattr(self, "_imported"):
            self._imported: dict[str, ModuleType] = {}
            self._is_hooked = False
            self._wrapped: list[tuple[Any, str]] = []
            self._families: list[tuple[Any, Any, Any]] = []

    @abstractmethod
    def patches(self) -> Mapping[str, Patch]:
        """By module what to do with it once it is imported: :meth:`wrap` some of its methods."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The releases this is tested with."""
        return self.requires

    def instrument(self, **kwargs: Any) -> Any:
        """Switch on: for every call, or with ``only_in_recordings`` for those within recordings."""
        # Here, because the base class passes over a second call: a recording may have come first.
        if not kwargs.get("only_in_recordings"):
            _everywhere.add(type(self))
            capture.process.is_global = True
            capture.watch_starts()
        return super().instrument(**kwargs)

    def innermost(self) -> operations.Operation | None:
        """Return the framework's innermost operation, of what it carries in a way of its own."""

    def is_wanted(self) -> bool:
        """Return whether a call here and now should become a span."""
        return self.is_active and capture.is_wanted()

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an owner's own method by the plain function that ``make`` makes of it."""
        if replace(owner, name, make):
            self._wrapped.append((owner, name))

    def wrap_calls(self, owner: Any, begin: Begin, *names: str) -> None:
        """Make each wanted call of some methods, plain or coroutine ones, a run."""
        for name in names:
            self.wrap(owner, name, wrap_call(self.if_wanted(begin)))

    def wrap_steps(self, owner: Any, begin: Begin, *names: str) -> None:
        """Make each wanted generator of some methods a run."""
        for name in names:
            self.wrap(owner, name, wrap_generator(self.if_wanted(begin)))

    def if_wanted(self, begin: Begin) -> Begin:
        """Begin only what should become a span here and now."""

        def begin_wanted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WrappedRun | None:
            return begin(args, kwargs) if args and self.is_wanted() else None

        return begin_wanted

    def if_active(self, begin: Begin) -> Begin:
        """Begin only while this is switched on."""

        def begin_active(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WrappedRun | None:
            return begin(args, kwargs) if args and self.is_active else None

        return begin_active

    def wrap_past(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap a method too where another tool wrapped the inherited one in a subclass."""
        bare = {id(item) for item in walk_wrapped(owner.__dict__[name]) if not hasattr(item, MARK)}
        for subclass in subclasses_of(owner):
            method = subclass.__dict__.get(name)
            is_past = method is not None and not hasattr(method, MARK)
            if is_past and any(id(item) in bare for item in walk_wrapped(method)):
                self.wrap(subclass, name, make)

    def wrap_family(
        self,
        base: Any,
        methods: Mapping[str, Make],
        is_left_out: Callable[[type], bool] = lambda cls: False,
    ) -> None:
        """Wrap abstract methods where present and future subclasses define them."""

        def adopt(cls: type) -> None:
            for name, make in methods.items():
                original: Any = cls.__dict__.get(name)
                # Another tool's wrapper of wrapt's says that it is a function, too.
                is_own = isinstance(original, FunctionType) and not is_left_out(cls)
                if is_own and not getattr(original, "__isabstractmethod__", False):
                    self.wrap(cls, name, make)

        hook = base.__dict__.get("__init_subclass__")

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807  # the hook's name
            if hook is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                hook.__func__(cls, **kwargs)
            if self.is_active:
                capture.guard_call(adopt, cls)

        for cls in (base, *subclasses_of(base)):
            adopt(cls)
        if all(family is not base for family, *_ in self._families):
            ours = classmethod(__init_subclass__)
            base.__init_subclass__ = ours
            self._families.append((base, hook, ours))

    def _instrument(self, **kwargs: Any) -> None:
        self.is_active = True
        capture.refresh_settings()
        if type(self).innermost is not LibraryInstrumentor.innermost:
            capture.process.frameworks = {**capture.process.frameworks, self.innermost: None}
        if self._is_hooked:
            for module_name, module in list(self._imported.items()):
                self._patch_if_active(module_name, module)
        else:
            self._is_hooked = True
            for module_name in self.patches():
                imported = sys.modules.get(module_name)
                is_half = getattr(getattr(imported, "__spec__", None), "_initializing", False)
                if imported is not None and is_half and module_name in kwargs.get("parts", ()):
                    self._imported[module_name] = imported
                    continue
                # Bound here: a module's own ``__name__`` may be another's, as CrewAI's are.
                patch = functools.partial(self._patch_if_active, module_name)
                wrapt.register_post_import_hook(patch, module_name)

    def _uninstrument(self, **kwargs: Any) -> None:
        self.is_active = False
        _everywhere.discard(type(self))
        hooks = capture.process.frameworks
        capture.process.frameworks = {item: None for item in hooks if item != self.innermost}
        capture.process.is_global = bool(_everywhere)
        self._wrapped = [(owner, name) for owner, name in self._wrapped if not restore(owner, name)]
        self._families = [family for family in self._families if not _restore_hook(*family)]

    def patch_imported(self, module_name: str) -> None:
        """Patch a module that was half imported as this was switched on."""
        if module_name in self._imported:
            self._patch_if_active(module_name, self._imported[module_name])

    def _patch_if_active(self, module_name: str, module: ModuleType) -> None:
        self._imported[module_name] = module
        if self.is_active:
            capture.guard_call(self.patches()[module_name], module)


def _restore_hook(base: Any, hook: Any, ours: Any) -> bool:
    """Put a class's own hook back; False where another tool's stands before ours, and calls it."""
    if base.__dict__.get("__init_subclass__") is not ours:
        return False
    if hook is None:
        del base.__init_subclass__
    else:
        base.__init_subclass__ = hook
    return True

"""LangChain's and LangGraph's runs as spans: chains, models, tools, retrievers, agents, graphs.

A handler in every callback manager reports the runs. Methods around code of the program are
replaced, so that its spans nest and cancelled runs end. ``langchain_core`` is never imported.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.config import is_enabled
from lightning_otel.errors import warn_once
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.langchain import models, runs
from lightning_otel.instrumentors.langchain.handler import Handler
from lightning_otel.instrumentors.wrappers import Make, wrap_call, wrap_generator
from lightning_otel.types import conventions as c

_MODELS: Final = "langchain_core.language_models"
_METHODS: Final[tuple[Any, ...]] = (
    (f"{_MODELS}.chat_models", "BaseChatModel", wrap_call(models.begin_chat),
     "_generate_with_cache", "_agenerate_with_cache"),
    (f"{_MODELS}.chat_models", "BaseChatModel", wrap_call(models.note_cache_hit),
     "_convert_cached_generations"),
    (f"{_MODELS}.chat_models", "BaseChatModel", wrap_generator(models.begin_stream(c.CHAT)),
     "stream", "astream"),
    (f"{_MODELS}.chat_models", "BaseChatModel", wrap_generator(models.begin_events),
     "_iter_v2_events", "_aiter_v2_events"),
    (f"{_MODELS}.llms", "BaseLLM", wrap_call(models.begin_completion),
     "_generate_helper", "_agenerate_helper"),
    (f"{_MODELS}.llms", "BaseLLM", wrap_generator(models.begin_stream(c.TEXT_COMPLETION)),
     "stream", "astream"),
    ("langchain_core.tools.base", "BaseTool", wrap_call(runs.begin_place), "run", "arun"),
    ("langchain_core.retrievers", "BaseRetriever", wrap_call(runs.begin_place),
     "invoke", "ainvoke"),
)  # fmt: skip
"""Module, class, replacement and the methods that it stands for."""


class LangChainInstrumentor(LibraryInstrumentor):
    """Switches capture on and off: ``is_everywhere``, or only of objects that were wrapped."""

    requires = ("langchain-core >= 1.4",)
    is_everywhere = False

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self, "_handlers"):
            self._handlers: list[weakref.ref[Handler]] = []
            self._everywhere: Handler | None = None
            self._config: ContextVar[Any] = ContextVar("no-config", default=None)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of what is replaced."""
        methods = {name: functools.partial(self._patch_methods, name) for name, *_ in _METHODS}
        return methods | {
            "langchain_core.callbacks.base": self._patch_managers,
            "langchain_core.runnables.base": self._patch_events,
            "langchain_core.runnables.config": self._patch_config,
            "langgraph._internal._runnable": self._patch_graph_config,
        }

    def is_wanted(self) -> bool:
        """Return whether a run that starts here, below no other, should become a span."""
        return self.is_everywhere and self.is_active and capture.is_wanted()

    def innermost(self) -> operations.Operation | None:
        """Return the operation of the run that LangChain's own variable names."""
        config = self._config.get(None)
        run = _run_of(config) if config else None
        return None if run is None else operations.operation_of(run.context)

    def handler_for_one(self) -> Handler:
        """A handler for one object, whose runs are captured while it lives."""
        handler = make_handler(_is_wanted_of_one)
        self._handlers = [reference for reference in self._handlers if reference() is not None]
        self._handlers.append(weakref.ref(handler))
        if not self.is_active:
            super()._instrument()
        return handler

    def _instrument(self, **kwargs: Any) -> None:
        self.is_everywhere = True
        super()._instrument(**kwargs)

    def _uninstrument(self, **kwargs: Any) -> None:
        self.is_everywhere = False
        super()._uninstrument(**kwargs)
        if any(reference() is not None for reference in self._handlers):
            super()._instrument()

    def _replace(self, owner: Any, make: Make, *names: str) -> None:
        for name in names:
            # Some are LangChain's own affair: a release without one loses no more than that one.
            if name in vars(owner):
                capture.guard_call(self.wrap, owner, name, make)

    def _patch_methods(self, at: str, module: ModuleType) -> None:
        for home, owner, make, *names in _METHODS:
            if home == at:
                self._replace(getattr(module, owner), make, *names)

    def _patch_managers(self, module: ModuleType) -> None:
        if self._everywhere is None:
            self._everywhere = make_handler(self.is_wanted)
        self._replace(module.BaseCallbackManager, self._with_handler, "__init__")

    def _with_handler(self, original: Any) -> Any:
        handler = self._everywhere

        def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its name
            original(manager, *args, **kwargs)
            if not self.is_everywhere:
                return
            # A chain of three steps makes 26 managers: those of others have it, and that of a run
            # for its children is empty only until it is given the run's.
            handlers, inheritable = manager.handlers, manager.inheritable_handlers
            if handlers:
                if inheritable and handlers[0] is handler and inheritable[0] is handler:
                    return
            elif runs.find(manager.parent_run_id) is not None:
                return
            capture.guard_call(self._inject, manager)

        return __init__

    def _inject(self, manager: Any) -> None:
        if not capture.is_wanted() or type(manager).__name__.endswith("GraphCallbackManager"):
            return
        handler = self._everywhere
        # New lists: those that were given may be the program's own. And first among the handlers,
        # since one of the program's may raise.
        handlers, inheritable = manager.handlers, manager.inheritable_handlers
        if not handlers or handler not in handlers:
            manager.handlers = [handler, *handlers]
        if not inheritable or handler not in inheritable:
            manager.inheritable_handlers = [handler, *inheritable]

    def _patch_events(self, module: ModuleType) -> None:
        # It begins the run in a task; the first version's waits for the run, and cancels nothing.
        begin = wrap_generator(runs.begin_events)
        self._replace(module, begin, "_astream_events_implementation_v2")

    def _patch_config(self, module: ModuleType) -> None:
        self._replace(module, _within_run, "_set_config_context")
        self._config = module.var_child_runnable_config

    def _patch_graph_config(self, module: ModuleType) -> None:
        self._replace(module, _within_run, "_set_config_context")


def make_handler(is_wanted: Callable[[], bool]) -> Handler:
    """A handler of LangChain's own kind; LangChain must be there."""
    base = sys.modules["langchain_core.callbacks.base"].BaseCallbackHandler
    kind: type[Handler] = type("LightningHandler", (Handler, base), {})
    return kind(is_wanted)


def _within_run(original: Any) -> Any:
    """LangChain's own: it is called in a copy of the context, in which code of a run will run."""

    def _set_config_context(config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(config, *args, **kwargs)
        run = capture.guard_call(_run_of, config)
        if run is not None:
            # Never undone: the copy is thrown away with all that was attached in it.
            otel_context.attach(run.context)
        return result

    return _set_config_context


def _run_of(config: Any) -> runs.LangChainRun | None:
    return runs.find(getattr(config.get("callbacks"), "parent_run_id", None))


def _is_wanted_of_one() -> bool:
    """Return True, as an object traced by itself always makes spans; warn where none is kept."""
    is_kept = capture.current_frame() is not None or not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )
    if not is_kept and is_enabled():
        warn_once(
            "a run of a wrapped object was not recorded; name a store: "
            "wrap_langchain(agent, store=…), or record with auto_trace()"
        )
    return True

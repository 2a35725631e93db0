"""``auto_trace`` and ``context``: where a rollout begins and ends, and what is known of it."""

import copy
import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any, Final, TypeVar, Unpack, overload
from uuid import UUID

from lightning_otel import config
from lightning_otel.adapter.agent_patterns import check_patterns, resources_text
from lightning_otel.errors import warn_once
from lightning_otel.instrumentors.wrappers import Begin
from lightning_otel.store.transforms import check_transforms
from lightning_otel.tracing.blocks import Block, is_function, operation
from lightning_otel.tracing.propagation import carried
from lightning_otel.tracing.recording import Recording
from lightning_otel.tracing.scope import STAMPS, Options, RewardEvaluator, Scope
from lightning_otel.types.values import check_types

__all__ = [
    "Options",
    "Recording",
    "RewardEvaluator",
    "Scope",
    "Traced",
    "auto_trace",
    "carried",
    "context",
    "operation",
]

F = TypeVar("F", bound=Callable[..., Any])

_KINDS: Final = {
    **Options.__annotations__,
    **dict.fromkeys(STAMPS, str | int | UUID | None),
    "track_only": str | Iterable | None,
    "transforms": Iterable | None,
}
"""The types of options: ids may be of several; patterns and transforms are checked one by one."""


class Traced(Block[Recording]):
    """Begins a rollout, or a part of one, for each entering and each call."""

    def __init__(self, verb: str, options: Options, *, has_root: bool = True) -> None:
        for name in options.keys() - Options.__annotations__.keys():
            raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}")
        check_types(options, _KINDS)
        tracked, resources = options.get("track_only"), options.get("resources")
        if tracked is not None:
            options["track_only"] = check_patterns(tracked)  # an iterator lasts for one entering
        transforms = options.get("transforms")
        if transforms is not None:
            options["transforms"] = check_transforms(list(transforms))
        if resources is not None:
            resources_text(resources)  # refused here, and never in the program's midst
            options["resources"] = copy.deepcopy(resources)

        unused = [verb]  # not on self: a circle would put off the warning

        def begin_for(function: Any) -> Begin:  # evaluated for each block: a cheap type
            unused.clear()
            name = options.get("name") or str(getattr(function, "__qualname__", "rollout"))
            return lambda args, kwargs: Scope(options, name, has_root=has_root)

        super().__init__(begin_for)
        self._unused = unused

    def __del__(self) -> None:
        """Warn, once, of a block that was made and never entered: it recorded nothing."""
        for verb in getattr(self, "_unused", ()):
            if config.is_enabled():
                warn_once(
                    f"{verb}() was never entered, so it recorded nothing; write: with {verb}():"
                )


def _spells_out_options(function: F) -> F:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in Options.__annotations__.items()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*parameters, *options])
    return function


@overload
def auto_trace(function: F, /, **options: Unpack[Options]) -> F: ...


@overload
def auto_trace(function: None = None, /, **options: Unpack[Options]) -> Traced: ...


@_spells_out_options
def auto_trace(function: Any = None, /, **options: Unpack[Options]) -> Any:
    """Record a rollout, as a context manager or a decorator, bare or with arguments.

    Model calls, agents, tools and what is emitted inside become spans under one root span, stored
    as they end. Concurrent ones are rollouts of their own; a nested one is a part of the outer
    rollout, unless it names a rollout of its own. Under ``lightning-otel run`` one that names a
    task is a rollout of its own, and another is a part of the program's; where the run itself names
    its rollout, task or evaluator, all are.

    Args:
        function: The function to record, where this stands as a bare decorator.
        **options: ``name`` of the rollout's operation; ``store`` (a :class:`Store` or a path);
            ``rollout_id`` and ``attempt_id``; ``task``, any JSON value; ``agent``, who acts where
            the code does not say; ``track_only``, the agents whose calls become training
            data, each by name, glob or regular expression (``re:^exec``); ``resource_version`` of
            the prompt, model or weights at work; ``mode``, such as ``train``, ``val`` or ``test``;
            or ``resources``, by name, glob or ``re:…`` of agents the version of each resource,
            such as ``{"planner": {"prompt": "v3"}}``; ``conversation_id``; ``reward_evaluator``,
            applied to the finished recording, maybe async; ``transforms``, functions that each
            span passes through before it is written: each gets a span, as it starts and as it
            ends, and returns the one to keep, or None; ``enable_retokenization_fix`` asks
            vLLM-like servers for token ids and logprobs, off by default; ``apply`` makes requests
            with the agent's live resources (``docs/resources.md``), off by default
            (``"published"`` does so where the store has published some, unless the block around
            or ``LIGHTNING_OTEL_APPLY`` decides); ``debug`` tells on stderr what is kept and what
            is not, and why, as long as the recording lasts.

    Returns:
        A context manager and decorator; or the decorated function.

    Raises:
        ConfigError: A pattern of agents is no valid regular expression, the resources are not of
            that form, or a transform is no function.
    """
    if function is not None and not is_function(function):
        raise TypeError(f"auto_trace() takes a function, or keywords such as name={function!r}")
    traced = Traced("auto_trace", options)
    return traced if function is None else traced(function)


@_spells_out_options
def context(**options: Unpack[Options]) -> Traced:
    """Name what goes on in a block, such as its rollout or agent, without a root span of its own.

    Args:
        **options: As for :func:`auto_trace`. What is not named stays as it is outside.

    Raises:
        ConfigError: As for :func:`auto_trace`.
    """
    return Traced("context", options, has_root=False)

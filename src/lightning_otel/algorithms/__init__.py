"""Algorithms: they learn from rollouts, over libraries that do the optimising.

A member is a class with :class:`BaseAlgorithm`'s methods, registered under the entry point group
``lightning_otel.algorithms``. Members do not know each other, and import their libraries when they
run.
"""

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.adapter.rows import rows_of, token_advantages
from lightning_otel.algorithms.base import BaseAlgorithm, Batch, StepResult, name_of, unknown_option
from lightning_otel.dataset.registry import Registry
from lightning_otel.errors import ConfigError
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from lightning_otel.algorithms.options import Backend
    from lightning_otel.algorithms.run import Run
    from lightning_otel.algorithms.run import Run as Context

_REGISTRY: Final = Registry("algorithm", "lightning_otel.algorithms", str.lower)

_ALSO: Final = {"supervisedfinetuning": "sft"}
"""Other names that users know an algorithm by."""
_VERL: Final = (
    "VERL trains in processes of its own: algorithms.verl.register() gives it an agent loop, see "
    "docs/training.md; Trainer(…, 'verl', backend='microsoft') is Agent Lightning's"
)

__all__ = [
    "BaseAlgorithm",
    "Batch",
    "Context",
    "Run",
    "StepResult",
    "get",
    "make_algorithm",
    "make_backend_algorithm",
    "name_of",
    "names",
    "rows_of",
    "token_advantages",
]


def __getattr__(name: str) -> Any:
    if name in ("Context", "Run"):  # which needs SQLAlchemy
        from lightning_otel.algorithms.run import Run

        return Run
    # What is written small is a module of this folder.
    names = {*_ALSO, *_REGISTRY.points()}
    if name.islower() or name.startswith("_") or name.lower() not in names:
        hint = f"; {_VERL}" if name == "VERL" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return get(name)


def names() -> list[str]:
    """Return the algorithms that are installed, ours first."""
    return _REGISTRY.names()


def get(name: str) -> type[BaseAlgorithm]:
    """Return the algorithm of a name, in any case: ``"apo"``, ``"GRPO"``.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
    """
    if name.lower() == "verl" and "verl" not in _REGISTRY.points():
        raise ConfigError(_VERL)
    member = _REGISTRY.load(_ALSO.get(name.lower(), name))
    if not (isinstance(member, type) and callable(getattr(member, "run", None))):
        raise ConfigError(
            f"the algorithm {name!r} is {member!r}; register a class made of BaseAlgorithm"
        )
    return member


def make_algorithm(
    algorithm: str | type[BaseAlgorithm] | BaseAlgorithm, **options: Any
) -> BaseAlgorithm:
    """Make an algorithm of its name or class; configure an instance."""
    check_types({"algorithm": algorithm}, make_algorithm.__annotations__)
    if isinstance(algorithm, str):
        algorithm = get(algorithm)
    if isinstance(algorithm, type):
        parameters = signature(algorithm).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in options.keys() - parameters.keys():
                raise unknown_option(algorithm, name, (), "those of the training")
        try:
            return algorithm(**options)
        except TypeError as exc:
            raise ConfigError(
                f"{algorithm.__name__} cannot be made of {options!r:.200}: {exc}; see its options"
            ) from exc
    if options:
        algorithm.configure(**options)
    return algorithm


def make_backend_algorithm(algorithm: Any, backend: "Backend", **options: Any) -> BaseAlgorithm:
    """Make an algorithm of ours, or of Agent Lightning's.

    ``auto`` takes Agent Lightning's where that is installed, fits and accepts the options; else it
    logs the reason.
    """
    if backend == "builtin":
        return make_algorithm(algorithm, **options)
    from lightning_otel.algorithms.exchange import choose_backend, explain_missing
    from lightning_otel.algorithms.microsoft import NAMES, Microsoft

    is_ours = isinstance(algorithm, (BaseAlgorithm, type))
    is_unknown = isinstance(algorithm, str) and algorithm.lower() not in NAMES
    unfit = f"Agent Lightning has no algorithm {algorithm!r}" if is_ours or is_unknown else ""
    if backend == "auto" and not unfit and not explain_missing():
        unfit = Microsoft(algorithm, **options).find_fault()
    if choose_backend(backend, unfit=unfit) == "builtin":
        return make_algorithm(algorithm, **options)
    return Microsoft(algorithm, **options)

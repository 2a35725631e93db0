"""Algorithms: what learns from rollouts, one member each, over libraries that do the optimising.

A member is a class with :class:`BaseAlgorithm`'s methods and registers under the entry point group
``lightning_otel.algorithms``, as anybody's does. Members do not know each other, and import what
they need when they run.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.algorithms.base import BaseAlgorithm, Batch, Context, StepResult, name_of
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.microsoft import Backend

GROUP: Final = "lightning_otel.algorithms"

__all__ = [
    "BaseAlgorithm",
    "Batch",
    "Context",
    "StepResult",
    "backed",
    "get",
    "made",
    "name_of",
    "names",
]


def __getattr__(name: str) -> Any:
    """An installed algorithm by its class: ``from lightning_otel.algorithms import APO``."""
    # What is written small is a module of this folder.
    if name.islower() or name.startswith("_") or name.lower() not in _found():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return get(name)


def names() -> list[str]:
    """The algorithms that are installed, ours first."""
    found = _found()
    return sorted(found, key=lambda name: (not _is_ours(found[name]), name))


def get(name: str) -> type[BaseAlgorithm]:
    """The algorithm of a name, in any case: ``"apo"``, ``"GRPO"``.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
    """
    from difflib import get_close_matches

    found = _found()
    wanted = name.lower()
    if wanted not in found:
        near = get_close_matches(wanted, found, n=1)
        guess = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}"
        raise ConfigError(f"no algorithm {name!r}; {guess}")
    try:
        member = found[wanted].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"the algorithm {name!r} cannot be loaded ({exc}); install what {found[wanted].value} "
            "needs"
        ) from exc
    if not (isinstance(member, type) and callable(getattr(member, "run", None))):
        raise ConfigError(
            f"the algorithm {name!r} is {member!r}; register a class made of BaseAlgorithm"
        )
    return member


def made(algorithm: "str | type[BaseAlgorithm] | BaseAlgorithm", **options: Any) -> BaseAlgorithm:
    """An algorithm by its name, its class, or as it is.

    Args:
        algorithm: Which.
        options: Its own, where it is yet to be made.

    Raises:
        ConfigError: There is none, it does not take the options, or it is made already.
    """
    if isinstance(algorithm, str):
        algorithm = get(algorithm)
    if isinstance(algorithm, type):
        try:
            return algorithm(**options)
        except TypeError as exc:
            raise ConfigError(
                f"{algorithm.__name__} cannot be made of {options!r:.200}: {exc}; see its options"
            ) from exc
    if options:
        raise ConfigError(
            f"unknown options {', '.join(options)}; give those of an algorithm that is made "
            f"already to {type(algorithm).__name__}(…) itself"
        )
    return algorithm


def backed(algorithm: Any, backend: "Backend", **options: Any) -> BaseAlgorithm:
    """An algorithm, run by us or by Agent Lightning.

    Args:
        algorithm: As :func:`made` takes it; or of Agent Lightning's, one of its names, or one that
            is made.
        backend: Who is to run it; ``auto`` is Agent Lightning where it is installed, fits and has
            that algorithm, and says why where it is not.
        options: Its own, where it is yet to be made.

    Raises:
        ConfigError: There is none, or the backend cannot be used.
    """
    if backend == "builtin":
        return made(algorithm, **options)
    from lightning_otel.algorithms.microsoft import NAMES, Microsoft
    from lightning_otel.microsoft import backend_of

    is_ours = isinstance(algorithm, (BaseAlgorithm, type))
    is_unknown = isinstance(algorithm, str) and algorithm.lower() not in NAMES
    unfit = f"Agent Lightning has no algorithm {algorithm!r}" if is_ours or is_unknown else ""
    if backend_of(backend, unfit=unfit).name == "builtin":
        return made(algorithm, **options)
    return Microsoft(algorithm, **options)


def _found() -> dict[str, EntryPoint]:
    # Whoever takes one of our names has said that he wants his.
    points = sorted(entry_points(group=GROUP), key=_is_ours, reverse=True)
    return {point.name.lower(): point for point in points}


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith(f"{__name__}.")

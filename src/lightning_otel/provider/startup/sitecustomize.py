"""Switches tracing on in every Python process under ``lightning-otel run``.

``run`` puts this folder first on ``PYTHONPATH``, so Python imports this file as it starts. Whatever
happens here, the program starts as it would have; a ``sitecustomize`` of its own still runs.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_here = str(Path(__file__).resolve().parent)


def _run_shadowed() -> None:
    """Run the ``sitecustomize`` that would have been found without us."""
    # A relative path is none of ours, and cannot be resolved where the working directory is gone.
    elsewhere = [
        path
        for path in sys.path
        if path and not (Path(path).is_absolute() and str(Path(path).resolve()) == _here)
    ]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _start() -> None:
    try:
        from lightning_otel.provider import start_run_child
    except ImportError as exc:
        sys.stderr.write(
            f"lightning-otel: {sys.executable} cannot import lightning_otel ({exc}), "
            "so this process is not traced; install it there\n"
        )
        return
    start_run_child()


try:
    _start()
finally:
    _run_shadowed()

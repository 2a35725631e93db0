"""The task of ``examples/training/apo.py``, whose model, agent and tasks the tests use."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[3] / "examples" / "training"


def desk() -> ModuleType:
    """The example as a module; nothing is run."""
    return load_example("apo")


def load_example(name: str) -> ModuleType:
    """An example of ``examples/training`` as a module; nothing is run."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

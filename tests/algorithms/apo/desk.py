"""The task of ``examples/training/apo.py``, whose model, agent and tasks the tests use."""

import importlib.util
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).parents[3] / "examples" / "training" / "apo.py"


def desk() -> ModuleType:
    """The example as a module; nothing is run."""
    spec = importlib.util.spec_from_file_location("apo_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The package as it is imported: its names, what it costs, its errors."""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

import lightning_otel
from lightning_otel import errors
from lightning_otel.types import conventions

HEAVY = ("openai", "duckdb", "torch", "starlette", "opentelemetry.sdk", "wrapt", "rich", "click")
EXTRA = """
import sys; sys.modules['sqlalchemy'] = None; import lightning_otel
try: lightning_otel.{}
except lightning_otel.ConfigError as exc: print(str(exc).rpartition("; ")[2])
"""
SCRIPTS = {
    "the bare import pulls in nothing but the standard library, and none of our own rooms": (
        "import sys; before = set(sys.modules); import lightning_otel; "
        "new = set(sys.modules) - before; "
        "print([n for n in new if n.split('.')[0] not in sys.stdlib_module_names])",
        "['lightning_otel']",
    ),
    "what a traced program names at its start pulls in none of the heavy libraries": (
        "import sys; from lightning_otel import auto_trace, context, operation, emit_reward, "
        "Store, Recording, TripletAdapter, Span; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
        "[]",
    ),
    "where wrapt cannot be had, the program goes on without its calls": (
        "import sys, lightning_otel as l; from lightning_otel.provider import switch_on; "
        "switch_on('openai'); assert 'wrapt' not in sys.modules; sys.modules['wrapt'] = None; "
        "import logging; logging.disable(); import openai; print(openai.__name__)",
        "openai",
    ),
    "completion sees every public name from the start, and the version": (
        "import lightning_otel; print(dir(lightning_otel))",
        str(sorted([*lightning_otel.__all__, "__version__"])),
    ),
    "types and adapter do not import what shows them": (
        "import sys, lightning_otel.types, lightning_otel.adapter\n"
        "print('lightning_otel.types.html' in sys.modules)",
        "False",
    ),
    "without the extra, agents, bases of algorithms and Agent Lightning's stores are there": (
        "import sys; sys.modules['sqlalchemy'] = None; from lightning_otel import BaseAlgorithm, "
        "LitAgent, Router, StepResult, rollout; from lightning_otel.agl import LightningStore; "
        "print(LightningStore.__name__)",
        "LightningStore",
    ),
    **{
        f"without its extra, {name} says what to install": (
            EXTRA.format(name), "pip install 'lightning-otel[learn]'"
        )
        for name in ("Trainer", "Queue", "Resources", "State", "run_workers")
    },
}  # fmt: skip
ERRORS = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)
]


@pytest.mark.pain(11)
@pytest.mark.parametrize("name", SCRIPTS)
def test_import_is_light(run_python: Callable[..., str], name: str) -> None:
    """A script prints what it should, and nothing on stderr."""
    script, printed = SCRIPTS[name]

    assert run_python(script).strip() == printed


def test_every_public_name_resolves_to_its_home() -> None:
    """Each name of ``__all__`` is there, is one and the same each time, and has documentation."""
    found: dict[str, Any] = {}
    exec("from lightning_otel import *", found)

    assert sorted(found.keys() - {"__builtins__"}) == lightning_otel.__all__
    assert sorted(lightning_otel.__all__) == lightning_otel.__all__
    for name in lightning_otel.__all__:
        assert getattr(lightning_otel, name) is found[name]
        assert found[name].__name__ == name
        assert inspect.getdoc(found[name])
    with pytest.raises(AttributeError, match="'lightning_otel' has no attribute 'emit_rewards'"):
        lightning_otel.emit_rewards  # noqa: B018
    assert lightning_otel.__version__ == version("lightning-otel")


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_say_what_why_and_what_to_do(kind: type[errors.LightningOtelError]) -> None:
    """Each error is ours, and takes its message apart for a person to read."""
    error, bare = kind("cannot open /x: no such file; name another place; or make it"), kind("no")

    assert isinstance(error, errors.LightningOtelError)
    assert error.what == "cannot open /x: no such file"
    assert error.why == (
        "reading never creates a store" if kind is errors.StoreMissingError else ""
    )
    assert error.remedy == "name another place; or make it"
    assert (bare.what, bare.remedy) == ("no", "")


def test_convention_keys_are_each_named_once() -> None:
    """No two names stand for one attribute key or span name."""
    keys = {
        name: value
        for name, value in vars(conventions).items()
        if name.isupper() and isinstance(value, str) and "." in value
    }

    assert len(set(keys.values())) == len(keys)
    assert set(conventions.BODY_KEYS) <= conventions.CONTENT_KEYS <= set(keys.values())
    assert len(keys) > 80

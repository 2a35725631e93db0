"""The package as it is imported: its names, what it costs, its errors."""

import inspect
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

import lightning_otel
from lightning_otel import conventions, errors

HEAVY = ("openai", "duckdb", "torch", "starlette", "opentelemetry.sdk", "wrapt", "rich", "click")


def in_new_process(script: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.pain(11)
def test_import_is_light() -> None:
    """The bare import pulls in nothing but the standard library, and none of our own rooms."""
    script = (
        "import sys; before = set(sys.modules); import lightning_otel; "
        "new = set(sys.modules) - before; "
        "print([n for n in new if n.split('.')[0] not in sys.stdlib_module_names])"
    )

    assert in_new_process(script) == "['lightning_otel']"


def test_import_of_a_library_waited_for_never_fails_for_us() -> None:
    """Where wrapt cannot be had, the program goes on without its calls."""
    script = (
        "import sys, lightning_otel as l; from lightning_otel.provider import switch_on; "
        "switch_on('openai'); assert 'wrapt' not in sys.modules; sys.modules['wrapt'] = None; "
        "import logging; logging.disable(); import openai; print(openai.__name__)"
    )

    assert in_new_process(script) == "openai"


def test_recording_names_are_light_too() -> None:
    """What a traced program names at its start pulls in none of the heavy libraries."""
    script = (
        "import sys; from lightning_otel import *; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    names = "auto_trace, context, operation, emit_reward, Store, Recording, TripletAdapter, Span"

    assert in_new_process(script.replace("import *", f"import {names}")) == "[]"


def test_every_public_name_resolves_to_its_home() -> None:
    """Each name of ``__all__`` is there, is one and the same each time, and has documentation."""
    assert sorted(lightning_otel.__all__) == lightning_otel.__all__
    for name in lightning_otel.__all__:
        found = getattr(lightning_otel, name)
        assert found is getattr(lightning_otel, name)
        assert found.__name__ == name
        assert inspect.getdoc(found)


def test_star_import_gives_exactly_the_public_names() -> None:
    """``from lightning_otel import *`` works although names are made when they are used."""
    found: dict[str, Any] = {}

    exec("from lightning_otel import *", found)

    assert sorted(found.keys() - {"__builtins__"}) == lightning_otel.__all__


def test_dir_lists_names_that_were_not_used_yet() -> None:
    """Completion sees every public name from the start, and the version."""
    script = "import lightning_otel; print(dir(lightning_otel))"

    assert in_new_process(script) == str(sorted([*lightning_otel.__all__, "__version__"]))


def test_unknown_attribute_is_an_attribute_error() -> None:
    """A misspelt name fails as for any module."""
    with pytest.raises(AttributeError, match="'lightning_otel' has no attribute 'emit_rewards'"):
        lightning_otel.emit_rewards  # noqa: B018
    assert not hasattr(lightning_otel, "nothing")


def test_version_is_the_packages() -> None:
    """The version in the code is the one that was installed."""
    assert lightning_otel.__version__ == version("lightning-otel")


ERRORS = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_say_what_why_and_what_to_do(kind: type[errors.LightningOtelError]) -> None:
    """Each error is ours, and takes its message apart for a person to read."""
    error = kind("cannot open /x: no such file; name another place; or make it")

    assert isinstance(error, errors.LightningOtelError)
    assert error.what == "cannot open /x: no such file"
    assert error.why == inspect.cleandoc(kind.__doc__ or "").splitlines()[0]
    assert error.remedy == "name another place; or make it"


def test_error_without_a_remedy_has_none() -> None:
    """A message of one part says what failed, and nothing of what to do."""
    error = errors.StoreError("cannot open /x")

    assert (error.what, error.remedy) == ("cannot open /x", "")


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


@pytest.mark.parametrize("name", ["Trainer", "Queue", "Resources", "State", "run_workers"])
def test_a_name_whose_extra_is_missing_names_the_extra(name: str) -> None:
    """Without SQLAlchemy, what needs it says what to install, not that a module is missing."""
    script = (
        "import sys; sys.modules['sqlalchemy'] = None; import lightning_otel\n"
        f"try: lightning_otel.{name}\n"
        "except lightning_otel.ConfigError as exc: print(exc)"
    )

    assert in_new_process(script).endswith("; pip install 'lightning-otel[learn]'")

"""What every instrumentor does alike."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wrapt

from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch


class Greeting(LibraryInstrumentor):
    """Of two modules that are made for the test."""

    requires = ("greeting >= 1",)

    def patches(self) -> Mapping[str, Patch]:
        return {"greeting": self._patch, "greeting_later": self._patch}

    def _patch(self, module: ModuleType) -> None:
        self.wrap_family(module.Host, {"greet": self._louder})

    def _louder(self, original: Any) -> Any:
        def greet(self_: Any) -> str:
            said = str(original(self_))
            return said.upper() if self.is_active else said

        return greet


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Greeting]:
    """The instrumentor, with its library importable and not imported."""
    for name in ("greeting", "greeting_later"):
        (tmp_path / f"{name}.py").write_text(
            "class Host:\n    def greet(self):\n        return 'hello'\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield Greeting()
    Greeting().uninstrument()
    Greeting._instance = None
    for name in ("greeting", "greeting_later"):
        sys.modules.pop(name, None)


def imported(name: str) -> Any:
    return __import__(name)


def test_library_with_another_shape_is_left_alone(
    library: Greeting, faults_allowed: None, tmp_path: Path
) -> None:
    """A release without the method imports and works, untraced."""
    (tmp_path / "greeting_later.py").write_text("class Host:\n    pass\n")

    library.instrument(skip_dep_check=True, only_in_recordings=True)

    assert imported("greeting_later").Host is not None


def test_library_is_patched_by_the_name_it_was_imported_by(library: Greeting) -> None:
    """A module may carry another's ``__name__`` by then, as several of CrewAI's do."""
    module = imported("greeting")
    module.__name__ = "another.module"

    library.instrument(skip_dep_check=True, only_in_recordings=True)

    assert module.Host().greet() == "HELLO"


def test_method_that_another_tool_wrapped_before_is_still_called_as_one(library: Greeting) -> None:
    """A wrapper of wrapt's binds its instance itself, which an unbound call would not let it."""
    host = imported("greeting").Host
    seen: list[object] = []

    def note(wrapped: Any, instance: object, args: Any, kwargs: Any) -> Any:
        seen.append((instance, args))
        return wrapped(*args, **kwargs)

    host.greet = wrapt.FunctionWrapper(host.greet, note)
    before = host.__dict__["greet"]
    one = host()

    library.instrument(skip_dep_check=True, only_in_recordings=True)

    assert one.greet() == "HELLO"
    assert seen == [(one, ())]
    library.uninstrument()
    assert host.__dict__["greet"] is before


def test_hook_that_another_tool_put_after_ours_stays(library: Greeting) -> None:
    """Ours stays beneath it, for it may call ours: idle while it is off, and once when on again."""
    library.instrument(skip_dep_check=True, only_in_recordings=True)
    host = imported("greeting").Host
    ours, seen = host.__init_subclass__, []

    def note(cls: type, **kwargs: Any) -> None:
        seen.append(cls.__name__)
        ours.__func__(cls, **kwargs)

    host.__init_subclass__ = classmethod(note)

    def said() -> str:
        return str(type("Late", (host,), {"greet": lambda self: "hello"})().greet())

    found = [said()]
    library.uninstrument()
    found.append(said())
    library.instrument(skip_dep_check=True, only_in_recordings=True)
    found.append(said())
    library.uninstrument()

    assert found == ["HELLO", "hello", "HELLO"]
    assert seen == ["Late"] * 3

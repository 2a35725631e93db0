"""Fixtures for pytest: ``pytest_plugins = ["lightning_otel.testing.fixtures"]`` in ``conftest.py``.

As a plugin that pytest finds by itself, every test run would import it.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from lightning_otel.testing.capture import Captured
from lightning_otel.testing.capture import captured as capturing
from lightning_otel.testing.server import ScriptedServer
from lightning_otel.testing.server import scripted_server as serving


@pytest.fixture
def captured() -> Iterator[Captured]:
    """Capture the test's agents, in memory."""
    with capturing() as got:
        yield got


@pytest.fixture
def scripted_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedServer]]:
    """A function that starts a scripted model, to which new ``openai`` clients talk by default."""
    with contextlib.ExitStack() as stack:

        def start(script: object) -> ScriptedServer:
            server = stack.enter_context(serving(script))  # type: ignore[arg-type]  # checked there
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
            return server

        yield start

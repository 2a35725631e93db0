"""Servers of scripts."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from lightning_otel.testing import ScriptedServer, scripted_server


@pytest.fixture
def server_of() -> Iterator[Callable[..., ScriptedServer]]:
    """A function that starts a server of a script."""
    with contextlib.ExitStack() as stack:
        yield lambda script: stack.enter_context(scripted_server(script))

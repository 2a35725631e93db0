"""The command line in this process, by the entry point that installs it."""

import contextlib
import io
import json
import os
import sys
from importlib.metadata import entry_points
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

from lightning_otel import Store

(_COMMAND,) = entry_points(group="console_scripts", name="lightning-otel")


def invoke(*args: object) -> CompletedProcess[str]:
    """Run the command as it is, with streams like those of a pipe."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    argv = sys.argv
    sys.argv = ["lightning-otel", *map(str, args)]
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            _COMMAND.load()()
    except SystemExit as exc:
        code = exc.code
    finally:
        sys.argv = argv
    texts = []
    for stream in (out, err):
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        texts.append(buffer.getvalue().decode())
    assert isinstance(code, int)
    return CompletedProcess(list(map(str, args)), code, *texts)


def forget_settings(patch: pytest.MonkeyPatch) -> None:
    """Forget what the developer's shell sets for us, OpenTelemetry or OpenAI."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "LIGHTNING_OTEL", "OPENAI_")) or name == "TRACEPARENT":
            patch.delenv(name)


class Finding(NamedTuple):
    """A line of ``doctor``."""

    code: str
    level: str
    text: str
    remedy: str


def examine(store: Store) -> list[Finding]:
    done = invoke("doctor", "--json", "--store", store.name)
    return [Finding(**row) for row in json.loads(done.stdout)]

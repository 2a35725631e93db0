"""Settings from the environment: defaults, spellings, and nonsense that stops nothing."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import config

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@pytest.mark.parametrize(
    ("environment", "is_enabled"),
    [
        ({}, True),
        ({"LIGHTNING_OTEL": ""}, True),
        ({"LIGHTNING_OTEL": "1"}, True),
        ({"LIGHTNING_OTEL": "ON"}, True),
        ({"LIGHTNING_OTEL": "0"}, False),
        ({"LIGHTNING_OTEL": " False "}, False),
        ({"LIGHTNING_OTEL": "off"}, False),
        ({"OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "LIGHTNING_OTEL": "1"}, False),
        ({"OTEL_SDK_DISABLED": "false"}, True),
    ],
    ids=str,
)
def test_is_enabled_unless_either_switch_is_off(
    environment: dict[str, str], is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture runs unless our switch or OpenTelemetry's is off, in any usual spelling."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert config.is_enabled() is is_enabled


@pytest.mark.parametrize("value", ["/data/x.duckdb", "relative", "~/traces", ":memory:"])
def test_store_path_is_the_environments(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIGHTNING_OTEL_STORE`` names the store as it is written."""
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", value)

    assert config.store_path() == value


@pytest.mark.parametrize("value", [None, ""])
def test_store_path_defaults_to_the_working_directory(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, or with it empty, the store is ``.lightning/`` here."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    if value is not None:
        monkeypatch.setenv("LIGHTNING_OTEL_STORE", value)

    assert config.store_path() == ".lightning/traces.duckdb"


@pytest.mark.parametrize(
    ("content", "export", "is_kept", "is_exported"),
    [
        ("", "", True, False),
        ("", "1", True, True),
        ("", "0", True, False),
        ("NO_CONTENT", "1", False, False),
        ("event_only", "", False, False),
        ("false", "", False, False),
        ("SPAN_ONLY", "", True, True),
        ("SPAN_AND_EVENT", "0", True, True),
        ("true", "", True, True),
        ("nonsense", "", True, False),
    ],
)
def test_content_goes_where_the_user_says(
    content: str, export: str, is_kept: bool, is_exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is kept and stays here, unless the conventions' variable or ours says otherwise."""
    monkeypatch.setenv(CONTENT, content)
    monkeypatch.setenv("LIGHTNING_OTEL_EXPORT_CONTENT", export)

    assert config.content() == config.Content(is_kept=is_kept, is_exported=is_exported)


@pytest.mark.parametrize(
    ("value", "names"),
    [("", ()), ("duckdb", ("duckdb",)), (" duckdb , ,otlp,", ("duckdb", "otlp")), (",", ())],
)
def test_traces_exporters_are_named_in_order(
    value: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is read with its blanks and gaps."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)

    assert config.traces_exporters() == names


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "http/protobuf",
        ),
    ],
    ids=str,
)
def test_otlp_protocol_of_traces_goes_first(
    environment: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable for traces counts more than the one for all signals."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert config.otlp_protocol() == protocol


@pytest.mark.parametrize(
    ("environment", "inherited"),
    [
        ({}, None),
        ({"LIGHTNING_OTEL_ROLLOUT_ID": ""}, None),
        ({"LIGHTNING_OTEL_ATTEMPT_ID": "2"}, None),
        ({"LIGHTNING_OTEL_ROLLOUT_ID": "r1"}, ("r1", "1")),
        ({"LIGHTNING_OTEL_ROLLOUT_ID": "r1", "LIGHTNING_OTEL_ATTEMPT_ID": "2"}, ("r1", "2")),
    ],
    ids=str,
)
def test_inherited_rollout_needs_its_id(
    environment: dict[str, str],
    inherited: tuple[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rollout id makes an inherited rollout; its attempt is the first unless said."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert config.inherited_rollout() == inherited


@pytest.mark.parametrize("python_path", [None, "", "/a:/b"])
def test_child_environment_is_what_a_child_inherits(
    python_path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``run`` hands its child is what the child's settings read, and nothing is lost."""
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)

    child = config.child_environment(
        store="/s.duckdb",
        rollout_id="r1",
        attempt_id="2",
        trace_parent="00-a-b-01",
        startup=Path("/startup"),
    )

    assert child["KEPT"] == "as it was"
    assert child["PYTHONPATH"] == ("/startup:/a:/b" if python_path else "/startup")
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert config.is_run_child()
    assert config.store_path() == "/s.duckdb"
    assert config.inherited_rollout() == ("r1", "2")
    assert config.inherited_trace_parent() == "00-a-b-01"
    assert config.inherited_agent() is None


@pytest.mark.parametrize(("outer", "inner", "heard"), [
    (None, "bob", "bob"), ("alice", "bob", "bob"), ("alice", None, "alice"), ("", None, None),
])  # fmt: skip
def test_child_environment_names_who_acts(
    outer: str | None, inner: str | None, heard: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own ``--agent`` reaches its child, else that of a run around it."""
    if outer is not None:
        monkeypatch.setenv("LIGHTNING_OTEL_RUN_AGENT", outer)

    child = config.child_environment(
        store="/s.duckdb", rollout_id="r1", attempt_id="2", trace_parent="00-a-b-01",
        startup=Path("/startup"), agent=inner,
    )  # fmt: skip

    monkeypatch.setenv("LIGHTNING_OTEL_RUN_AGENT", child.get("LIGHTNING_OTEL_RUN_AGENT", ""))
    assert config.inherited_agent() == heard


@pytest.mark.parametrize(
    ("name", "read", "default"),
    [
        ("LIGHTNING_OTEL", config.is_enabled, True),
        ("OTEL_SDK_DISABLED", config.is_enabled, True),
        ("LIGHTNING_OTEL_RUN", config.is_run_child, False),
        ("LIGHTNING_OTEL_EXPORT_CONTENT", config.content, config.Content(True, False)),
        (CONTENT, config.content, config.Content(True, False)),
    ],
)
def test_nonsense_takes_the_default_with_one_warning(
    name: str,
    read: Callable[[], Any],
    default: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A value that is none of those known is named once, with those known, and left aside."""
    monkeypatch.setenv(name, "perhaps")

    found = [read() for _ in range(3)]

    (record,) = caplog.records
    assert found == [default] * 3
    assert record.levelno == logging.WARNING
    assert name in record.getMessage()
    assert "'perhaps'" in record.getMessage()


PROGRAM = """
import logging

warnings = []

class Count(logging.Handler):
    def emit(self, record):
        warnings.append(record.name)

logging.getLogger().addHandler(Count(logging.WARNING))
import lightning_otel as lo

@lo.auto_trace
def double(number):
    lo.emit_message("inside")
    return number * 2

print([double(1), double(2)], len([name for name in warnings if name.startswith("lightning")]))
print(len(warnings))
"""


@pytest.mark.parametrize(
    ("environment", "warned", "others"),
    [
        ({"LIGHTNING_OTEL": "perhaps"}, 1, 0),
        ({"LIGHTNING_OTEL_STORE": "clickhouse://nowhere"}, 1, 0),
        ({"LIGHTNING_OTEL_STORE": "/dev/null/store"}, 1, 0),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "abc"}, 1, 0),
        ({"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "-3"}, 1, 0),
        ({"OTEL_PROPAGATORS": "nonsense"}, 1, 0),
        ({"OTEL_TRACES_SAMPLER": "nonsense"}, 0, 1),
        ({"OTEL_RESOURCE_ATTRIBUTES": "nonsense"}, 0, 1),
        ({"OTEL_PYTHON_CONTEXT": "nonsense"}, 0, 1),
        ({"OTEL_PYTHON_TRACER_PROVIDER": "nonsense"}, 1, 1),
        (
            {
                "OTEL_TRACES_EXPORTER": "nonsense",
                "TRACEPARENT": "nonsense",
                "LIGHTNING_OTEL_ROLLOUT_ID": "half \udcff a character",
                "LIGHTNING_OTEL_ATTEMPT_ID": "second",
            },
            0,
            0,
        ),
    ],
    ids=str,
)
def test_program_starts_whatever_the_environment_says(
    environment: dict[str, str], warned: int, others: int, tmp_path: Path
) -> None:
    """Nonsense of ours or of OpenTelemetry's stops no program, and costs one warning of ours."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.stdout == f"[2, 4] {warned}\n{warned + others}\n"
    assert done.returncode == 0

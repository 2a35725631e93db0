"""Settings from the environment: defaults, spellings, and nonsense that stops nothing."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_otel as lo
from lightning_otel import config
from lightning_otel.cli.program import child_environment

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def exported(value: str) -> dict[str, str]:
    return {"LIGHTNING_OTEL_EXPORT_CONTENT": value}


HERE = config.Content(is_kept=True, is_exported=False)
NOWHERE = config.Content(is_kept=False, is_exported=False)
OUT = config.Content(is_kept=True, is_exported=True)
STORE = "LIGHTNING_OTEL_STORE"
ROLLOUT, ATTEMPT = "LIGHTNING_OTEL_ROLLOUT_ID", "LIGHTNING_OTEL_ATTEMPT_ID"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def protocol() -> str | None:
    found = config.otlp_endpoint("http://127.0.0.1:4318")
    return found and found.protocol


CASES: list[tuple[Callable[[], Any], dict[str, str], Any]] = [
    (config.is_enabled, {}, True),
    (config.is_enabled, {"LIGHTNING_OTEL": ""}, True),
    (config.is_enabled, {"LIGHTNING_OTEL": "1"}, True),
    (config.is_enabled, {"LIGHTNING_OTEL": "ON"}, True),
    (config.is_enabled, {"LIGHTNING_OTEL": "0"}, False),
    (config.is_enabled, {"LIGHTNING_OTEL": " False "}, False),
    (config.is_enabled, {"LIGHTNING_OTEL": "off"}, False),
    (config.is_enabled, {"OTEL_SDK_DISABLED": "true"}, False),
    (config.is_enabled, {"OTEL_SDK_DISABLED": "TRUE", "LIGHTNING_OTEL": "1"}, False),
    (config.is_enabled, {"OTEL_SDK_DISABLED": "false"}, True),
    (config.STORE.read, {STORE: "/data/x.duckdb"}, "/data/x.duckdb"),
    (config.STORE.read, {STORE: "~/traces"}, "~/traces"),
    (config.STORE.read, {STORE: ":memory:"}, ":memory:"),
    (config.STORE.read, {STORE: ""}, ".lightning/traces.duckdb"),
    (config.content, {}, HERE),
    (config.content, exported("1"), OUT),
    (config.content, exported("0"), HERE),
    (config.content, {CONTENT: "NO_CONTENT", **exported("1")}, NOWHERE),
    (config.content, {CONTENT: "event_only"}, NOWHERE),
    (config.content, {CONTENT: "false"}, NOWHERE),
    (config.content, {CONTENT: "SPAN_ONLY"}, OUT),
    (config.content, {CONTENT: "SPAN_AND_EVENT", **exported("0")}, OUT),
    (config.content, {CONTENT: "true"}, OUT),
    (config.content, {CONTENT: "nonsense"}, HERE),
    (config.exporters, {"OTEL_TRACES_EXPORTER": ""}, ()),
    (config.exporters, {"OTEL_TRACES_EXPORTER": " duckdb , ,otlp,"}, ("duckdb", "otlp")),
    (protocol, {}, "http/protobuf"),
    (protocol, {PROTOCOL: "grpc"}, "grpc"),
    (protocol, {PROTOCOL: "grpc", TRACES_PROTOCOL: "http/protobuf"}, "http/protobuf"),
    (config.wants_otlp, {}, False),
    (config.wants_otlp, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
    (config.wants_otlp, {"OTEL_TRACES_EXPORTER": "duckdb, otlp"}, True),
    (config.wants_otlp, {"OTEL_TRACES_EXPORTER": "duckdb"}, False),
    (config.wants_otlp, ENDPOINT, True),
    (config.wants_otlp, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
    (config.wants_otlp, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
    (config.inherited_rollout, {ROLLOUT: ""}, None),
    (config.inherited_rollout, {ATTEMPT: "2"}, None),
    (config.inherited_rollout, {ROLLOUT: "r1"}, ("r1", "1")),
    (config.inherited_rollout, {ROLLOUT: "r1", ATTEMPT: "2"}, ("r1", "2")),
]


@pytest.mark.parametrize(("read", "environment", "expected"), CASES)
def test_setting_is_what_the_environment_says(
    read: Callable[[], Any],
    environment: dict[str, str],
    expected: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In any usual spelling, else the default."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert read() == expected


@pytest.mark.parametrize(("outer", "inner", "heard"), [
    (None, "bob", "bob"), ("alice", "bob", "bob"), ("alice", None, "alice"), ("", None, None),
])  # fmt: skip
def test_child_environment_is_what_a_child_inherits(
    outer: str | None, inner: str | None, heard: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``run`` hands its child is what the child's settings read, and nothing is lost."""
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.setenv("PYTHONPATH", "/a:/b" if inner else "")
    if outer is not None:
        monkeypatch.setenv("LIGHTNING_OTEL_RUN_AGENT", outer)

    child = child_environment(
        store="/s.duckdb", rollout_id="r1", attempt_id="2", trace_parent="00-a-b-01",
        startup=Path("/startup"), agent=inner,
    )  # fmt: skip

    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert child["KEPT"] == "as it was"
    assert child["PYTHONPATH"] == ("/startup:/a:/b" if inner else "/startup")
    assert config.RUN.read()
    assert config.STORE.read() == "/s.duckdb"
    assert config.inherited_rollout() == ("r1", "2")
    assert config.TRACE_PARENT.read() == "00-a-b-01"
    assert (config.RUN_AGENT.read() or None) == heard


@pytest.mark.parametrize(
    ("name", "read", "default"),
    [
        ("LIGHTNING_OTEL", config.is_enabled, True),
        ("OTEL_SDK_DISABLED", config.is_enabled, True),
        ("LIGHTNING_OTEL_RUN", config.RUN.read, False),
        ("LIGHTNING_OTEL_EXPORT_CONTENT", config.content, HERE),
        (CONTENT, config.content, HERE),
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


def test_a_former_switch_is_named_once_with_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it forbade to store is not stored."""
    monkeypatch.setenv("LIGHTNING_OTEL_COLLECT", "off")

    for _ in range(2):
        with lo.auto_trace(store=tmp_path / "s.duckdb"):
            lo.emit_message("hello")

    (record,) = caplog.records
    assert record.getMessage().startswith("LIGHTNING_OTEL_COLLECT is gone: ")
    assert "LIGHTNING_OTEL=0" in record.getMessage()
    assert not any(tmp_path.iterdir())


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
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 1, 0),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, 0, 1),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": ".5"},
            1,
            0,
        ),
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

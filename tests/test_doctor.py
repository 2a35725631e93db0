"""What ``doctor`` finds: rival instrumentors, settings, stores that are not as they should be."""

import os
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from tests.acting import act
from tests.command import Finding, examine
from tests.forwarding.collector import Endpoint, Reply
from tests.manifests import seal_manifest

from lightning_otel import Store, auto_trace

BASE = """
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
class I(BaseInstrumentor):
    made = 0
    def __init__(self):
        type(self).made += 1
    def instrumentation_dependencies(self):
        return ()
    def _instrument(self, **settings):
        pass
    _uninstrument = _instrument
"""


@pytest.fixture
def recorded(store: Store) -> Store:
    """A store with two spans, one of them an action."""
    act(store)
    store.writer().seal()
    return store


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes it look as if a package were installed, with an instrumentor in a module."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def add(name: str, version: str, module: str = "", code: str = "class I: pass") -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if module:
            (folder / "entry_points.txt").write_text(
                f"[opentelemetry_instrumentor]\nopenai = {module}:I\n"
            )
            (site / f"{module}.py").write_text(code)
            sys.modules.pop(module, None)

    return add


def found_at(store: Store, level: str) -> list[Finding]:
    return [finding for finding in examine(store) if finding.level == level]


def test_examine_finds_nothing_wrong(recorded: Store, install: Callable[..., None]) -> None:
    """A sound store in a sound installation gives no problem and no note, nor has memory any."""
    install("opentelemetry-instrumentation-flask", "1", "no_rival")

    found = examine(recorded)
    with auto_trace(store=recorded):
        open_spans = examine(recorded)

    assert {finding.level for finding in found} == {"ok"}
    assert {finding.level for finding in examine(Store(":memory:"))} == {"ok"}
    assert metadata.version("openai") in found[0].text
    assert ": 2 spans, of which incomplete: 0" in found[-1].text
    assert ": 3 spans, of which incomplete: 1" in open_spans[-1].text


@pytest.mark.parametrize(
    "names",
    [
        ["opentelemetry-instrumentation-openai"], ["opentelemetry-instrumentation-openai-v2"],
        ["opentelemetry_instrumentation_genai_openai"], ["openinference-instrumentation-openai"],
        ["OpenInference-instrumentation-langchain"], ["opentelemetry-instrumentation-anthropic"],
        ["openinference-instrumentation-openai", "opentelemetry-instrumentation-openai"],
    ],
)  # fmt: skip
def test_examine_names_each_foreign_instrumentor(
    recorded: Store, install: Callable[..., None], names: list[str]
) -> None:
    """Each of another family is named, however it is spelt, with what becomes of its spans."""
    for number, name in enumerate(names):
        install(name, "9.9", f"foreigner_{number}")

    notes = found_at(recorded, "note")

    assert [note.text.split(" is installed")[0] for note in notes] == [
        f"{name.lower().replace('_', '-')} 9.9" for name in names
    ]
    assert all("stays one transition" in note.text for note in notes)
    assert all(
        note.remedy.endswith("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=openai") for note in notes
    )
    assert found_at(recorded, "problem") == []


def test_examine_knows_which_is_active(recorded: Store, install: Callable[..., None]) -> None:
    """An instrumentor that the process has switched on is told apart, and is not made anew."""
    install("openinference-instrumentation-openai", "2", "an_active_one", BASE)
    active = import_module("an_active_one").I()
    (before,) = found_at(recorded, "note")
    active.instrument(skip_dep_check=True)

    (note,) = found_at(recorded, "note")

    assert "is installed, and active under" in before.text
    assert "is active in this process" in note.text
    assert (note.remedy, type(active).made) == ("", 1)


@pytest.mark.parametrize("code", ["import not_there_at_all", "None.x", "1 + 'a'"])
@pytest.mark.pain(16)
def test_examine_finds_an_instrumentor_that_breaks(
    recorded: Store, install: Callable[..., None], code: str
) -> None:
    """One that cannot be imported is skipped in silence by others; here it is named, with why."""
    install("opentelemetry-instrumentation-openai-v2", "2.4b0", "broken_rival", code)

    assert any("2.4b0 cannot be imported" in each.text for each in found_at(recorded, "problem"))


def test_examine_finds_a_pre_release_of_httpx(
    recorded: Store, install: Callable[..., None]
) -> None:
    """A pre-release of httpx 1.0 breaks openai, which nobody would guess."""
    install("httpx", "1.0.dev3")

    (found,) = found_at(recorded, "problem")

    assert "httpx 1.0.dev3" in found.text
    assert found.remedy == "pip install 'httpx<1'"


@pytest.mark.parametrize(
    ("name", "value", "level", "word"),
    [
        ("LIGHTNING_OTEL", "0", "problem", "switched off"),
        ("OTEL_SDK_DISABLED", "true", "problem", "switched off"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT", "problem", "empty"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "event_only", "problem", "empty"),
        ("LIGHTNING_OTEL_EXPORT_CONTENT", "1", "note", "messages are sent out with spans"),
    ],
)
def test_examine_finds_what_a_setting_does(
    recorded: Store, monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str, word: str
) -> None:
    """A variable that stops recording or empties it is named with how to unset it."""
    monkeypatch.setenv(name, value)

    (found,) = found_at(recorded, level)

    assert word in found.text
    assert level == "note" or name in found.remedy


@pytest.mark.parametrize(
    ("exporters", "status", "said"),
    [
        ("", 200, [("ok", "spans are also sent out by OTLP (http/protobuf) to ")]),
        ("otlp,duckdb", 200, [("ok", "spans are also sent out by OTLP")]),
        ("otlp", 200, [("problem", "opentelemetry-instrument sends no span"), ("ok", "spans")]),
        ("", 503, [("problem", "no span is sent by OTLP (http/protobuf) to ")]),
        ("none", 200, []),
    ],
)
def test_examine_tells_what_is_sent(
    recorded: Store, exporters: str, status: int, said: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A tick stands for an endpoint that answers and a program that sends, and for nothing else."""
    endpoint = Endpoint()
    endpoint.reply = lambda spans, size: Reply(status)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporters)

    found = [each for each in examine(recorded) if each.code == "otlp"]
    endpoint.close()

    assert [each.level for each in found] == [level for level, _ in said]
    assert all(each.text.startswith(text) for each, (_, text) in zip(found, said, strict=True))


def _lose_file(layout: Any) -> None:
    Store(layout.catalogue).settle()
    next(layout.data.glob("spans-*.parquet")).unlink()


# Mocked twice: only root can give files away, and root may write everywhere.
DAMAGES = {
    "others read": (lambda layout, patch: layout.root.chmod(0o755), 1,
                    "others may read {0.root} (mode 755)", "chmod 700 {0.root}"),
    "others write": (lambda layout, patch: layout.catalogue.parent.chmod(0o770), 1,
                     "others may put another store", "chmod go-w {0.catalogue.parent}"),
    "sticky": (lambda layout, patch: layout.catalogue.parent.chmod(0o1777), 0, "", ""),
    "another's": (lambda layout, patch: patch.setattr(os, "geteuid", lambda: os.getuid() + 1), 4,
                  "{0.root} belongs to another user", "name a store of your own with --store"),
    "read-only": (
        lambda layout, patch: patch.setattr(os, "access", lambda path, mode: path != layout.live),
        1, "{0.live} is not writable", "chmod u+rwx {0.live}"),
    "file gone": (lambda layout, patch: _lose_file(layout), 1, "data file spans-",
                  "restore it in {0.data}"),
    "rubbish": (lambda layout, patch: layout.manifest_path.write_text("rubbish"), 1,
                "{0.manifest_path} is damaged", ""),
    "newer": (lambda layout, patch: layout.manifest_path.write_bytes(seal_manifest([], schema=99)),
              1, "{0.catalogue}", "pip install --upgrade"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_examine_finds_what_is_wrong_with_a_store(
    recorded: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each is a problem with its remedy, and none a crash."""
    act, count, text, remedy = DAMAGES[name]
    layout = recorded.layout
    act(layout, monkeypatch)  # type: ignore[no-untyped-call]  # functions of a table

    found = found_at(recorded, "problem")

    assert len(found) == count
    for each in found[:1]:
        assert text.format(layout) in each.text
        assert remedy.format(layout) in each.remedy


def test_examine_finds_a_place_where_no_store_can_be(tmp_path: Path) -> None:
    """Beneath a file no store can be made."""
    (tmp_path / "file").write_text("")

    (found,) = found_at(Store(tmp_path / "file" / "deeper" / "traces.duckdb"), "problem")

    assert found.text == f"{tmp_path / 'file'} is no folder"


def test_examine_notes_losses(recorded: Store) -> None:
    """What was lost or damaged is counted before and after it is settled."""
    layout = recorded.layout
    (segment,) = layout.segments()
    with segment.open("ab") as file:
        file.write(b'{"record":"count","lost":5}\nhalf a line\n')

    before = recorded.accounting()
    recorded.settle()
    after = recorded.accounting()

    assert before == after
    assert (after.rejected, after.dropped, after.missing) == ({}, {"disk": 5}, 0)
    assert [finding.text for finding in found_at(recorded, "note")] == [
        f"damaged parts in {layout.quarantine}, each with a note: 1",
        "damaged lines that were stepped over: 1",
        "not stored: 5 spans: the disk refused them",
    ]

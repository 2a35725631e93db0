"""What ``doctor`` finds: rival instrumentors, settings, stores that are not as they should be."""

import os
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

import pytest
from tests.forwarding.collector import Endpoint, Reply

from lightning_otel import Store, auto_trace, emit_message
from lightning_otel.doctor import Finding, examine
from lightning_otel.store.layout import Layout


@pytest.fixture
def recorded(store: Store) -> Store:
    """A store with two spans."""
    with auto_trace(store=store):
        emit_message("hello")
    store.writer().seal()
    return store


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes it look as if a package were installed, with an instrumentor in a module."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def add(name: str, version: str, module: str, code: str = "class I: pass") -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (folder / "entry_points.txt").write_text(
            f"[opentelemetry_instrumentor]\nopenai = {module}:I\n"
        )
        (site / f"{module}.py").write_text(code)
        sys.modules.pop(module, None)

    return add


def problems(store: Store) -> list[Finding]:
    """What is wrong."""
    return [finding for finding in examine(store) if finding.level == "problem"]


def layout_of(store: Store) -> Layout:
    """The paths of a store on disk."""
    assert store.layout is not None
    return store.layout


def test_examine_finds_nothing_wrong(recorded: Store) -> None:
    """A sound store in a sound installation gives no problem and no note."""
    found = examine(recorded)

    assert {finding.level for finding in found} == {"ok"}
    assert metadata.version("openai") in found[0].text
    assert ": 2 spans, of which incomplete: 0" in found[-1].text


def test_examine_leaves_memory_alone() -> None:
    """A store in memory has no files to look at."""
    assert {finding.level for finding in examine(Store(":memory:"))} == {"ok"}


def test_examine_counts_incomplete_spans(store: Store) -> None:
    """A span that has not ended is counted as incomplete."""
    with auto_trace(store=store):
        found = examine(store)

    assert ": 1 spans, of which incomplete: 1" in found[-1].text


@pytest.mark.parametrize(
    "name",
    [
        "opentelemetry-instrumentation-openai",
        "opentelemetry-instrumentation-openai-v2",
        "opentelemetry_instrumentation_genai_openai",
        "openinference-instrumentation-openai",
        "OpenInference-instrumentation-langchain",
        "opentelemetry-instrumentation-anthropic",
    ],
)
def test_examine_names_a_foreign_instrumentor(
    recorded: Store, install: Callable[..., None], name: str
) -> None:
    """One of another family is named, however it is spelt, with what becomes of its spans."""
    install(name, "9.9", "a_foreigner")

    (found,) = (finding for finding in examine(recorded) if finding.level == "note")

    assert found.text.startswith(f"{name.lower().replace('_', '-')} 9.9 is installed")
    assert "stays one transition" in found.text
    assert found.remedy.endswith("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=openai")
    assert problems(recorded) == []


def test_examine_names_each_foreign_instrumentor(
    recorded: Store, install: Callable[..., None]
) -> None:
    """Two of them are two notes."""
    install("opentelemetry-instrumentation-openai", "1", "first_foreigner")
    install("openinference-instrumentation-openai", "2", "second_foreigner")

    notes = [finding.text for finding in examine(recorded) if finding.level == "note"]

    assert [note.split()[0] for note in notes] == [
        "openinference-instrumentation-openai",
        "opentelemetry-instrumentation-openai",
    ]


def test_examine_knows_which_is_active(recorded: Store, install: Callable[..., None]) -> None:
    """An instrumentor that the process has switched on is told apart, and is not made anew."""
    code = (
        "from opentelemetry.instrumentation.instrumentor import BaseInstrumentor\n"
        "class I(BaseInstrumentor):\n"
        "    made = 0\n"
        "    def __init__(self):\n"
        "        type(self).made += 1\n"
        "    def instrumentation_dependencies(self):\n"
        "        return ()\n"
        "    def _instrument(self, **settings):\n"
        "        pass\n"
        "    def _uninstrument(self, **settings):\n"
        "        pass\n"
    )
    install("openinference-instrumentation-openai", "2", "an_active_one", code)
    active = import_module("an_active_one").I()
    before = [found.text for found in examine(recorded) if found.level == "note"]
    active.instrument(skip_dep_check=True)

    (note,) = (found for found in examine(recorded) if found.level == "note")

    assert "is installed, and active under" in before[0]
    assert "is active in this process" in note.text
    assert (note.remedy, type(active).made) == ("", 1)


@pytest.mark.parametrize("code", ["import not_there_at_all", "None.x", "1 + 'a'"])
@pytest.mark.pain(16)
def test_examine_finds_an_instrumentor_that_breaks(
    recorded: Store, install: Callable[..., None], code: str
) -> None:
    """One that cannot be imported is skipped in silence by others; here it is named, with why."""
    install("opentelemetry-instrumentation-openai-v2", "2.4b0", "broken_rival", code)

    found = problems(recorded)

    assert any("2.4b0 cannot be imported" in finding.text for finding in found)


def test_examine_ignores_other_instrumentors(recorded: Store, install: Callable[..., None]) -> None:
    """An instrumentor of another library is no rival."""
    install("opentelemetry-instrumentation-flask", "1", "no_rival")

    assert problems(recorded) == []


def test_examine_finds_a_pre_release_of_httpx(
    recorded: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pre-release of httpx 1.0 breaks openai, which nobody would guess."""
    folder = tmp_path / "site" / "httpx-1.0.dev3.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: httpx\nVersion: 1.0.dev3\n")
    monkeypatch.syspath_prepend(folder.parent)

    (found,) = problems(recorded)

    assert "httpx 1.0.dev3" in found.text
    assert found.remedy == "pip install 'httpx<1'"


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("LIGHTNING_OTEL", "0", "switched off"),
        ("OTEL_SDK_DISABLED", "true", "switched off"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT", "empty"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "event_only", "empty"),
    ],
)
def test_examine_finds_what_a_setting_prevents(
    recorded: Store, monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
) -> None:
    """A variable that stops recording or empties it is named with how to unset it."""
    monkeypatch.setenv(name, value)

    (found,) = problems(recorded)

    assert word in found.text
    assert name in found.remedy


def test_examine_notes_what_leaves_the_machine(
    recorded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That messages go to an OTLP endpoint is a note."""
    monkeypatch.setenv("LIGHTNING_OTEL_EXPORT_CONTENT", "1")

    found = {finding.text: finding.level for finding in examine(recorded)}

    assert found["messages are sent out with spans, as the environment asks"] == "note"


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
    recorded: Store,
    exporters: str,
    status: int,
    said: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick stands for an endpoint that answers and a program that sends, and for nothing else."""
    endpoint = Endpoint()
    endpoint.reply = lambda spans, size: Reply(status)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporters)

    found = [each for each in examine(recorded) if each.code == "otlp"]
    endpoint.close()

    assert [each.level for each in found] == [level for level, _ in said]
    assert all(each.text.startswith(text) for each, (_, text) in zip(found, said, strict=True))


def test_examine_finds_a_store_others_may_read(recorded: Store) -> None:
    """A folder open to others is a problem, for messages lie in it."""
    root = layout_of(recorded).root
    root.chmod(0o755)

    (found,) = problems(recorded)

    assert found.text == f"others may read {root} (mode 755)"
    assert found.remedy == f"chmod 700 {root}"


def test_examine_finds_a_folder_where_others_write(recorded: Store, tmp_path: Path) -> None:
    """Whoever may write in the folder above can put another store there, unless it is sticky."""
    parent = layout_of(recorded).catalogue.parent
    parent.chmod(0o770)

    (found,) = problems(recorded)
    parent.chmod(0o1777)
    sticky = problems(recorded)

    assert found.remedy == f"chmod go-w {parent}"
    assert sticky == []


def test_examine_finds_a_store_of_somebody_else(
    recorded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of another user is named; mocked, for only root can give files away."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    found = problems(recorded)

    assert len(found) == 4
    assert all("belongs to another user" in each.text for each in found)


def test_examine_finds_a_folder_it_may_not_write(
    recorded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without the right to write loses spans; mocked, for root may write everywhere."""
    live = layout_of(recorded).live
    monkeypatch.setattr(os, "access", lambda path, mode: path != live)

    (found,) = problems(recorded)

    assert found.remedy == f"chmod u+rwx {live}"


def test_examine_finds_a_place_where_no_store_can_be(tmp_path: Path) -> None:
    """Beneath a file no store can be made."""
    (tmp_path / "file").write_text("")

    (found,) = problems(Store(tmp_path / "file" / "deeper" / "traces.duckdb"))

    assert found.text == f"{tmp_path / 'file'} is no folder"


def test_examine_finds_a_missing_data_file(recorded: Store) -> None:
    """A data file that the manifest names and the disk lacks is named."""
    recorded.settle()
    layout = layout_of(recorded)
    (file,) = layout.read_manifest().live_files
    (layout.data / file.name).unlink()

    (found,) = problems(recorded)

    assert found.text.startswith(f"data file {file.name} is missing: 2 spans")
    assert f"restore it in {layout.data}" in found.remedy


@pytest.mark.parametrize(
    ("manifest", "word"),
    [("rubbish", "manifest.ndjson is damaged"), ('{"kind":"store","schema":99}', "schema 99")],
)
def test_examine_finds_an_unreadable_manifest(recorded: Store, manifest: str, word: str) -> None:
    """A manifest that is damaged or of a newer version is a problem, not a crash."""
    layout_of(recorded).manifest_path.write_text(manifest)

    (found,) = problems(recorded)

    assert word in found.text


def test_examine_notes_losses(recorded: Store) -> None:
    """What was lost or damaged is counted before and after it is settled."""
    layout = layout_of(recorded)
    (segment,) = layout.segments()
    with segment.open("ab") as file:
        file.write(b'{"record":"count","lost":5}\nhalf a line\n')

    before = recorded.accounting()
    recorded.settle()
    after = recorded.accounting()

    notes = [finding.text for finding in examine(recorded) if finding.level == "note"]
    assert before == after
    assert (after.rejected, after.dropped, after.missing) == ({}, {"disk": 5}, 0)
    assert notes == [
        f"damaged parts in {layout.quarantine}, each with a note: 1",
        "damaged lines that were stepped over: 1",
        "not stored: 5 spans: the disk refused them",
    ]

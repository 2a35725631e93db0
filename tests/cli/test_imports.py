"""``import``: files into the store, once, with every line that is none named."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from tests.command import invoke
from tests.receivers.frameworks import FORMS, RESULT, SAID, observe
from tests.receivers.requests import json_of
from tests.receivers.test_documents import stored_span
from tests.serve.serving import request_of

from lightning_otel import Store, auto_trace, emit_message, emit_reward
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

# Not from the tests' own process: what that one holds counts for what it starts, too.
MEASURED = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "lightning_otel", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def run_import(store: Path, *files: Path) -> tuple[int, str]:
    done = invoke("import", *files, "--store", store)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def lines() -> bytes:
    """Three requests of two spans, one a line, as a Collector's file exporter writes them."""
    return b"\n".join(json_of(request_of(2)) for _ in range(3)) + b"\n"


def test_score_that_changed_since_it_was_imported_is_named(tmp_path: Path) -> None:
    """Its first value stays, as spans are never written anew; unchanged it is there already."""
    file, store = tmp_path / "scores.jsonl", tmp_path / "s.duckdb"
    time = "2026-02-01T10:00:00Z"
    answer = {"id": "o1", "traceId": "t1", "type": "GENERATION", "name": "call", "input": "Q",
              "output": "A", "startTime": time, "endTime": time}  # fmt: skip
    score = {"id": "s1", "traceId": "t1", "observationId": "o1", "name": "good", "value": 0.0,
             "dataType": "NUMERIC", "timestamp": time}  # fmt: skip
    file.write_bytes(orjson.dumps(answer) + b"\n" + orjson.dumps(score))

    first, again = run_import(store, file), run_import(store, file)
    file.write_bytes(orjson.dumps(answer) + b"\n" + orjson.dumps({**score, "value": 1.0}))
    changed = run_import(store, file)

    assert (first[0], again[0], changed[0]) == (0, 0, 1)
    assert "line 2: the score is another since it was imported" in changed[1]
    (step,) = Store(store).transitions()
    assert step.reward == 0.0


@pytest.mark.parametrize("name", ["traces.json", "traces.jsonl", "traces.jsonl.gz", "traces"])
def test_import_stores_each_span_once(tmp_path: Path, lines: bytes, name: str) -> None:
    """Compressed or not, whatever it is called; the second time nothing is new."""
    file = tmp_path / name
    file.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    store = tmp_path / "s.duckdb"

    first, again = run_import(store, file), run_import(store, file)

    assert (first[0], again[0]) == (0, 0)
    assert "6 spans read, 6 new" in first[1]
    assert "6 spans read, 0 new" in again[1]
    assert len(Store(store).spans().rows()) == 6


def test_import_names_what_it_cannot_read(tmp_path: Path, lines: bytes) -> None:
    """The lines beside a bad one are read; each bad one is named with file, number and reason."""
    bad_span = orjson.loads(json_of(request_of(2)))
    bad_span["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] = "abcd"
    file = tmp_path / "traces.jsonl"
    file.write_bytes(
        lines + b"\n{torn\n" + orjson.dumps(bad_span) + b'\n{"resourceMetrics":[]}\n' + lines[:100]
    )

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 1
    assert "7 spans read, 7 new" in said
    assert f"{file}, line 5: the body is no JSON" in said
    assert f"{file}, line 6: trace id is not 16 bytes long" in said
    assert f"{file}, line 7: neither OTLP JSON nor a span of " in said
    assert f"{file}, line 8: the body is no JSON" in said


def test_import_reads_a_document_over_several_lines(tmp_path: Path) -> None:
    """A page of Agent Lightning's REST interface, printed to be read."""
    spans = [stored_span(span_id=f"{number:016x}") for number in range(1, 5)]
    file = tmp_path / "page.json"
    file.write_bytes(orjson.dumps({"items": spans, "total": 4}, option=orjson.OPT_INDENT_2))

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 0, said
    (rollout,) = Store(tmp_path / "s.duckdb").rollouts().rows()
    assert (rollout["rollout_id"], rollout["spans"]) == ("ro-1", 4)


def test_import_reads_back_what_export_wrote(tmp_path: Path) -> None:
    """Every field of every span comes back as it was; its origin says that it was read."""
    first, second, file = (tmp_path / name for name in ("1.duckdb", "2.duckdb", "spans.jsonl"))
    store = Store(first)
    with auto_trace(store=store, agent="planner", task={"q": "ünï"}):
        emit_message("hi\tthere")
        emit_reward(0.5)
    store.add(
        [
            Span(
                "1" * 32,
                "2" * 16,
                "3" * 16,
                "made",
                1_760_000_000_123_456_789,
                1_760_000_000_987_654_321,
                kind="SERVER",
                status="ERROR",
                status_message="no",
                attributes={"n": 1 << 60, "x": 0.1, "yes": True, "list": ["a"], "a\u2028b": ""},
                events=(Event("e", 1_760_000_000_555_555_555, {"k": [1, 2]}), Event("bare", 0)),
                links=(Link("4" * 32, "5" * 16, {"why": "x"}),),
                scope="some.library",
                otel_resource={"service.name": "s", "process.pid": 7},
            ),
            Span("1" * 32, "3" * 16, None, "open", 1_760_000_000_000_000_001, None),
        ]
    )
    done = invoke("export", "spans", file, "--store", store.name)
    code, said = run_import(second, file)

    def spans(path: Path, **more: str) -> list[Span]:
        found = [
            replace(span, attributes={**span.attributes, **more}) for span in Store(path).spans()
        ]
        return sorted(found, key=lambda span: span.span_id)

    assert (done.returncode, code) == (0, 0), done.stderr + said
    assert spans(second) == spans(first, **{c.RECEIVED: "import"})
    assert [each.reward for each in Store(second).transitions()] == [
        each.reward for each in store.transitions()
    ]


def test_import_keeps_what_stands_before_the_damage(tmp_path: Path, lines: bytes) -> None:
    """Of a gzip that is cut off, the lines before that are stored and the damage is named."""
    file = tmp_path / "traces.gz"
    whole = b"".join(json_of(request_of(1)) + b"\n" for _ in range(2000))
    compressed = gzip.compress(whole, 1)
    file.write_bytes(compressed[: len(compressed) // 2])

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 1
    assert "the gzip is damaged" in said
    assert 500 < len(Store(tmp_path / "s.duckdb").spans().rows()) < 1500


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}]}, "ShareGPT's"),
        ({"resourceMetrics": []}, "OTLP metrics"),
        ({"custom_id": "1", "body": {"messages": []}}, "half of a batch of requests"),
        ({"neither": 1}, ""),
    ],
)
def test_a_kind_that_is_not_read_is_said_once(
    tmp_path: Path, record: dict[str, object], kind: str
) -> None:
    """With what it seems to be, and where the kinds stand that are read."""
    file = tmp_path / "others.jsonl"
    file.write_bytes(b"".join(orjson.dumps(record) + b"\n" for _ in range(7)))

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 1
    (line,) = [line for line in said.splitlines() if "others.jsonl" in line]
    assert f"{file}: 7 × " in line
    assert (f"(it seems to be {kind}: " if kind else "another tool;") in line
    assert "import --help" in line
    assert "in all" not in said


def test_import_reads_a_zip_and_a_byte_order_mark(tmp_path: Path, lines: bytes) -> None:
    """A zip's files are read each, whatever their names; one of more than the limit is not."""
    archive = tmp_path / "export.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("../a/traces.jsonl", b"\xef\xbb\xbf" + lines)
        made.writestr("others.txt", b"no JSON\n")

    code, said = run_import(tmp_path / "s.duckdb", archive)
    limited = invoke("import", archive, "--limit", "1kB", "--store", tmp_path / "t.duckdb")

    assert code == 1
    assert "6 spans read, 6 new" in said
    assert "others.txt, line 1: the body is no JSON" in said
    assert not (tmp_path.parent / "a").exists()
    assert limited.returncode
    assert "holds more than 1 kB" in limited.stderr


def _compress(text: bytes) -> bytes:
    """Lines in a frame of Zstandard, as DuckDB writes it."""
    options = "FORMAT csv, HEADER false, QUOTE '', ESCAPE '', DELIMITER '\x01', COMPRESSION zstd"
    with tempfile.NamedTemporaryFile(suffix=".zst") as file:
        query = "COPY (SELECT unnest(?::VARCHAR[]) AS line) TO ? "
        duckdb.execute(f"{query}({options})", [text.decode().split("\n"), file.name])
        return Path(file.name).read_bytes()


def _write_csv(records: list[dict[str, Any]]) -> bytes:
    """Records as Langfuse's page writes them: what is nested is JSON, and lines may break in it."""
    text = io.StringIO()
    rows = csv.DictWriter(text, list(records[-1]), quoting=csv.QUOTE_ALL)
    rows.writeheader()
    rows.writerows(
        {name: each if isinstance(each, str) else "" if each is None else json.dumps(each, indent=1)
         for name, each in record.items()}
        for record in records
    )  # fmt: skip
    return text.getvalue().encode()


@pytest.mark.parametrize("form", ["csv", "a mark", "zstd", "a printed document", "a trace's page"])
def test_a_platforms_records_are_read_in_any_form(form: str, tmp_path: Path) -> None:
    """Rows of CSV, a byte order mark, Zstandard, a page, a saved trace: the same two calls."""
    trace = f"{1:032x}"
    records = observe(trace, FORMS["LangChain"])
    lines = b"\n".join(map(orjson.dumps, records))
    bare = [{k: v for k, v in each.items() if k != "traceId"} for each in records]
    saved = {"trace": {"id": trace, "timestamp": "2026-11-01T12:00:00Z", "name": "t", "tags": [],
                       "projectId": "p", "metadata": "{}"}, "observations": bare}  # fmt: skip
    content = {
        "csv": b"\xef\xbb\xbf" + _write_csv(records),
        "a mark": b"\xef\xbb\xbf" + lines,
        "zstd": _compress(lines),
        "a printed document": orjson.dumps({"data": records}, option=orjson.OPT_INDENT_2),
        "a trace's page": orjson.dumps(saved),
    }[form]
    file = tmp_path / "export"
    file.write_bytes(content)

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 0, said
    store = Store(tmp_path / "s.duckdb")
    first, _ = store.transitions()
    assert (first.agent, first.input_tokens, first.output_tokens) == ("agent", 3, 4)
    (row,) = store.messages()
    assert [item["content"] for item in row.messages[-2:]] == [RESULT, SAID]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_compress(b'{"a": 1}\n' * 9000)[:-9], "the zstd is cut off here"),
        ('{"a": 1}'.encode("utf-16"), "the file is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(content: bytes, reason: str, tmp_path: Path) -> None:
    """In one line, with the exit code."""
    file = tmp_path / "export"
    file.write_bytes(content)

    code, said = run_import(tmp_path / "s.duckdb", file)

    assert code == 1
    assert reason in said


def test_import_of_nothing_says_so(tmp_path: Path) -> None:
    """An empty file is no error; a file that is not there is one."""
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")

    code, said = run_import(tmp_path / "s.duckdb", empty)
    missing, _ = run_import(tmp_path / "s.duckdb", tmp_path / "nowhere")

    assert (code, missing) == (0, 2)
    assert "0 spans read, 0 new" in said


def test_s14_no_file_is_read_without_a_bound(tmp_path: Path, lines: bytes) -> None:
    """Lines without end and Parquet of dictionaries: what stands before is kept, in 1.5 GB."""
    (tmp_path / "gzip").write_bytes(gzip.compress(lines + b"\n" * 10_000_000))
    (tmp_path / "blank").write_bytes(gzip.compress(b"\n" * 10_000_000))
    (tmp_path / "yes").write_bytes(lines + b"y\n" * 10_000)
    for name, query in {
        "rows": "SELECT 1 AS a FROM range(10_000_000)",
        "words": "SELECT repeat('x', 1_000_000) AS a FROM range(9_000)",
    }.items():
        duckdb.sql(f"COPY ({query}) TO '{tmp_path / name}' (FORMAT parquet)")
    store = tmp_path / "s.duckdb"

    command = [sys.executable, "-c", MEASURED, "import", "--limit", "5MB", "--store", str(store)]
    found = {
        name: subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True)
        for name in ("gzip", "blank", "yes", "rows", "words")
    }

    assert all(int(done.stdout.split()[-1]) < 1_500_000 for done in found.values())
    assert {done.returncode for done in found.values()} == {1}
    assert len(Store(store).spans().rows()) == 6
    assert "takes over 1GB of memory; write it with" in found.pop("words").stderr
    assert all("more than 5.0 MB" in done.stderr for done in found.values())


def test_s14_a_pipe_is_refused(tmp_path: Path) -> None:
    """It might never end."""
    os.mkfifo(tmp_path / "pipe")

    code, said = run_import(tmp_path / "s.duckdb", tmp_path / "pipe")

    assert code == 2
    assert "pipe is a pipe or device" in said
    assert "save what it gives to a file" in said


@pytest.mark.parametrize("name", ["a[b]?", "[!a]*", "a'b \"c"])
def test_names_are_no_patterns(tmp_path: Path, lines: bytes, name: str) -> None:
    """A store, its database for others, what is imported and what is exported."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.json").write_bytes(lines)
    store = folder / f"{name}.duckdb"

    code, _ = run_import(store, folder / f"{name}.json")
    places = [folder / f"{name}.{kind}" for kind in ("jsonl", "parquet", "packed")]
    done = [
        invoke("export", kind, place, "--store", store).returncode
        for kind, place in zip(("spans", "spans", "duckdb"), places, strict=True)
    ]

    assert (code, done) == (0, [0, 0, 0])
    for path in (store, places[2]):
        with duckdb.connect(path, read_only=True) as con:
            assert con.sql("SELECT count(*) FROM spans").fetchall() == [(6,)]


def test_a_backslash_in_a_store_is_refused(tmp_path: Path, lines: bytes) -> None:
    """DuckDB takes it for a slash."""
    (tmp_path / "a").write_bytes(lines)

    code, said = run_import(tmp_path / "a\\b.duckdb", tmp_path / "a")

    assert code == 2
    assert "DuckDB opens no path with a backslash" in said

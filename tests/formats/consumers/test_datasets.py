"""Every format is read by ``datasets.load_dataset`` with the types it should have."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.formats.consumers.recorded import recorded

from lightning_otel import Store

datasets = pytest.importorskip("datasets")
formats = entry_points(group="lightning_otel.formats")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
TYPES = {
    "JSON": "Json(decode=True)",
    "VARCHAR": "Value('string')",
    "BOOLEAN": "Value('bool')",
    "INTEGER": "Value('int32')",
    "BIGINT": "Value('int64')",
    "DOUBLE": "Value('float64')",
    "VARCHAR[]": "List(Value('string'))",
    "INTEGER[]": "List(Value('int32'))",
    "DOUBLE[]": "List(Value('float64'))",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two tasks, four tries each."""
    return recorded(tmp_path_factory.mktemp("recorded") / "traces.duckdb")


@pytest.mark.parametrize("name", sorted(formats.names))
def test_folders_and_parquet_have_the_types_of_their_columns(
    store: Store, tmp_path: Path, name: str
) -> None:
    """Nested columns are JSON values again, and missing keys are not filled up with nulls."""
    wanted: list[dict[str, object]] = []
    store.export(name, wanted.append, credit="discounted")
    store.export(name, tmp_path / "folder", credit="discounted")
    cache = str(tmp_path / "cache")

    found = datasets.load_dataset(str(tmp_path / "folder"), split="train", cache_dir=cache)

    columns = formats[name].load().columns
    assert {key: repr(kind) for key, kind in found.features.items()} == {
        key: TYPES[kind] for key, kind in columns.items()
    }
    assert wanted
    for row, held in zip(wanted, found, strict=True):
        for key, value in held.items():
            assert value == _listed(row.get(key))


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "kto", "dpo"])
def test_rows_of_text_need_no_json_type(store: Store, tmp_path: Path, name: str) -> None:
    """Releases before 4.7 know none: messages are structures, and tools text."""
    options = {"credit": "discounted", "arguments": "text"}
    store.export(name, tmp_path / "folder", **options)
    store.export(name, tmp_path / "rows.jsonl", **options)
    cache = str(tmp_path / "cache")

    table = datasets.load_dataset(str(tmp_path / "folder"), split="train", cache_dir=cache)
    lines = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=cache
    )

    assert len(table) == len(lines) > 0
    assert "Json" not in repr(table.features)
    for one, other in zip(table, lines, strict=True):
        assert one["tools"] == other["tools"]
        assert [turn["content"] for turn in one["prompt"]] == [
            turn["content"] for turn in other["prompt"]
        ]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

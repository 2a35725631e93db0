"""``drift``: what it prints for people and for machines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra drift is not installed")
pytest.importorskip("jinja2", reason="the extra drift is not installed")

from tests.bytepairs import CHATML, PROMPT, built, record, spelled

from lightning_otel import Store
from lightning_otel.dataset.tokenizers import TransformersTokenizer, load_tokenizer

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the engine's own tokenizer."""
    return built(tmp_path_factory.mktemp("engine"), CHATML)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersTokenizer:
    """The engine's own tokenizer."""
    return load_tokenizer(str(folder))


def test_drift_command_tells_people_and_machines(
    store: Store, engine: TransformersTokenizer, folder: Path, cli: Cli
) -> None:
    """A line for each model and part, with the reasons; the same as JSON."""
    prompt = engine.encode(PROMPT)
    record(
        store,
        [prompt, prompt, []],
        [engine.encode("the answer"), spelled(engine, "the answer"), [1]],
    )
    assert store.layout is not None
    where = ("--tokenizer", folder, "--store", store.layout.catalogue)

    text = cli("drift", *where)
    found = json.loads(cli("drift", *where, "--rollout", "r1", "--json").stdout)
    lines = cli("drift", *where, "--jsonl").stdout.splitlines()

    assert text.returncode == 0
    header, prompts, responses = text.stdout.splitlines()
    assert header.split("\t") == [
        "model", "template", "part", "count", "exact", "prefix", "length", "why",
    ]  # fmt: skip
    assert prompts.split("\t")[2:5] == ["prompt", "2", "2 (100%)"]
    assert responses.split("\t")[2:5] == ["response", "2", "1 (50%)"]
    assert responses.endswith("1 × retokenisation")
    assert "1 transition without token ids to compare with" in text.stderr
    assert found["skipped"] == 1
    assert [each["exact_rate"] for each in found["drift"]] == [1.0, 0.5]
    assert [json.loads(line) for line in lines] == found["drift"]


def test_drift_command_without_ids_says_how_to_get_them(
    store: Store, folder: Path, cli: Cli
) -> None:
    """A store of text has nothing to compare, which is no error and not silent."""
    record(store, [[]], [[]])
    assert store.layout is not None

    done = cli("drift", "--tokenizer", folder, "--store", store.layout.catalogue)

    assert done.returncode == 0
    assert "--enable-retokenization-fix" in done.stderr

"""Certificates: what is found in files and certificates that were changed, splits and cards."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import draw
from tests.command import invoke
from tests.store.mutations import TASKS, certify, fill_store, list_missed
from tests.trainer.made import spans_of

from lightning_otel import Store
from lightning_otel.dataset import formats
from lightning_otel.dataset.certificate import CertificateCheck, verify
from lightning_otel.dataset.formats import Format
from lightning_otel.errors import CertificateError, ConfigError, NotFoundError


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of a hundred tasks, each tried twice, some steps without a reward."""
    return fill_store(tmp_path_factory.mktemp("certified") / "traces.duckdb")


@pytest.fixture(scope="module")
def homes(filled: Store, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Certified exports: lines, Parquet, a folder of two sides, lines of two sides."""
    return certify(filled, tmp_path_factory.mktemp("exports"))


def test_no_change_is_missed(homes: list[Path]) -> None:
    """A few hundred single changes of files and certificates of every kind."""
    chance = random.Random(7)
    found = [missed for path in homes for missed in list_missed(path, chance)]

    assert not any(found)
    assert len(found) > 250
    assert all(verdict.is_right for path in homes for verdict in verify(path))


def respell(text: bytes) -> bytes:
    """The rows as another program writes them."""
    return b"".join(json.dumps(json.loads(line)).encode() + b"\r\n" for line in text.splitlines())


def change_row(text: bytes) -> bytes:
    """Row 150 has another rollout."""
    lines = text.splitlines(keepends=True)
    lines[149] = lines[149].replace(b'"rollout_id":"r', b'"rollout_id":"q')
    return b"".join(lines)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (respell, "other bytes, and the certified rows in their order"),
        (lambda text: b"".join(text.splitlines(keepends=True)[::-1]),
         "the certified rows in another order; the first that differs is among rows 1 to 4"),
        (change_row, "200 rows for 200 certified; the first that differs is among rows 149 to 152"),
        (lambda text: text + text[: text.index(b"\n") + 1],
         "201 rows for 200 certified; the first that differs is among rows 201 to 204"),
        (lambda text: b"", "0 rows for 200 certified"),
    ],
)  # fmt: skip
def test_a_difference_is_named_and_located(
    homes: list[Path], tmp_path: Path, change: Callable[[bytes], bytes], text: str
) -> None:
    """Other bytes, another order, other rows, and where the first of them stands."""
    shutil.copytree(homes[0].parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / homes[0].name
    path.write_bytes(change(path.read_bytes()))

    assert verify(path)[0].text.startswith(text)


def test_the_command_says_right_wrong_or_nothing(
    homes: list[Path], filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit codes 0, 1 and 3; a store is looked at where the command line names one."""
    folder = tmp_path / "copy"
    shutil.copytree(homes[2], folder)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(tmp_path / "none.duckdb"))
    right = invoke("verify", folder)
    stated = invoke("--store", filled.name, "verify", folder)
    (folder / "data" / "more.parquet").write_bytes(b"")
    (folder / "README.md").unlink()
    wrong = invoke("verify", folder)
    (folder / "certificate.json").unlink()
    nothing = invoke("verify", folder)
    other = Store(tmp_path / "other.duckdb")
    other.add(spans_of("elsewhere", tokens=True))
    elsewhere = invoke("verify", homes[0], "--store", other.name)

    codes = [done.returncode for done in (right, stated, wrong, nothing, elsewhere)]
    assert codes == [0, 0, 1, 3, 1]
    assert "✓ law: 200 steps: 110 in rows, 90 left out\n" in right.stdout
    assert "✓ spans: 110 steps in rows, 0 not in the store\n" in stated.stdout
    assert "✗ README.md: missing\n" in wrong.stdout
    assert "✗ data/more.parquet: not certified\n" in wrong.stdout
    assert "export … --certificate" in nothing.stderr
    assert "✗ spans: 200 steps in rows, 200 not in the store\n" in elsewhere.stdout


def test_the_rollouts_of_a_task_stay_on_one_side(filled: Store, tmp_path: Path) -> None:
    """The same on every machine, another with another seed, and about as large as was asked for."""
    sides = {}
    for seed in (0, 1):
        path = tmp_path / f"{seed}.jsonl"
        done = filled.export("sft", path, split=0.2, seed=seed)
        files = (path, path.with_name(f"{seed}.validation.jsonl"))
        tasks = [
            {json.loads(line)["rollout_id"].partition("-")[0] for line in lines}
            for lines in (file.read_text().splitlines() for file in files)
        ]
        assert not tasks[0] & tasks[1]
        assert done.tasks == {"train": len(tasks[0]), "validation": len(tasks[1])}
        assert done.rows == done.steps == 2 * TASKS
        sides[seed] = tasks[1]

    assert 8 < len(sides[0]) < 35
    assert {"r1", "r11"} <= sides[0] != sides[1]
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigError, match="give the share of validation"):
            filled.export("sft", tmp_path / "no.jsonl", split=share)
    with pytest.raises(ConfigError, match="a split writes two files"):
        filled.export("sft", lambda row: None, split=0.5)
    assert "tasks train" in invoke("export", "sft", "--dry-run", "--split", 0.5, "--store",
                                    filled.name).stdout  # fmt: skip


def test_a_certificate_is_a_statement_and_a_card_guesses_nothing(homes: list[Path]) -> None:
    """In-toto's fields, the law, options; the card has a head for the Hub and states no licence."""
    statement = json.loads((homes[2] / "certificate.json").read_text())
    card = (homes[2] / "README.md").read_text()

    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert [each["name"] for each in statement["subject"]] == [
        "README.md", "data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet",
    ]  # fmt: skip
    law = statement["predicate"]["law"]
    assert (law["steps"], law["in_rows"], sum(law["left_out"].values())) == (200, 110, 90)
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "license" not in head
    assert "  - split: validation\n    path: data/validation" in head
    assert "- Steps: 200 = 110 in rows + 90 left out\n  - left out: 90 × `no reward;" in body
    assert "`lightning-otel export grpo OUT --split 0.3`" in body
    assert "Licence: not stated. Personal data: not stated." in body


def lose(trajectories: Any) -> Iterator[dict[str, Any]]:
    """A format that drops each second step in silence."""
    steps = [step for path in trajectories for step in path.transitions]
    for step in steps[::2]:
        yield {"span_id": step.span_id, "rollout_id": step.rollout_id}


@pytest.mark.parametrize(
    ("layout", "verdict"),
    [(Format(lose), None), (Format(lambda paths: ({"n": 1} for _ in paths)), False)],
)
def test_what_breaks_the_law_is_not_certified(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Format, verdict: Any
) -> None:
    """A format of one's own: one that loses steps is refused; of one that tells none it is said."""
    monkeypatch.setattr(formats, "get", lambda name: layout)
    path = tmp_path / "rows.jsonl"
    if verdict is None:
        with pytest.raises(CertificateError, match="loses or repeats some"):
            filled.export("own", path, certificate=True)
        assert not list(tmp_path.iterdir())
        return
    filled.export("own", path, certificate=True)
    assert CertificateCheck("law", None, "200 steps: None in rows, 0 left out") in verify(path)
    assert invoke("verify", path).returncode == 3


def test_a_certificate_needs_files(filled: Store, tmp_path: Path) -> None:
    """Not a function; and a newer kind of certificate is none of ours to judge."""
    with pytest.raises(ConfigError, match="a certificate tells of files"):
        filled.export("sft", lambda row: None, certificate=True)
    with pytest.raises(NotFoundError, match="no certificate at"):
        verify(tmp_path / "none.jsonl")


def test_a_shared_step_is_in_one_row(store: Store, tmp_path: Path) -> None:
    """Branches of an attempt: each step is named once, and no row comes twice."""
    store.add(draw("A[ q<w a<q|q|m b<q|q|n !1 ]").spans)
    rows = list(store.rows("sft"))

    named = [span_id for row in rows for span_id in row["span_ids"]]
    assert len(named) == len(set(named)) == len(store.transitions().rows())

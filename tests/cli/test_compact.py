"""``compact`` says what it did, or would do, and changes nothing when it is only asked."""

import json
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store
from lightning_otel.store import settle as settle_module
from lightning_otel.types import Span


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with an old and a new rollout in two files."""
    monkeypatch.setattr(settle_module, "COMMIT_AHEAD_US", 2_000)
    store = Store(tmp_path / "traces.duckdb")
    for number, hours in enumerate((100, 1)):
        start_ns = time.time_ns() - int(hours * 3.6e12)
        attributes = {"agentlightning.rollout_id": f"rollout-{hours}"}
        store.add(
            Span(f"{number + 1:032x}", f"{index + 1:016x}", None, "s", start_ns, start_ns + 1,
                 attributes=attributes) for index in range(3)
        )  # fmt: skip
        store.writer().seal()
        store.settle()
    time.sleep(0.01)
    return store


def test_compact_foretells_exactly(filled: Store, cli: Cli) -> None:
    """A dry run counts what then goes, and nothing is different after it."""
    named = ["--store", filled.name, "--older-than", "2d", "--json"]
    before = filled.spans().rows()

    foretold = cli("compact", "--dry-run", *named)
    untouched = filled.spans().rows()
    done = cli("compact", *named)
    time.sleep(0.01)

    told, did = json.loads(foretold.stdout), json.loads(done.stdout)
    assert told["dropped"] == did["dropped"] == {"age": {"rollouts": 1, "spans": 3}}
    assert (told["dry_run"], told["bytes_after"]) == (True, None)
    assert {key: told[key] for key in told if key.startswith("files")} == {
        key: did[key] for key in did if key.startswith("files")
    }
    assert untouched == before
    assert {span.attributes["agentlightning.rollout_id"] for span in filled.spans()} == {
        "rollout-1"
    }


def test_compact_speaks_to_people(filled: Store, cli: Cli) -> None:
    """Each thing done is a line; a second time there is nothing to do."""
    first = cli("compact", "--store", filled.name, "--rollout", "rollout-100")
    again = cli("compact", "--store", filled.name)

    assert "1 rollout with 3 spans dropped: their rollout was taken out" in first.stdout
    assert "1 file merged into 1" in first.stdout
    assert "nothing to do" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--older-than", "soon"], 2, "is no age"),
        (["--max-size", "much"], 2, "is no size"),
        (["--rollout", "nosuch"], 3, "nosuch"),
    ],
)
def test_compact_refuses_what_it_does_not_understand(
    filled: Store, cli: Cli, arguments: list[str], code: int, text: str
) -> None:
    """Nothing is dropped by a slip of the keyboard."""
    done = cli("compact", "--store", filled.name, *arguments)

    assert done.returncode == code
    assert text in done.stderr
    assert len(filled.spans().rows()) == 6

"""``redact``: what it says, asks and gives back; that content is gone is shown in store/."""

import csv
import io
import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store
from lightning_otel.instants import instant_ns
from lightning_otel.store import settle as settle_module


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_module, "COMMIT_AHEAD_US", 2_000)
    monkeypatch.setattr(settle_module, "GRACE_US", 20_000)


def test_redact_masks_tells_and_lists(cli: Cli, copy: Path) -> None:
    """Counts on stdout, what comes next on stderr, and a record without the pattern."""
    told = cli("redact", "--pattern", "What is", "--dry-run", "--store", copy)
    done = cli("redact", "--pattern", "What is", "--reason", "a request", "--yes", "--store", copy)
    listed = cli("redact", "--list", "--json", "--store", copy)

    assert "9 spans of 3 rollouts would be changed" in told.stdout
    assert "9 spans of 3 rollouts changed" in done.stdout
    assert "no file of the store holds it any more" in done.stdout
    assert "redact --list" in done.stderr
    assert (told.returncode, done.returncode, listed.returncode) == (0, 0, 0)
    (record,) = json.loads(listed.stdout)
    (said,) = csv.DictReader(io.StringIO(cli("redact", "--list", "--csv", "--store", copy).stdout))
    assert instant_ns(said["began"]) == record["began_ns"]
    assert (record["reason"], record["spans"]) == ("a request", 9)
    assert "What is" not in listed.stdout
    assert not any("What is" in str(span.attributes) for span in Store(copy).spans())


def test_redact_asks_first_and_does_nothing_unasked(cli: Cli, copy: Path) -> None:
    """In a pipe nobody can answer: it wants --yes, and a rule."""
    unsure = cli("redact", "--pattern", "What", "--store", copy)
    nothing = cli("redact", "--yes", "--store", copy)
    wrong = cli("redact", "--yes", "--pattern", "(", "--store", copy)

    assert (unsure.returncode, nothing.returncode, wrong.returncode) == (2, 2, 2)
    assert "--yes" in unsure.stderr
    assert "--pattern, --key, --secrets or --id" in nothing.stderr
    assert any("What" in str(span.attributes) for span in Store(copy).spans())


def test_redact_of_one_rollout_gives_one_document(cli: Cli, copy: Path) -> None:
    """An id alone takes all that was said in it, and no other."""
    done = cli("redact", "--id", "exp-one", "--yes", "--json", "--store", copy)

    found = json.loads(done.stdout)
    assert (found["rollouts"], found["is_gone"], found["dry_run"]) == (1, True, False)
    key = "gen_ai.input.messages"
    spans = [span for span in Store(copy).spans() if key in span.attributes]
    asked = {span.rollout_id: span.attributes[key] for span in spans}
    assert "[redacted]" in asked["exp-one"]
    assert all("[redacted]" not in text for name, text in asked.items() if name != "exp-one")

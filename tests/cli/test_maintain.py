"""``compact`` and ``redact``: what they say and give back; and feedback that waits for its span."""

import csv
import io
import json
import time
from pathlib import Path

import pytest
from tests.acting import act
from tests.cli.conftest import Cli, read_ns
from tests.viewer.client import AskingOf

from lightning_otel import Store
from lightning_otel.state import State
from lightning_otel.types import Span


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    """A store with an old and a new rollout in two files."""
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


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_otel.store.settle.COMMIT_AHEAD_US", 2_000)
    monkeypatch.setattr("lightning_otel.store.settle.GRACE_US", 20_000)


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
    assert read_ns(said["began"]) == record["began_ns"]
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


def count_waiting(store: Path) -> int:
    with State(str(store)).read() as connection:
        rows = connection.exec_driver_sql("SELECT count(*) FROM lightning_feedback")
        return int(rows.scalar_one())


@pytest.fixture
def late(tmp_path: Path, asking: AskingOf) -> Path:
    """A store with one rollout, recorded after what a person said of it."""
    store = Store(tmp_path / "traces.duckdb")
    store.writer()
    body = '{"rollout_id": "r1", "reward": 0.5}'
    asked = asking(store)
    told = asked.ask("POST", "/v1/feedback", body, Content_Type="application/json")
    assert told.status == 202, told.text
    act(store, "r1")
    store.writer().seal()
    return tmp_path / "traces.duckdb"


@pytest.mark.parametrize("command", ["export", "pack", "compact", "apply-rewards"])
def test_what_waits_is_given_first(cli: Cli, late: Path, command: str) -> None:
    """Once, and it is said; so it is among what goes out."""
    judge = late.with_name("judge.py")
    judge.write_text("def judge(task):\n    return None\n")
    out = late.with_name("out.jsonl" if command == "export" else "out.duckdb")
    words = {
        "export": ("export", "triplets", "-o", out),
        "pack": ("pack", out),
        "compact": ("compact",),
        "apply-rewards": ("apply-rewards", f"{judge}:judge"),
    }[command]

    done = cli(*words, "--store", late)

    assert done.returncode == 0, done.stderr
    assert "1 × feedback given that had waited for what it judges" in done.stderr
    assert [step.reward for step in Store(late).transitions()] == [0.5]
    assert count_waiting(late) == 0
    if command == "export":
        assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [0.5]
        again = cli("export", "triplets", "-o", late.with_name("again.jsonl"), "--store", late)
        assert "feedback" not in again.stderr


@pytest.mark.parametrize("command", [("export", "triplets", "--dry-run"), ("compact", "--dry-run")])
def test_dry_run_gives_nothing(cli: Cli, late: Path, command: tuple[str, ...]) -> None:
    """It changes nothing at all."""
    done = cli(*command, "--store", late)

    assert done.returncode == 0, done.stderr
    assert count_waiting(late) == 1


def test_state_that_cannot_be_read_keeps_no_spans_back(cli: Cli, late: Path) -> None:
    """What is not given is said, and the rows are written."""
    (late.with_name(late.name + ".d") / "state.sqlite").write_bytes(b"no database" * 1000)

    done = cli("export", "triplets", "--store", late)

    assert done.returncode == 0, done.stderr
    assert "feedback that waits was not given" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_facts_are_computed_anew(filled: Store, cli: Cli) -> None:
    """They tell the same after they were deleted by hand, or by the command."""
    assert filled.layout is not None
    act(filled)
    first = json.loads(cli("facts", "--json", "--store", filled.name).stdout)
    before = set(filled.layout.facts.glob("facts-*-*.parquet"))
    again = cli("facts", "--rebuild", "--store", filled.name)
    after = set(filled.layout.facts.glob("facts-*-*.parquet"))

    assert first["attempts"] == 3
    assert first["steps"] > 0
    assert again.stdout.startswith("3 attempts, ")
    assert json.loads(cli("facts", "--json", "--store", filled.name).stdout) == first
    assert len(before & after) <= 1  # the empty one that ships
    assert cli("facts", "--rebuild", "--store", "nowhere.duckdb").returncode == 4

"""Facts: computed by whoever reads first, renewed with what came since, right or absent."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import duckdb
import pytest
from opentelemetry import trace
from tests.adapter.forest import draw
from tests.command import invoke

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.cli import output
from lightning_otel.store.facts import delete_facts
from lightning_otel.tracing.emitters import reward_span
from lightning_otel.types import Credit, Span
from lightning_otel.types import conventions as c
from lightning_otel.views.doctor import examine
from lightning_otel.views.nouns import ATTEMPTS

ANSWER = "SELECT rollout_id, reward, calls, steps, is_current FROM rollouts ORDER BY ALL"
CREDITS: list[Credit] = ["previous", "step", "agents", "last", "discounted"]
PREFIXES = {"previous": "facts", "step": "credit-step"}
KILLS = 20
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import duckdb
from lightning_otel import Store, adapter
from lightning_otel.store import fact_rows, facts, source

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def watch():
    while not any(Path(sys.argv[2]).glob("draft-*")):
        time.sleep(0.0002)
    kill()

for line in sys.stdin:
    if not (child := os.fork()):
        if line == "rename\\n":
            facts.put_file = kill
        else:
            threading.Thread(target=watch).start()
        Store(sys.argv[1]).transitions(bodies=False, credit=sys.argv[3]).rows()
        kill()  # the file was written between two looks
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Has children that compute facts killed once their file is open, or before it is renamed."""
Damage = Callable[[Path], object]


def draw_rollouts(first: int, last: int, reward: str = "!1") -> list[Span]:
    """Return rollouts of two calls, with a reward each."""
    return [
        span
        for number in range(first, last)
        for span in draw(
            f"A[ a{number}@id={number}-a b{number}@id={number}-b {reward} ]",
            rollout_id=f"r{number}",
            process=f"p{number}-",
        ).spans
    ]


def read_files(store: Store, prefix: str = "facts") -> list[Path]:
    """Return the files of facts that hold any."""
    assert store.layout is not None
    return sorted(store.layout.facts.glob(f"{prefix}-*-*-*.parquet"))


def credits_kept(store: Store) -> set[str]:
    """Return the credits whose facts are kept."""
    return {path.name.split("-")[1] for path in read_files(store, "credit")}


def rewards_by(store: Store, credit: Credit, *, bodies: bool = False) -> list[dict[str, Any]]:
    """Return the rewards of all steps, and how many were placed, by a credit."""
    steps = store.transitions(credit=credit, bodies=bodies)
    rows = [{name: row[name] for name in ("span_id", "reward")} for row in steps.dicts()]
    placed = steps.report().rewards_placed
    return [*sorted(rows, key=lambda row: str(row["span_id"])), {"placed": placed}]


def rows_of(store: Store, query: str = ANSWER) -> list[dict[str, Any]]:
    return store.sql(query).rows()


def test_facts_are_kept_and_renewed_with_what_came(store: Store) -> None:
    """Nothing is computed of a store that did not change; of one that did, what changed."""
    store.add(draw_rollouts(0, 20))
    before, files = rows_of(store), read_files(store)
    again, unchanged = rows_of(store), read_files(store)
    store.add(draw_rollouts(20, 22))

    after = rows_of(store)

    assert [row["reward"] for row in before] == [1.0] * 20
    assert (again, unchanged) == (before, files)
    assert len(after) == 22
    (added,) = set(read_files(store)) - set(files)
    query = f"SELECT count(DISTINCT rollout_id) FROM '{added}'"
    assert duckdb.sql(query).fetchall() == [(2,)]


def test_a_large_attempt_is_renewed_as_it_grows(store: Store) -> None:
    """Its first reward, one from elsewhere, growth by an eighth or its end renews it."""
    tracer = trace.get_tracer("test")
    query = "SELECT spans, reward, is_current FROM rollouts"

    def look(spans: int) -> tuple[Any, ...]:
        for _ in range(spans):
            tracer.start_span("part").end()
        return tuple(rows_of(store, query)[0].values())

    with auto_trace(store=store, rollout_id="large"):
        looks = [look(5_000), look(1)]
        emit_reward(1.0)
        looks += [look(1)]
        emit_reward("style", 0.5)
        looks += [look(1)]
        store.add([reward_span({"style": 0.25}, rollout_id="large")])
        looks += [look(1), look(1), look(700)]

    assert looks == [
        (5_001, None, True), (5_001, None, False), (5_004, 1.0, True), (5_004, 1.0, False),
        (5_008, 1.0, True), (5_008, 1.0, False), (5_709, 1.0, True),
    ]  # fmt: skip
    assert look(0) == (5_709, 1.0, True)


def test_a_reward_given_elsewhere_renews_the_rollout_it_judges(store: Store) -> None:
    """By its link, whichever of the two came first, and where its own rollout has steps."""
    late = draw("c@id=c !.5@id=0-b", rollout_id="other", process="q").spans
    store.add([*draw_rollouts(0, 1, ""), *draw_rollouts(1, 2)])
    first = {row["rollout_id"]: row["reward"] for row in rows_of(store)}

    store.add(late)

    assert first == {"r0": None, "r1": 1.0}
    assert {row["rollout_id"]: row["reward"] for row in rows_of(store)} == {
        "r0": 0.5, "r1": 1.0, "other": None,
    }  # fmt: skip


def test_facts_of_the_last_four_credits_are_kept(store: Store) -> None:
    """Beside those that the views stand on; deleted as these are, and none holds old text."""
    store.add(draw_rollouts(0, 8))
    walked = {credit: rewards_by(store, credit, bodies=True) for credit in get_args(Credit)}
    answers = {credit: rewards_by(store, credit) for credit in CREDITS}
    files = {*read_files(store), *read_files(store, "credit")}

    assert {credit: rewards_by(store, credit) for credit in CREDITS[-3:]} == {
        credit: walked[credit] for credit in CREDITS[-3:]
    }
    assert answers == {credit: walked[credit] for credit in CREDITS}
    assert {*read_files(store), *read_files(store, "credit")} == files
    assert credits_kept(store) == {"agents", "last", "discounted"}
    assert rewards_by(store, "step") == walked["step"]
    assert credits_kept(store) == {"last", "discounted", "step"}
    store.add(draw_rollouts(8, 9))
    assert len(store.sql("FROM rollouts").rows()) == 9  # the usual one's are made anew
    assert credits_kept(store) == {"last", "discounted", "step"}
    assert rewards_by(store, "last") == rewards_by(store, "last", bodies=True)
    assert len(read_files(store, "credit-last")) == 2
    store.redact(patterns=["b"])
    assert not credits_kept(store)
    assert len(rewards_by(store, "step")) == 19
    store.compact(rollout_ids=["r8"])
    assert not credits_kept(store)
    assert len(rewards_by(store, "step")) == 17


@pytest.mark.parametrize("credit", ["previous", "step"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(path.read_bytes()[:300] + b"?" + path.read_bytes()[301:]),
        lambda path: path.rename(path.with_name(path.name.replace("-3-", "-9-", 1))),
    ],
    ids=["deleted", "cut", "flipped", "another version"],
)
def test_facts_that_are_not_whole_are_made_again(
    store: Store, damage: Damage, credit: Credit
) -> None:
    """A reader of ours answers the same, and keeps them anew."""
    store.add(draw_rollouts(0, 8))
    expected, prefix = rewards_by(store, credit), PREFIXES[credit]
    (path,) = read_files(store, prefix)
    damage(path)

    codes = {finding.code for finding in examine(store)}
    assert ("facts-unsound" in codes) is any(path.parent.glob(f"{prefix}-*-*-*"))
    assert rewards_by(store, credit) == expected
    assert rows_of(store)[0]["reward"] == 1.0
    assert len([file for file in read_files(store, prefix) if "-3-" in file.name]) >= 1


def test_the_first_query_of_the_command_line_finds_rewards_placed(store: Store) -> None:
    """It may write nothing itself; facts are kept before that, so that the next one has them."""
    with auto_trace(store=store, rollout_id="r"):
        emit_action("done")
        emit_reward(1.0)
    query = "SELECT placed_by, call_ids IS NOT NULL AS is_placed FROM rewards"

    rows = json.loads(invoke("sql", query, "--json", "--store", store.name).stdout)

    assert rows == [{"placed_by": "previous", "is_placed": True}]
    assert store.layout is not None
    assert len(list(store.layout.facts.glob("facts-*.parquet"))) == 2  # one of them empty


def test_a_store_that_is_only_read_answers_from_memory(store: Store) -> None:
    """Nothing can be kept, and nothing is missing; a connection that stays open has it, too."""
    store.add(draw_rollouts(0, 4))
    assert store.layout is not None
    for path in store.layout.facts.glob("*"):
        path.unlink()
    store.layout.facts.rmdir()
    store.layout.facts.write_bytes(b"no folder")

    assert [row["reward"] for row in rows_of(store)] == [1.0] * 4
    assert rewards_by(store, "step") == rewards_by(store, "step", bodies=True)
    assert store.connect().execute("SELECT sum(reward) FROM rollouts").fetchall() == [(4.0,)]


def test_plain_duckdb_shows_what_is_not_current(store: Store) -> None:
    """An attempt without facts has its spans, and no reward; our next look gives it one."""
    store.add(draw_rollouts(0, 2))
    rows_of(store)
    store.add(draw_rollouts(2, 3))
    assert store.layout is not None
    query = "SELECT rollout_id, reward, spans, is_current FROM rollouts ORDER BY ALL"

    def ask() -> Sequence[tuple[object, ...]]:
        with duckdb.connect(str(store.layout.catalogue), read_only=True) as con:  # type: ignore[union-attr]
            return con.execute(query).fetchall()

    stale = ask()
    rows_of(store)

    assert stale == [("r0", 1.0, 4, True), ("r1", 1.0, 4, True), ("r2", None, 4, False)]
    assert ask()[2] == ("r2", 1.0, 4, True)
    # A reward from elsewhere judges a call of one that did not change.
    store.add(draw("c@id=c !.5@id=1-b", rollout_id="other", process="q").spans)
    judged = ask()
    rows_of(store)

    assert judged[0] == ("other", None, 2, False)
    assert judged[1:] == [("r0", 1.0, 4, True), ("r1", None, 4, False), ("r2", 1.0, 4, True)]
    assert ("r1", 0.5, 5, True) in ask()


def test_a_packed_file_answers_from_the_facts_in_it(store: Store, tmp_path: Path) -> None:
    """In plain DuckDB, with nothing beside it."""
    store.add(draw_rollouts(0, 5))
    queries = (
        "SELECT rollout_id, reward, calls, steps, is_current FROM rollouts ORDER BY ALL",
        "SELECT rollout_id, span_id, step, reward FROM steps ORDER BY ALL",
    )
    expected = [[tuple(row.values()) for row in rows_of(store, query)] for query in queries]

    store.pack(tmp_path / "packed.duckdb")

    with duckdb.connect(str(tmp_path / "packed.duckdb"), read_only=True) as con:
        assert [con.execute(query).fetchall() for query in queries] == expected
    assert [len(rows) for rows in expected] == [5, 10]


def test_a_terminal_shows_a_first_read_that_takes_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar on stderr, which the second read has no need of."""
    store.add(draw_rollouts(0, 2))
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)  # the store is a small one
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    texts = []
    for _ in range(2):
        with output.show_facts_bar():
            rows_of(store)
        texts.append(capsys.readouterr().err)

    assert ["facts" in text for text in texts] == [True, False]


def test_steps_and_tools_are_those_of_transitions(store: Store) -> None:
    """The view has the columns of transitions without bodies, and the same values."""
    store.add(draw_rollouts(0, 5))

    names = "rollout_id, span_id, step, reward, agent, done"
    views = rows_of(store, f"SELECT {names} FROM steps ORDER BY ALL")
    steps = [
        {name: getattr(step, name) for name in names.split(", ")} for step in store.transitions()
    ]

    assert views == sorted(steps, key=lambda row: tuple(map(str, row.values())))
    assert rows_of(store, "SELECT count(*) AS n FROM tools") == [{"n": 0}]


@pytest.mark.parametrize("credit", ["previous", "step"])
def test_killed_while_facts_are_written_every_answer_is_right(store: Store, credit: Credit) -> None:
    """A file is there whole, or not at all."""
    store.add(draw_rollouts(0, 10))
    expected = rows_of(store), rewards_by(store, credit)
    assert store.layout is not None
    command = [sys.executable, "-c", KILLED, store.name, str(store.layout.facts), credit]
    drafts = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for number in range(KILLS):
            delete_facts(store.layout.facts)
            parent.stdin.write(("open\n", "rename\n")[number % 2])
            status = parent.stdout.readline()
            drafts += any(store.layout.facts.glob("draft-*"))

            assert int(status) == signal.SIGKILL
            assert (rows_of(store), rewards_by(store, credit)) == expected
    assert drafts > KILLS // 2


def test_facts_of_a_store_elsewhere_last_for_a_day(
    store: Store, tmp_path: Path, served: Callable[[Store], str]
) -> None:
    """Each process finds what one computed, until it is deleted, old, or readable by others."""
    store.add(draw_rollouts(0, 3))
    expected, url = rows_of(store), served(store)

    def ask() -> list[Path]:
        assert rows_of(Store(url)) == expected
        return sorted((tmp_path / "cache").rglob("facts-*"))

    files = ask()
    assert len(files) == 1
    folder = files[0].parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ask() == files
    Store(url).compact()
    assert not any(folder.glob("facts-*"))
    others = ask()
    os.utime(folder / "deletion.mark", (0, 0))
    assert ask() != others
    Store(url).compact()
    folder.chmod(0o755)
    assert ask() == []


SECRET = "a person's name"


@pytest.mark.parametrize(
    "moment",
    [
        "lightning_otel.adapter.TripletAdapter.explain",
        "lightning_otel.store.renewal.is_merge_due",
    ],
    ids=["computed", "merged"],
)
def test_a_reader_from_before_a_redaction_leaves_nothing_of_it(
    store: Store, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps nothing of what it read before."""
    root, *others = draw_rollouts(0, 1)
    task = {**root.attributes, c.TASK: SECRET}
    store.add([replace(root, name=c.SPAN_ROLLOUT, attributes=task), *others])
    act, calls = resolve_name(moment), list[object]()

    def redact_first(*args: object, **options: object) -> object:
        if not calls:  # the only way to be between what another reader reads and writes
            calls.append(Store(store.name).redact(patterns=[SECRET]))
        return act(*args, **options) or moment.endswith("due")

    monkeypatch.setattr(moment, redact_first)

    rows_of(store)

    assert calls
    tasks = duckdb.read_parquet([*map(str, read_files(store))]).filter("task IS NOT NULL")
    assert {*tasks.project("task").fetchall()} == {("[redacted]",)}
    assert rows_of(store, "SELECT task FROM rollouts") == [{"task": "[redacted]"}]


def test_a_page_of_a_large_store_renews_no_more_than_it_shows(store: Store) -> None:
    """With the rewards that were given to it elsewhere; later answers are those of a whole look."""
    early = draw("c !.5@id=2099-b", rollout_id="other", process="q").spans
    store.add([*early, *draw_rollouts(0, 2100, "")])

    listing = ATTEMPTS.read(store, {"status": "succeeded"}, limit=3)
    (added,) = read_files(store)
    computed = duckdb.sql(f"SELECT DISTINCT rollout_id FROM '{added}'").fetchall()

    assert listing.total == 2101
    assert {row["is_current"] for row in listing.rows} == {True}
    assert {row["rollout_id"] for row in listing.rows} < {name for (name,) in computed}
    assert len(computed) <= 5
    whole = {row["rollout_id"]: row for row in store.rollouts()}
    assert whole["r2099"]["reward"] == 0.5
    for row in listing.rows:
        assert row == whole[row["rollout_id"]]

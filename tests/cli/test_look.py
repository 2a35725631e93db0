"""``ls``, ``show``, ``stats`` and ``sql`` on a store with real data."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lightning_otel import Store, auto_trace
from lightning_otel.instants import instant_ns
from lightning_otel.store.layout import Layout

Cli = Callable[..., CompletedProcess[str]]

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

FORMULAS = "SELECT '=1+1' AS \"=a\", -1.5 AS n, '-x' AS t, '@y' AS u, 'a=b' AS v"


def table(text: str) -> list[dict[str, str]]:
    """Tab-separated lines as rows; no cell holds a tab."""
    return list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))


def ids_of_demo(kept: Path) -> list[str]:
    """The three rollouts of the demo, the newest first."""
    found = [row["rollout_id"] for row in Store(kept).rollouts()]
    return [name for name in reversed(found) if name.startswith("rollout-")]


def test_ls_pipes_whole_rollouts(cli: Cli, kept: Path) -> None:
    """A pipe gets every column of each rollout, nothing shortened, the newest first."""
    done = cli("ls", "--store", kept)

    rows = table(done.stdout)
    assert [row["rollout_id"] for row in rows[:2]] == ["exp-two", "exp-one"]
    assert {row["rollout_id"] for row in rows[2:]} == set(ids_of_demo(kept))
    assert [row["status"] for row in rows] == ["succeeded"] * 5
    assert [row["calls"] for row in rows] == ["2", "1", "2", "2", "2"]
    assert rows[1]["agents"] == "planner"
    assert json.loads(rows[1]["task"]) == {"q": "hi"}
    assert all(row["reward"] in ("0.0", "1.0") for row in rows[2:])
    assert rows[0]["reward"] == ""
    assert done.stderr == f"→ lightning-otel show @last --store {kept}\n"


def test_ls_pipes_whole_traces(cli: Cli, kept: Path) -> None:
    """Traces say what was asked first and answered last, with the rollout's reward."""
    done = cli("ls", "traces", "--store", kept)

    rows = table(done.stdout)
    assert len(rows) == 5
    assert re.fullmatch(r"What is \d+\*\d+\?", rows[-1]["input"])
    assert rows[-1]["output"].startswith("The answer is ")
    assert rows[1]["input"] == "hi"
    assert rows[1]["output"] == "You said: hi"
    assert all(re.fullmatch("[0-9a-f]{32}", row["trace_id"]) for row in rows)
    assert rows[-1]["reward"] in ("0.0", "1.0")
    assert done.stderr == f"→ lightning-otel show {rows[0]['trace_id'][:8]} --store {kept}\n"


@pytest.mark.pain(13)
def test_ls_limits_and_says_so(cli: Cli, kept: Path) -> None:
    """--limit keeps the newest and says how many there are; --all keeps all."""
    few = cli("ls", "--limit", 2, "--store", kept)
    every = cli("ls", "--limit", 2, "--all", "--store", kept)

    assert [row["rollout_id"] for row in table(few.stdout)] == ["exp-two", "exp-one"]
    assert few.stderr.splitlines()[0] == "2 of 5 rollouts · --all for the rest"
    assert len(table(every.stdout)) == 5
    assert "--all" not in every.stderr


@pytest.mark.parametrize("what", ["rollouts", "traces"])
def test_ls_json_is_an_array_or_lines(cli: Cli, kept: Path, what: str) -> None:
    """--json and --jsonl hold the same objects, numbers as numbers."""
    array = json.loads(cli("ls", what, "--json", "--store", kept).stdout)
    lines = cli("ls", what, "--jsonl", "--store", kept).stdout.splitlines()

    assert len(array) == 5
    assert array == [json.loads(line) for line in lines]
    assert {type(row["start_ns"]) for row in array} == {int}


def test_ls_reads_the_store_of_the_environment(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``LIGHTNING_OTEL_STORE`` names the store, and the next step then needs no --store."""
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(kept))

    done = cli("ls", "--jsonl")

    assert len(done.stdout.splitlines()) == 5
    assert done.stderr == "→ lightning-otel show @last\n"


def test_ls_terminal_shows_ids_to_type(terminal: Callable[..., str], kept: Path, cli: Cli) -> None:
    """On a terminal every row is one line that fits, and its shortened id finds the rollout."""
    text = COLOURS.sub("", terminal("ls", "--store", kept, columns=90))

    lines = text.splitlines()
    header, rows = lines[0], lines[1:6]
    assert header.split()[:3] == ["ROLLOUT", "STATUS", "AGE"]
    assert [row.split()[0] for row in rows[:2]] == ["exp-two", "exp-one"]
    assert max(map(len, lines[:6])) <= 90
    assert '{"q":' in rows[1]
    shortened = rows[2].split()[0]
    assert len(shortened) < len(ids_of_demo(kept)[0])
    assert ids_of_demo(kept)[0].startswith(shortened)
    assert cli("show", shortened, "--store", kept).returncode == 0


def test_ls_terminal_shortens_texts_only(terminal: Callable[..., str], kept: Path) -> None:
    """Where the line is too long, texts are shortened with an ellipsis and numbers stay whole."""
    text = COLOURS.sub("", terminal("ls", "traces", "--store", kept, columns=70))

    lines = text.splitlines()
    assert "…" in lines[5]
    assert re.search(r"\d+→\d+", lines[5])
    assert max(map(len, lines[:6])) <= 70


def test_ls_leaves_later_rewards_out_of_traces(cli: Cli, copy: Path) -> None:
    """A reward given later is a reward of its trace, not a trace."""
    cli("reward", "exp-one", "0.5", "--store", copy)

    rows = json.loads(cli("ls", "traces", "--json", "--store", copy).stdout)

    assert len(rows) == 5
    assert [row["reward"] for row in rows if row["rollout_id"] == "exp-one"] == [0.5]


def test_show_last_is_the_newest_rollout(cli: Cli, kept: Path) -> None:
    """@last is the default, and the tree hangs each call under its operation and rollout."""
    done = cli("show", "--store", kept)
    named = cli("show", "@last", "--store", kept)

    lines = done.stdout.splitlines()
    assert done.stdout == named.stdout
    assert "(exp-two)" in lines[0]
    assert lines[1].startswith("└─ agentlightning.operation ")
    assert lines[2].startswith("   ├─ #0  chat toy  ")
    assert lines[3].startswith("   └─ chat fail-400  ")
    assert "ERROR openai.BadRequestError" in lines[3]
    assert done.stderr == f"→ lightning-otel show @last --transitions --store {kept}\n"


def test_show_finds_by_prefix(cli: Cli, kept: Path) -> None:
    """Rollouts, traces, spans and responses are all found by the beginning of their id."""
    (row,) = Store(kept).sql("SELECT * FROM calls WHERE rollout_id = 'exp-one'")

    by_rollout = cli("show", "exp-o", "--store", kept)
    by_trace = cli("show", row["trace_id"][:10], "--store", kept)
    by_span = cli("show", row["span_id"][:10], "--store", kept)
    by_response = cli("show", row["response_id"][:16], "--store", kept)

    assert by_rollout.stdout == by_trace.stdout
    assert by_rollout.stdout.splitlines()[0].endswith("ms")
    assert by_span.stdout == by_response.stdout
    lines = by_span.stdout.splitlines()
    assert lines[0].startswith("#0  chat toy  ")
    assert [line.split()[1] for line in lines if "gen_ai.response.id" in line] == [
        row["response_id"]
    ]


@pytest.mark.parametrize(
    ("target", "words"),
    [("exp-", ["'exp-'", "exp-one, exp-two", "more of it"]), ("nothing", ["'nothing'"])],
)
def test_show_refuses_what_is_not_one(cli: Cli, kept: Path, target: str, words: list[str]) -> None:
    """An ambiguous or unknown prefix exits with 3 and names the candidates."""
    done = cli("show", target, "--store", kept)

    assert done.returncode == 3
    assert done.stdout == ""
    assert all(word in done.stderr for word in words)
    assert len(done.stderr.splitlines()) == 3


def test_show_prints_whole_texts_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """Nothing is shortened where a program reads it."""
    from lightning_otel import emit_message

    store = Store(tmp_path / "long.duckdb")
    with auto_trace(store=store):
        emit_message("word " * 300 + "end")

    done = cli("show", "--store", tmp_path / "long.duckdb")

    assert done.stdout.count("word") == 300
    assert done.stdout.rstrip().endswith("end")


def test_show_fits_the_terminal(terminal: Callable[..., str], kept: Path) -> None:
    """On a terminal each span is one line, cut to its width, coloured by nobody's message."""
    text = COLOURS.sub("", terminal("show", "exp-two", "--store", kept, columns=72))

    lines = text.splitlines()
    assert max(map(len, lines[:4])) <= 72
    assert lines[2].endswith("…")
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\u061c", "\u200f"} & set(text)


@pytest.mark.parametrize(
    "args",
    [
        ("ls",), ("ls", "traces"), ("show", "exp-two"), ("show", "exp-two", "--transitions"),
        ("ls", "traces", "--json"), ("show", "exp-two", "--json"), ("export", "spans"),
        ("export", "triplets"), ("sql", "SELECT attributes FROM spans"),
        ("sql", "SELECT input_messages FROM calls"),
    ],
    ids=lambda args: " ".join(args)[:24],
)  # fmt: skip
def test_nothing_steers_the_terminal(cli: Cli, kept: Path, args: tuple[str, ...]) -> None:
    """No control character or turn of direction out of a name or message reaches a stream."""
    done = cli(*args, "--store", kept)

    assert done.returncode == 0
    unsafe = {
        c for c in done.stdout + done.stderr if c in "\x1b\x07\x9b\u202e\u2066\u061c\u200f\x7f"
    }
    assert unsafe == set()
    assert "red" in done.stdout, "the message itself is there"


def test_json_keeps_what_the_screen_may_not(cli: Cli, kept: Path) -> None:
    """Escaped in JSON, a steering character is still there for a program."""
    done = cli(
        "sql", "SELECT name FROM spans WHERE rollout_id = 'exp-two'", "--json", "--store", kept
    )
    spans = json.loads(cli("show", "exp-two", "--json", "--store", kept).stdout)

    assert "\x1b" not in done.stdout
    names = [span["attributes"].get("agentlightning.operation.name") for span in spans]
    assert any(name is not None and "\x1b[31mred" in name and "\u202e" in name for name in names)


def test_show_transitions_in_each_form(cli: Cli, kept: Path) -> None:
    """The steps of a rollout as lines and as JSON, with values where JSON has them."""
    target = ids_of_demo(kept)[0]

    rows = table(cli("show", target, "--transitions", "--store", kept).stdout)
    found = json.loads(cli("show", target, "--transitions", "--json", "--store", kept).stdout)

    assert [row["step"] for row in rows] == ["0", "1"]
    assert [row["done"] for row in rows] == ["no", "yes"]
    assert [row["capture"] for row in rows] == ["exact", "exact"]
    assert rows[0]["action"].startswith("calculator(")
    assert [step["step"] for step in found] == [0, 1]
    assert found[1]["observation"][0]["role"] == "system"
    assert len(found[0]["response_ids"]) == int(rows[0]["tokens"].partition("→")[2])


def test_show_says_where_transitions_are_none(cli: Cli, kept: Path, copy: Path) -> None:
    """A rollout without a transition says so, and says why a call was left out."""
    store = Store(copy)
    with auto_trace(store=store, rollout_id="bare"):
        pass
    store.writer().seal()

    bare = cli("show", "bare", "--transitions", "--store", copy)
    failed = cli("show", "exp-two", "--transitions", "--store", kept)

    assert bare.returncode == 0
    assert "no transitions in bare" in bare.stderr
    assert "left out: 1 × " in failed.stderr


def test_stats_counts_the_funnel(cli: Cli, kept: Path) -> None:
    """Spans, calls, transitions, rewards and losses, as text and as JSON."""
    text = cli("stats", "--store", kept)
    found = json.loads(cli("stats", "--json", "--store", kept).stdout)

    assert found["funnel"]["spans"] == 18
    assert found["funnel"]["rollouts"] == 5
    assert found["funnel"]["calls"] == 9
    assert found["funnel"]["transitions"] == 8
    assert found["funnel"]["exact"] == 6
    assert sum(found["funnel"]["inexact"].values()) == 2
    assert found["funnel"]["rewards"] == found["funnel"]["rewards_placed"] == 3
    accounting = found["accounting"]
    assert accounting["ended"] == accounting["stored"] == 18
    assert (accounting["missing"], accounting["rejected"], accounting["dropped"]) == (0, {}, {})
    assert sum(found["left_out"].values()) == 1
    lines = dict(line.split(None, 1) for line in text.stdout.splitlines())
    assert lines["spans"] == "18 in 5 rollouts"
    assert lines["rewarded"] == "3 of 8 transitions"
    assert lines["accounted"] == "18 ended = 18 stored"
    assert lines["left"].startswith("out     1 × ")


def test_stats_counts_lost_spans_before_they_are_settled(cli: Cli, copy: Path) -> None:
    """What a process noted as lost is told at once, not after the next settling."""
    (segment,) = Layout(copy).segments()
    with segment.open("ab") as file:
        file.write(b'{"record":"count","lost":3}\n{"record":"count","lost":4}\n')

    found = json.loads(cli("stats", "--json", "--store", copy).stdout)

    assert found["accounting"]["dropped"] == {"disk": 7}
    assert found["accounting"]["missing"] == 0


def test_sql_pipes_rows_as_they_are(cli: Cli, kept: Path) -> None:
    """A query's rows as tab-separated lines, JSON and JSON lines."""
    query = (
        "SELECT rollout_id, count(*) AS n, NULL AS nothing, [1, 2] AS list FROM spans "
        "WHERE rollout_id LIKE 'exp%' GROUP BY 1 ORDER BY 1"
    )

    text = cli("sql", query, "--store", kept)
    array = json.loads(cli("sql", query, "--json", "--store", kept).stdout)
    lines = cli("sql", query, "--jsonl", "--store", kept).stdout.splitlines()

    assert text.stdout.splitlines() == [
        "rollout_id\tn\tnothing\tlist",
        "exp-one\t2\t\t[1, 2]",
        "exp-two\t4\t\t[1, 2]",
    ]
    assert array == [
        {"rollout_id": "exp-one", "n": 2, "nothing": None, "list": [1, 2]},
        {"rollout_id": "exp-two", "n": 4, "nothing": None, "list": [1, 2]},
    ]
    assert [json.loads(line) for line in lines] == array


def test_sql_prints_values_json_has_no_word_for(cli: Cli, kept: Path) -> None:
    """Times, blobs and infinities come out as valid JSON."""
    query = (
        "SELECT DATE '2026-11-20' AS day, 'infinity'::DOUBLE AS much, 'ab'::BLOB AS blob, "
        "0.5::DECIMAL(3,1) AS half"
    )

    (row,) = json.loads(cli("sql", query, "--json", "--store", kept).stdout)

    assert row == {"day": "2026-11-20", "much": None, "blob": "YWI=", "half": "0.5"}


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("DROP VIEW spans", "SELECT"),
        ("INSERT INTO spans SELECT * FROM spans", "SELECT"),
        ("COPY (SELECT 1) TO 'out.csv'", "SELECT"),
        ("ATTACH 'other.duckdb'", "SELECT"),
        ("SET threads = 1", "SELECT"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("", "one statement"),
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM spans", '"nothing"'),
        ("SELECT name::INTEGER FROM spans", "convert"),
    ],
)
def test_sql_refuses_in_three_lines(
    cli: Cli, kept: Path, query: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever does not read, or cannot be answered, exits with 1 and leaves no file."""
    monkeypatch.chdir(tmp_path)

    done = cli("sql", query, "--store", kept)

    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert done.stdout == ""
    assert [line.split(" ", 1)[0] for line in lines] == ["error:", "why:", "try:"]
    assert word in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_sql_terminal_turns_wide_rows(terminal: Callable[..., str], kept: Path) -> None:
    """A row too wide for the terminal is shown a value a line, whole."""
    query = "SELECT name, start_ns FROM spans WHERE rollout_id = 'exp-one' ORDER BY start_ns"

    narrow = terminal("sql", query, "--store", kept)
    wide = terminal("sql", "SELECT * FROM calls WHERE rollout_id = 'exp-one'", "--store", kept)

    assert COLOURS.sub("", narrow).splitlines()[0].split() == ["NAME", "START_NS"]
    lines = wide.splitlines()
    assert lines[0] == "── 1 of 1"
    assert "You said: hi" in next(line for line in lines if line.startswith("output_messages"))


def test_csv_holds_no_formula(cli: Cli, kept: Path) -> None:
    """Text that a spreadsheet would run has a quote before it; numbers have none."""
    said = cli("sql", FORMULAS, "--csv", "--store", kept).stdout

    assert said.splitlines() == ["'=a,n,t,u,v", "'=1+1,-1.5,'-x,'@y,a=b"]


@pytest.mark.parametrize(
    "command",
    [("ls",), ("ls", "traces"), ("show", "@last", "--tree"), ("show", "@last", "--transitions")],
)
def test_times_are_text_for_people_and_numbers_in_json(
    cli: Cli, kept: Path, command: tuple[str, ...]
) -> None:
    """ISO 8601 in UTC without the unit in the name; and it says the very nanosecond."""
    said = csv.DictReader(io.StringIO(cli(*command, "--csv", "--store", kept).stdout))
    told = json.loads(cli(*command, "--json", "--store", kept).stdout)

    for row, numbers in zip(list(said), told, strict=True):
        assert "start_ns" not in row
        for name in ("start", "end"):
            assert row[name].endswith("Z")
            assert instant_ns(row[name]) == numbers[f"{name}_ns"]


def test_a_pipe_gets_times_as_csv_does(cli: Cli, kept: Path) -> None:
    """And no command's table for people holds a number of nanoseconds but that of a statement."""
    piped = table(cli("ls", "--store", kept).stdout)
    asked = table(
        cli("sql", "SELECT max(start_ns) AS start_ns FROM rollouts", "--store", kept).stdout
    )

    assert instant_ns(piped[0]["start"]) == int(asked[0]["start_ns"])

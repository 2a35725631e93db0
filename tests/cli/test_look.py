"""Commands that look: what each answers, in each form, of one store with real data."""

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from tests.adapter.fixtures import recorded
from tests.cli.conftest import EVIL, FORMULAS, Cli, lines_of_error, read_ns
from tests.plot.made import fill

from lightning_otel import Resources, State, Store, auto_trace, emit_message, emit_reward
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

Terminal = Callable[..., str]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FORMS = ("ls", "ls traces", "show exp-two", "show exp-two --tree", "show exp-one --transitions",
         "stats", "analyze", "plot", "diff @last @last~1", "sql 'FROM calls ORDER BY span_id'",
         "doctor", "config")  # fmt: skip


class Case(NamedTuple):
    """A command, the beginnings of some of its lines, and values of its JSON by their paths."""

    command: str
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    code: int = 0
    found: Mapping[str, Any] = MappingProxyType({})


CASES = (
    Case("ls", ("rollout_id\tattempt_id\tstatus\tstart\tend\t", "exp-two\t1\tsucceeded\t",
                "exp-one\t"), ("→ lightning-otel show @last --store ",)),
    Case("ls --json", found={"": 5, "0.rollout_id": "exp-two", "1.agents": "planner",
                             "1.calls": 1, "1.task": '{"q": "hi"}', "0.reward": None}),
    Case("ls --since 1d", ("exp-two\t", "exp-one\t")),
    Case("ls --until 2020-01-01 ", (), ("no rollouts of that time",)),
    Case("ls --no-rewarded --agent planner --json", found={"0.agents": "planner"}),
    Case("ls --status failed", (), ("no rollouts like that", "→ lightning-otel ls")),
    Case("ls traces --agent planner", (), ("error: traces have no agent",), 2),
    Case("ls traces --until 2020-01-01 ", (), ("no traces of that time",)),
    Case("ls traces --json", found={"": 5, "1.input": "hi", "1.output": "You said: hi",
                                    "1.rollout_id": "exp-one"}),
    Case("show", ("rollout (exp-two)", "└─ agentlightning.operation ",
                  "   ├─ #0  chat toy  ", "   └─ chat fail-400  "),
         ("→ lightning-otel show @last --transitions ",)),
    Case("show exp-o", ("rollout (exp-one)",)),
    Case("show {trace}", ("rollout (exp-one)",)),
    Case("show {span}", ("#0  chat toy  ", "  gen_ai.response.id ")),
    Case("show {response}", ("#0  chat toy  ",)),
    Case("show @last~1 --json", found={"": 2, "1.name": "chat toy", "0.parent_id": None}),
    Case("show {demo} --transitions", ("agent\t", "calc\t\t0\t",
         "calc\t\t1\t"), ("→ lightning-otel show rollout-",)),
    Case("show {demo} --transitions --json", found={
         "": 2, "0.step": 0, "1.done": True, "1.observation.0.role": "system"}),
    Case("show exp-two --transitions", (), ("left out: 1 × ",)),
    Case("show exp-", (), ("error: 'exp-' begins", "try:"), 3),
    Case("show nothing", (), ("error: ",), 3),
    Case("show 0x{span}", ("#0  chat toy  ",)),
    Case("show 0xg", (), ("error: no rollout, trace, span or response id begins with '0xg'",), 3),
    Case("show @last~99", (), ("error: ",), 3),
    Case("show @lastly", (), ("error: ",), 3),
    Case("show '\x1b[31m\x9b\u202e'", (), ("error: ",), 3),
    Case("stats", ("spans        18 in 5 rollouts", "rewarded     3 of 8 transitions",
                   "accounted    18 ended = 18 stored", "left out     1 × "),
         ("→ lightning-otel export triplets -o triplets.jsonl ",)),
    Case("stats --format table", ("spans        18 in 5 rollouts",)),
    Case("stats --jsonl", ('{"name": "store", ', '{"name": "funnel.spans", "value": 18}')),
    Case("analyze exp-two", ("exp-two · 1 step · 2 calls · ", "task ",
                             "step\tobservation\taction\treward\tcredit", "! chat ",
                             "! nobody gave it a reward"), ("→ lightning-otel show exp-two ",)),
    Case("analyze exp-one --price toy=1,2 --json", found={
         "rollout_id": "exp-one", "findings.0.kind": "no_reward", "findings": 2, "steps": 1}),
    Case("analyze --price cheap", (), ("error: --price cheap is no price",), 2),
    Case("analyze nobody", (), ("error: ",), 3),
    Case("diff exp-one @last~2", ("- rollout exp-one", "+ rollout rollout-", "calls\t1\t2\t+1",
                                  "reward primary\t\t", "- user: hi", "+ user: What is"),
         ("→ lightning-otel show rollout-",)),
    Case("diff exp-one exp-o --json", found={"a.id": "exp-one", "left_a": 0, "said.0.sign": " ",
                                             "figures.0.change": 0}),
    Case("diff exp-one exp-one", (), ("they say the same",)),
    Case("diff @last nobody", (), ("error: ",), 3),
    Case("diff prompt@1 other@2", (), ("error: prompt@1 and other@2 are of two",), 2),
    Case("tail --once --since 1d", (), ("⚡ ", "→ lightning-otel show @last")),
    Case("plot", ("reward  3 values  mean of 5: ", "  2 rollouts without a reward",
                  "length, calls to a model  5 values"), ("→ lightning-otel show @last --find",)),
    Case("plot rewarde", (), ("error: no metric 'rewarde'",), 2),
    Case("plot -o c.html", (), ("error: c.html is no picture",), 2),
    Case("plot -o c.svg --json", (), ("error: --output writes a picture",), 2),
    Case("sql \"SELECT rollout_id, count(*) AS n, NULL AS no, [1, 2] AS list FROM spans "
         "WHERE rollout_id LIKE 'exp%' GROUP BY 1 ORDER BY 1\"",
         ("rollout_id\tn\tno\tlist", "exp-one\t2\t\t[1, 2]", "exp-two\t4\t\t[1, 2]")),
    Case("sql --json \"SELECT DATE '2026-11-20' AS day, 'infinity'::DOUBLE AS much, "
         "'ab'::BLOB AS blob, 0.5::DECIMAL(3,1) AS half\"",
         found={"0": {"day": "2026-11-20", "much": None, "blob": "YWI=", "half": "0.5"}}),
    Case(f"sql {shlex.quote(FORMULAS)} --csv", ("'=a,n,t,u,v", "'=1+1,-1.5,'-x,'@y,a=b")),
    Case("sql 'SELECT span_id FROM spans WHERE false'", ("span_id",), ("no rows",)),
    *(Case(f"sql {shlex.quote(query)}", (), ("error: ", "try:"), 1) for query in (
        "DROP VIEW spans", "INSERT INTO spans SELECT * FROM spans", "SET threads = 1",
        "COPY (SELECT 1) TO 'out.csv'", "ATTACH 'other.duckdb'", "SELECT 1; SELECT 2", "",
        "SELEC 1", "SELECT nothing FROM spans", "SELECT name::INTEGER FROM spans",
    )),
    Case("doctor", ("✓ python 3.", "✓ instrumentors: ", "nothing wrong")),
    Case("doctor --store none.duckdb", ("! no store at ",
                                        "    lightning-otel run -- python your_agent.py")),
    Case("config --json --store /somewhere", found={"0.name": "LIGHTNING_OTEL"}),
    Case("ls --store mongodb://host", (), ("error: ",), 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def names(kept: Path) -> Mapping[str, str]:
    """Ids of the store by the nouns that cases name."""
    (call,) = Store(kept).sql("SELECT * FROM calls WHERE rollout_id = 'exp-one'")
    demo = [row["rollout_id"] for row in Store(kept).rollouts() if row["agents"] == "calc"]
    cut = {noun: call[f"{noun}_id"][:20] for noun in ("trace", "span", "response")}
    return {**cut, "demo": demo[-1]}


def look_up(value: Any, path: str) -> Any:
    """What a path of names and positions leads to in JSON; of a list that it ends at, the size."""
    for part in path.split(".") if path else ():
        value = value[int(part) if isinstance(value, list) else part]
    return len(value) if isinstance(value, list) else value


def run(cli: Cli, command: str, store: object, names: Mapping[str, str] | None = None) -> Any:
    words = shlex.split(command.format_map(names) if names else command)
    return cli(*words, *(() if "--store" in words else ("--store", store)))


def begins(text: str, wanted: tuple[str, ...]) -> list[str]:
    """The beginnings of lines that no line has."""
    return [each for each in wanted if not any(line.startswith(each) for line in text.splitlines())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.command)[:60])
def test_command_answers(
    case: Case, cli: Cli, kept: Path, names: Mapping[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Data on stdout, notes on stderr, nothing that steers a terminal, and no file for looking."""
    monkeypatch.chdir(tmp_path)

    done = run(cli, case.command, kept, names)

    assert done.returncode == case.code, done.stderr
    assert begins(done.stdout, case.out) == []
    assert begins(done.stderr, case.err) == []
    assert not UNSAFE.search(done.stdout + done.stderr)
    for path, expected in case.found.items():
        assert look_up(json.loads(done.stdout), path) == expected, path
    if case.code:
        lines_of_error(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", FORMS)
def test_each_form_holds_the_same(command: str, cli: Cli, kept: Path) -> None:
    """CSV has the columns of a row in each line; --json is what --jsonl has, a line each."""
    rows = list(csv.reader(io.StringIO(run(cli, f"{command} --format csv", kept).stdout)))
    lines = run(cli, f"{command} --jsonl", kept).stdout.splitlines()
    array = json.loads(run(cli, f"{command} --json", kept).stdout)

    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows) == len(lines) + 1
    if command.split()[0] in ("ls", "show", "sql", "config"):
        assert [json.loads(line) for line in lines] == array
    for name in ("start_ns", "end_ns") if command in FORMS[:1] + FORMS[1:2] + FORMS[3:5] else ():
        for row, numbers in zip(rows[1:], array, strict=True):
            assert read_ns(row[rows[0].index(name[:-3])]) == numbers[name]


@pytest.mark.pain(13)
def test_ls_limits_and_says_so(cli: Cli, kept: Path) -> None:
    """--limit keeps the newest and says how many there are; --all keeps all."""
    few = cli("ls", "--limit", 2, "--jsonl", "--store", kept)
    every = cli("ls", "--limit", 2, "--all", "--jsonl", "--store", kept)

    assert len(few.stdout.splitlines()) == 2
    assert few.stderr.splitlines()[0] == "2 of 5 rollouts · --all for the rest"
    assert len(every.stdout.splitlines()) == 5
    assert "--all" not in every.stderr


def test_the_environment_names_the_store(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step then needs no --store."""
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(kept))

    assert cli("ls", "--jsonl").stderr == "→ lightning-otel show @last\n"


@pytest.mark.parametrize(
    ("command", "columns", "words"),
    [
        ("ls", 90, ["ROLLOUT", '{"q":']),
        ("ls traces", 70, ["…", "→"]),
        ("show exp-two", 72, ["…", "#0"]),
        ("analyze exp-one", 70, ["STEP", "! nobody gave it a reward"]),
        ("plot reward", 50, ["reward", "█"]),
        ("sql 'SELECT name, start_ns FROM spans LIMIT 2'", 100, ["NAME", "START_NS"]),
        ("sql 'FROM calls LIMIT 1'", 3000, ["── 1 of 1", "output_messages"]),
    ],
)
def test_a_terminal_gets_lines_that_fit(
    command: str, columns: int, words: list[str], terminal: Terminal, kept: Path
) -> None:
    """Texts are shortened and numbers stay whole; a row that is too wide is a line a value."""
    words_of = shlex.split(command)
    Store(kept).rollouts().rows()  # a first look that takes long shows a bar

    text = COLOURS.sub("", terminal(*words_of, "--store", kept, columns=min(columns, 100)))

    lines = [line for line in text.splitlines() if "→ lightning-otel" not in line]
    assert all(word in text for word in words)
    assert not set("\x1b\x07\x9b\u202e\u2066\u061c\u200f") & set(text)
    assert columns > 100 or max(map(len, lines)) <= columns
    if command == "ls":
        id_of_demo = lines[3].split()[0]
        assert "rollout-" in id_of_demo
        assert len(id_of_demo) < len(Store(kept).rollouts().rows()[0]["rollout_id"])


@pytest.mark.parametrize(
    "command",
    ["show", "show --findings", "ls traces", "stats", "tail --once", "sql 'FROM spans'", "doctor",
     "show @last @last", "export triplets --dry-run", "export sft -o {}", "compact", "queue",
     "redact --rollout @last --dry-run", "import {} --dry-run", "train {}", "run -- {}"],
)  # fmt: skip
def test_no_line_moves_the_cursor(
    cli: Cli, store: Store, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model, a span, an error or a file is called."""
    monkeypatch.chdir(tmp_path)
    own = {c.ROLLOUT_ID: EVIL, c.AGENT_NAME: EVIL, c.REQUEST_MODEL: EVIL, c.OPERATION: "chat"}
    for number in (1, 2):
        store.add([Span("a" * 32, f"{number:016x}", None, EVIL, number, number + 1, status="ERROR",
                        status_message=EVIL, attributes={**own, EVIL: EVIL})])  # fmt: skip

    done = cli(*shlex.split(command.format(shlex.quote(EVIL))), "--store", store.name)

    assert done.stdout + done.stderr
    assert not UNSAFE.findall(done.stdout + done.stderr)


def test_a_terminal_without_blocks_gets_ascii(terminal: Terminal, kept: Path) -> None:
    """What its encoding lacks is drawn in ASCII."""
    text = terminal("plot", "reward", "--store", kept, env={"PYTHONIOENCODING": "latin-1"})

    assert "+---" in text
    assert "*" in text


def test_a_pipe_gets_whole_texts(cli: Cli, store: Store) -> None:
    """Nothing is shortened where a program reads it; JSON keeps what the screen may not show."""
    with auto_trace(store=store, rollout_id="bare"):
        pass
    with auto_trace(store=store):
        emit_message("word " * 300 + "\x1b[31m end")

    shown, found = cli("show", "--store", store.name), cli("show", "--json", "--store", store.name)
    bare = cli("show", "bare", "--transitions", "--store", store.name)

    assert shown.stdout.count("word") == 300
    assert json.loads(found.stdout)[1]["attributes"][c.MESSAGE_BODY].endswith("\x1b[31m end")
    assert "\x1b" not in shown.stdout + found.stdout
    assert "no transitions in bare" in bare.stderr


def test_a_later_reward_is_of_its_trace(cli: Cli, copy: Path) -> None:
    """It is a reward of its trace, not a trace; spans noted as lost are counted before settling."""
    cli("reward", "exp-one", "0.5", "--store", copy)
    (segment, *_) = Path(f"{copy}.d", "live").glob("*-*.ndjson")
    with segment.open("ab") as file:
        file.write(b'{"record":"count","lost":3}\n{"record":"count","lost":4}\n')

    rows = json.loads(cli("ls", "traces", "--json", "--store", copy).stdout)
    found = json.loads(cli("stats", "--json", "--store", copy).stdout)

    assert len(rows) == 5
    assert [row["reward"] for row in rows if row["rollout_id"] == "exp-one"] == [0.5]
    assert found["accounting"]["dropped"] == {"disk": 7}


def test_versions_of_a_resource_are_told_apart(cli: Cli, copy: Path) -> None:
    """Line by line; what rewards say of them is told by the command that is named."""
    resources = Resources(State(str(copy)))
    for text in ("Be brief.", "Be kind."):
        resources.publish("prompt", text)

    done = cli("diff", "prompt@1", "prompt@2", "--store", copy)

    assert begins(done.stdout, ("-Be brief.", "+Be kind.")) == []
    assert "resources diff prompt 1 2" in done.stderr


def test_plot_has_every_point(cli: Cli, store: Store, tmp_path: Path) -> None:
    """With count and moving mean; pictures are SVG or PNG by their name."""
    with auto_trace(store=store):
        emit_reward(1.0)
    by_time = cli("plot", "reward", "--by", "time", "--store", store.name)
    fill(store, [0.0, 1.0])

    (chart,) = json.loads(
        cli("plot", "reward", "--until", "1h", "--json", "--store", store.name).stdout
    )
    done = cli("plot", "reward", "-o", tmp_path / "c.svg", "--store", store.name)
    cli("plot", "-o", tmp_path / "c.png", "--store", store.name)

    assert by_time.stdout.startswith("reward  1 value ")
    assert chart["series"][0]["points"] == [
        {"rollout": 1, "value": 0.0, "low": 0.0, "high": 0.0, "count": 1, "mean": 0.0,
         "mean_count": 1},
        {"rollout": 2, "value": 1.0, "low": 1.0, "high": 1.0, "count": 1, "mean": 0.5,
         "mean_count": 2},
    ]  # fmt: skip
    assert (done.stdout, done.stderr) == ("", f"1 curve, 3 points → {tmp_path / 'c.svg'}\n")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "source", ["current", "legacy", "openinference", "openllmetry", "agentops", "agentlightning"]
)
def test_other_conventions_look_the_same(cli: Cli, store: Store, source: str) -> None:
    """Four calls of one rollout, with question, answer and tokens; a response names its call."""
    store.add(recorded(source))

    (row,) = json.loads(cli("ls", "--json", "--store", store.name).stdout)
    shown = cli("show", "--store", store.name).stdout
    by_response = cli("show", "chatcmpl-000000000000000000000002", "--store", store.name)

    assert row["calls"] == 4
    assert "66→4 tok" in shown
    assert "→ The answer is 42" in shown
    assert "→ The answer is 391" in by_response.stdout
    assert "The answer is 42" not in by_response.stdout.splitlines()[0]


def test_doctor_exits_1_with_problems(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem is followed by what mends it, and they are counted."""
    monkeypatch.setenv("LIGHTNING_OTEL", "0")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")

    done = cli("doctor", "--store", kept)
    found = json.loads(cli("doctor", "--json", "--store", kept).stdout)

    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 problems"
    problems = [finding for finding in found if finding["level"] == "problem"]
    assert [set(finding) for finding in found] == [{"code", "level", "text", "remedy"}] * len(found)
    assert [finding["code"] for finding in problems] == ["recording-off", "content-off"]
    assert [finding["remedy"].split()[0] for finding in problems] == ["unset", "unset"]


def test_doctor_names_the_damage_and_the_command_that_mends_it(cli: Cli, store: Store) -> None:
    """First the problem with its command; then the command does what it says; then all is well."""
    layout = store.layout
    assert layout is not None
    with auto_trace(store=store):
        emit_message("hello")
    store.writer().seal()
    store.settle()
    for segment in layout.segments():
        segment.unlink()
    (path,) = layout.data.glob("spans-*.parquet")
    path.write_bytes(path.read_bytes()[:-100])

    found, stats, repaired, after, later = (
        run(cli, command, store.name)
        for command in ("doctor", "stats", "doctor --repair", "doctor", "stats")
    )

    lines = found.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if path.name in line)
    assert [done.returncode for done in (found, repaired, after)] == [1, 1, 0]
    assert lines[at].startswith(f"✗ data file {path.name} is damaged (the checksum")
    assert lines[at].endswith(": 2 of its 2 spans cannot be read [quarantined]")
    assert lines[at + 1] == f"    lightning-otel doctor --repair --store {store.name}"
    assert "missing      2 spans in damaged files" in stats.stdout
    assert f"{path.name}: 0 of 2 spans are there, 2 are gone" in repaired.stderr
    assert "repaired, but 2 spans could not be got back" in repaired.stdout
    assert f"! 2 of 2 spans are gone with {path.name}" in after.stdout
    assert "gone         2 spans with damaged files" in later.stdout


def test_config_says_value_and_source_and_what_is_wrong(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the environment, an option or nowhere; a secret is said to be set."""
    good = cli("config", "check")
    for name, value in (("APPLY", "1"), ("TRAIN", "0"), ("TOKEN", "very-secret"),
                        ("SOTRE", "secret-place"), ("MAX_SIZE", "much")):  # fmt: skip
        monkeypatch.setenv(f"LIGHTNING_OTEL_{name}", value)

    done = cli("config", "--json", "--store", "/somewhere/t.duckdb")
    bad = cli("config", "check", "--csv")

    rows = {row["name"].removeprefix("LIGHTNING_OTEL_"): row for row in json.loads(done.stdout)}
    assert (rows["APPLY"]["value"], rows["APPLY"]["source"]) == ("yes", "LIGHTNING_OTEL_APPLY")
    assert (rows["STORE"]["source"], rows["DEBUG"]["source"]) == ("--store", "default")
    assert all(row["meaning"] for row in rows.values())
    assert (good.returncode, good.stdout[-14:], bad.returncode) == (0, "nothing wrong\n", 1)
    faults = [row for row in csv.DictReader(bad.stdout.splitlines()) if row["code"] == "setting"]
    unknown, former, invalid = faults
    assert former["text"].startswith("LIGHTNING_OTEL_TRAIN is gone: nothing trains unasked")
    assert unknown["remedy"] == "did you mean LIGHTNING_OTEL_STORE?"
    assert "LIGHTNING_OTEL_MAX_SIZE" in invalid["text"]
    assert "10GB" in invalid["text"]
    assert not re.search("very-secret|secret-place", done.stdout + bad.stdout)


def test_a_store_elsewhere_tells_what_is_counted_there(
    cli: Cli, store: Store, served: Callable[..., str]
) -> None:
    """A reward reaches it, files are not counted, nothing is run that it would not record."""
    pytest.importorskip("hypercorn")
    token = "a-token-of-some-length"
    attributes = {c.ROLLOUT_ID: "r1", c.OPERATION: c.CHAT, c.RESPONSE_ID: "response-1"}
    store.add([Span("1" * 32, "2" * 16, None, "chat", 10**18, 10**18 + 1, attributes=attributes)])
    url = served(store, token)

    reward = cli("reward", "resp", "0.5", "--store", url)
    shown, found = cli("stats", "--store", url), cli("stats", "--json", "--store", url)
    ran = cli("run", "--store", url, "--", "true")

    assert (reward.returncode, ran.returncode) == (0, 2)
    assert [row["reward"] for row in store.rollouts()] == [0.5]
    assert "show r1" in reward.stderr
    assert "2 in 1 rollout" in shown.stdout
    assert "counted where" in shown.stderr
    assert set(json.loads(found.stdout)) == {"store", "funnel", "left_out", "cost", "unpriced"}
    assert "send the spans on by OTLP" in ran.stderr
    assert not any(token in done.stdout + done.stderr for done in (reward, shown, found, ran))

"""``run``: any program as it is, all its processes under one rollout, its own exit code."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.cli.conftest import Cli, lines_of_error
from tests.command import forget_settings
from tests.manifests import seal_manifest

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

Script = Callable[..., Path]
Family = tuple[CompletedProcess[bytes], Store]

FAMILY = """\
import concurrent.futures, multiprocessing, subprocess, sys, threading
from opentelemetry import trace
from opentelemetry.context import Context

import openai
import lightning_otel as lo

def call(word):
    with openai.OpenAI(base_url=sys.argv[1], api_key="k") as client:
        client.chat.completions.create(model=word, messages=[{"role": "user", "content": "hello"}])

def say(word):
    lo.emit_message(word)

if __name__ == "__main__":
    call("main")
    thread = threading.Thread(target=call, args=("thread",))
    thread.start(); thread.join()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(call, "pool").result()
    for method, work in (("fork", call), ("spawn", say)):
        process = multiprocessing.get_context(method).Process(target=work, args=(method,))
        process.start(); process.join()
    subprocess.run([sys.executable, "-c", "import lightning_otel as lo; lo.emit_message('child')"])
    with lo.operation("work"):
        call("nested")
    with lo.context(rollout_id="own"):
        call("own")
    trace.get_tracer("app").start_span("lonely", Context()).end()
    sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])
    sys.stdout.flush()
    print("to stderr", file=sys.stderr)
    sys.exit(7)
"""
JUDGE = """\
def judge(recording):
    spans = recording.spans()
    return {"spans": float(len(spans)), "failed": float(recording.error is not None)}
def gives_nothing(recording):
    return None
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A program with threads, pools, forks, spawns and children, run once; what came of it."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "family.py").write_text(FAMILY)
    (folder / "judge.py").write_text(JUDGE)
    store = folder / "store" / "traces.duckdb"
    with DemoServer() as server, pytest.MonkeyPatch.context() as patch:
        forget_settings(patch)
        done = subprocess.run(
            [
                sys.executable, "-m", "lightning_otel", "run", "--store", str(store),
                "--rollout-id", "the-run", "--task", '{"goal": "all"}', "--agent", "bob",
                "--reward-evaluator", "judge:judge",
                "python", "family.py", server.base_url, "--store", "not-ours",
            ],
            input=b"\x00\xff raw bytes\n",
            capture_output=True,
            cwd=folder,
            timeout=55,
        )  # fmt: skip
    return done, Store(store)


def model_of(span: Span) -> str:
    """What a call of the family is called, or what a message says."""
    return str(
        span.attributes.get(c.REQUEST_MODEL) or span.attributes.get(c.MESSAGE_BODY) or span.name
    )


def test_run_passes_streams_and_code_through(family: Family) -> None:
    """To the byte; the exit code is the program's, and so are options after its name."""
    done, store = family

    assert done.returncode == 7
    assert done.stdout == b"\nsetyb war \xff\x00"
    assert done.stderr.startswith(b"to stderr\n")
    assert not (Path(store.name).parent.parent / "not-ours").exists()
    assert store.name.endswith("/store/traces.duckdb")


def test_run_keeps_every_process_in_one_rollout(family: Family) -> None:
    """Threads, pools, forked and spawned processes and other Pythons are recorded, each once."""
    _, store = family

    found = {model_of(span): span for span in store.spans()}

    ours = {"main", "thread", "pool", "fork", "spawn", "child", "nested", "lonely"}
    assert ours <= set(found)
    assert {found[name].rollout_id for name in ours} == {"the-run"}
    assert found["own"].rollout_id == "own"
    assert len({found[name].process for name in ("main", "fork", "spawn", "child")}) == 4
    assert {found[name].attributes[c.AGENT_NAME] for name in ours} == {"bob"}
    assert len(store.spans().rows()) == len(found)


def test_run_is_the_parent_of_what_has_none(family: Family) -> None:
    """In every process a span without a parent hangs under the run's root span."""
    _, store = family

    spans = {span.span_id: span for span in store.spans()}
    (root,) = (span for span in spans.values() if span.name == c.SPAN_ROLLOUT)
    children = {model_of(span) for span in spans.values() if span.parent_span_id == root.span_id}
    assert children >= {"main", "thread", "pool", "fork", "spawn", "child", "own"}
    (nested,) = (span for span in spans.values() if model_of(span) == "nested")
    assert spans[nested.parent_span_id or ""].name == c.SPAN_OPERATION
    assert {span.trace_id for span in spans.values() if span.name != "lonely"} == {root.trace_id}
    assert root.attributes[c.OPERATION_NAME] == "family.py"
    assert root.status == "ERROR"
    assert "exit status 7" in root.status_message
    assert json.loads(root.attributes[c.TASK]) == {"goal": "all"}


def test_run_applies_the_reward_evaluator(family: Family) -> None:
    """The evaluator sees the spans of every process and how the program ended."""
    _, store = family

    (reward,) = store.sql("SELECT * FROM rewards")

    assert (reward["name"], reward["rollout_id"]) == ("spans", "the-run")
    assert reward["value"] >= 8
    (span,) = (span for span in store.spans() if span.span_id == reward["span_id"])
    assert span.attributes[f"{c.REWARD_PREFIX}.1.value"] == 1.0


TASKS = """\
import asyncio, multiprocessing, sys
import lightning_otel as lo

async def solve(task):
    async with lo.auto_trace(task=task):
        await asyncio.sleep(0.02)
        with lo.auto_trace(task="a part"):
            lo.emit_action("say", task)
        lo.emit_reward(float(len(task)))

async def solve_all(*tasks):
    await asyncio.gather(*map(solve, tasks))

def work():
    asyncio.run(solve_all("dddd"))

if __name__ == "__main__":
    asyncio.run(solve_all("a", "bb", "ccc"))
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start(); process.join()
    if "outside" in sys.argv:
        with lo.auto_trace():  # names no task
            lo.emit_action("say", "outside")
        with lo.context(task="five"):
            lo.emit_reward(5.0)
"""


@pytest.mark.parametrize(
    ("options", "arguments", "rewards"),
    [
        ([], [], [1.0, 2.0, 3.0, 4.0]),
        ([], ["outside"], [1.0, 2.0, 3.0, 4.0, 5.0]),
        (["--agent", "a"], [], [1.0, 2.0, 3.0, 4.0]),
        (["--rollout-id", "r"], [], [10.0]),
        (["--task", "all"], [], [10.0]),
        (["--reward-evaluator", "judge:gives_nothing"], [], [10.0]),
    ],
)
def test_run_keeps_tasks_apart_unless_it_is_one(
    options: list[str], arguments: list[str], rewards: list[float], spawn: Cli, tmp_path: Path
) -> None:
    """Each block with a task is a rollout, several at once too; what stands outside is another."""
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "judge.py").write_text(JUDGE)
    store = Store(tmp_path / "t" / "t.duckdb")

    done = spawn(
        "run", "--store", store.name, *options, "--", sys.executable, "tasks.py", *arguments,
        cwd=tmp_path,
    )  # fmt: skip

    assert (done.returncode, "4 rewards" in done.stderr) == (0, not arguments)
    found = store.sql("SELECT reward FROM rollouts ORDER BY reward").rows()
    assert [row["reward"] for row in found] == rewards
    steps = store.transitions()
    assert len({step.rollout_id for step in steps}) == len(rewards)
    assert sum(step.reward for step in steps) == sum(rewards)


def test_run_says_what_was_kept(family: Family) -> None:
    """The closing line counts spans, calls and rewards, also of rollouts the program named."""
    done, store = family

    lines = done.stderr.decode().splitlines()
    spans = store.spans().rows()
    calls = sum(span.operation == c.CHAT for span in spans)
    assert calls == 6
    assert lines[1] == f"⚡ {len(spans) - 1} spans, {calls} calls, 1 reward → {store.name}"
    # Where the command is not on the PATH, the hint names the whole path.
    assert lines[-1].endswith(f"lightning-otel show the-run --store {store.name}")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(text: str, name: str = "app.py") -> Path:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


def test_run_takes_modules_and_nests(spawn: Cli, script: Script, tmp_path: Path) -> None:
    """``-m`` works, one's own ``sitecustomize`` still runs, and a run in a run is a part of it."""
    script("print('customized by', __name__, __file__)", "sitecustomize.py")
    script("import lightning_otel as lo, sitecustomize; lo.emit_message('inner')", "tool.py")
    path = tmp_path / "s.duckdb"
    ours = [sys.executable, "-m", "lightning_otel", "run", "--", "python", "-m", "tool"]

    done = spawn(
        "run", "--store", path, "--quiet", "--", *ours, env={"PYTHONPATH": python_path(tmp_path)}
    )

    spans = {span.span_id: span for span in Store(path).spans()}
    roots = [span for span in spans.values() if span.name == c.SPAN_ROLLOUT]
    outer, inner = sorted(roots, key=lambda span: span.start_ns)
    (said,) = (span for span in spans.values() if span.name == c.SPAN_MESSAGE)
    assert done.returncode == 0
    assert done.stdout == f"customized by sitecustomize {tmp_path / 'sitecustomize.py'}\n" * 3
    assert (outer.parent_span_id, inner.parent_span_id) == (None, outer.span_id)
    assert said.parent_span_id == inner.span_id
    assert {span.rollout_id for span in spans.values()} == {outer.rollout_id}
    assert inner.attributes[c.OPERATION_NAME] == "tool"
    assert done.stderr.splitlines()[0] == f"⚡ 1 span, 0 calls, 0 rewards → {path}"


def python_path(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.pain(1)
def test_run_takes_console_programs(spawn: Cli, tmp_path: Path) -> None:
    """A program beside our Python is found by name; with nothing recorded that is said."""
    done = spawn("run", "--store", tmp_path / "s.duckdb", "lightning-otel", "--version")

    assert done.returncode == 0
    assert done.stdout.startswith("lightning-otel ")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("⚡ 0 spans, 0 calls, 0 rewards → ")
    assert lines[1].startswith("  warning: the program made no span; does the program call a model")
    assert lines[2] == f"→ lightning-otel doctor --store {tmp_path / 's.duckdb'}"


def test_run_does_not_ask_why_a_program_that_failed_made_no_span(cli: Cli, tmp_path: Path) -> None:
    """Its own error says that."""
    done = cli("run", "--store", tmp_path / "s.duckdb", "--", "false")

    assert done.returncode == 1
    assert done.stderr.splitlines()[1] == (
        "  warning: the program failed before its first span; its rollout is kept as failed"
    )


@pytest.mark.parametrize(
    ("program", "place", "code"),
    [
        ("true", "s.duckdb", 3),
        ("kill -KILL $$", "s.duckdb", 137),
        ("true", "file/s.duckdb", 3),
    ],
)
def test_run_requires_spans_on_success_only(
    spawn: Cli, tmp_path: Path, program: str, place: str, code: int
) -> None:
    """Without a span, for any reason, a success ends with 3; a failure's own code stays."""
    (tmp_path / "file").write_text("")
    options = ("--require-spans", "--quiet", "--store", tmp_path / place)

    done = spawn("run", *options, "--", "sh", "-c", program)

    assert (done.returncode, done.stdout) == (code, "")
    if place == "s.duckdb":
        (row,) = Store(tmp_path / place).rollouts()
        assert done.stderr == ""
        assert row["status"] == ("succeeded" if code == 3 else "failed")


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Signals end programs started here, also if the tests run under nohup or in the background."""
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGINT)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
def test_run_hands_signals_on(script: Script, tmp_path: Path) -> None:
    """A signal sent to ``run`` reaches the program, whose answer to it counts."""
    program = script(
        """\
        import signal, sys, time
        def leave(number, frame):
            print("got", signal.Signals(number).name, flush=True)
            if number == signal.SIGTERM:
                sys.exit(9)
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leave)
        print("ready", flush=True)
        while True:
            time.sleep(0.01)  # in a pause() a signal that came just before it would go unheard
        """
    )
    store = tmp_path / "s.duckdb"
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", "run", "--store", str(store), str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        try:
            heard = [child.stdout.readline()]
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                child.send_signal(number)
                heard.append(child.stdout.readline())
            code = child.wait(50)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    assert heard == ["ready\n", "got SIGUSR1\n", "got SIGHUP\n", "got SIGINT\n", "got SIGTERM\n"]
    assert code == 9
    assert Store(store).rollouts().rows()[0]["status"] == "failed"


def test_run_leaves_the_keyboard_to_the_program(script: Script) -> None:
    """Ctrl-C in a terminal reaches the program once, and ``run`` waits for it."""
    program = script(
        """\
        import signal, time
        heard = []
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        print("ready", flush=True)
        while not heard:
            time.sleep(0.01)
        time.sleep(0.3)
        print("heard", len(heard), flush=True)
        """
    )
    child, ours = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "lightning_otel", "run", str(program)])
    found = read_until(ours, b"ready")
    os.write(ours, b"\x03")
    found += read_until(ours, b"show", b"doctor")
    _, status = os.waitpid(child, 0)
    os.close(ours)

    assert b"heard 1" in found
    assert os.waitstatus_to_exitcode(status) == 0


def read_until(descriptor: int, *marks: bytes) -> bytes:
    """What comes out of a terminal up to a mark or its end."""
    found = b""
    while not any(mark in found for mark in marks):
        try:
            block = os.read(descriptor, 4096)
        except OSError:
            break
        if not block:
            break
        found += block
    return found


def test_run_names_a_python_without_us(spawn: Cli, tmp_path: Path) -> None:
    """A Python that lacks lightning-otel prints what it does bare; the end counts it."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"

    done = spawn(
        "run", "--store", tmp_path / "s.duckdb", "--", python, "-c", "print('fine')",
        env={"PYTHONPATH": ""},
    )  # fmt: skip

    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert lines[0].startswith("⚡ 0 spans")
    assert lines[1] == f"  not recorded: 1 process of {python}, without lightning-otel"


@pytest.mark.parametrize("case", ["no place", "newer", "off"])
def test_run_runs_where_nothing_can_be_kept(spawn: Cli, tmp_path: Path, case: str) -> None:
    """Without a usable store the program runs all the same, and what is wrong is named twice."""
    (tmp_path / "file").write_text("")
    store = tmp_path / "s.duckdb"
    environment: Mapping[str, str] = {"PYTHONPATH": python_path(tmp_path)}
    if case == "no place":
        store = tmp_path / "file" / "s.duckdb"
    elif case == "newer":
        folder = tmp_path / "s.duckdb.d"
        folder.mkdir()
        (folder / "manifest.ndjson").write_bytes(seal_manifest([], schema=99))
    else:
        environment = {**environment, "LIGHTNING_OTEL": "0"}

    program = 'echo "$PYTHONPATH"; exit 6'
    done = spawn("run", "--store", store, "--", "sh", "-c", program, env=environment)

    words = {"no place": "cannot make the store", "newer": "schema 99", "off": "switched off"}
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (6, f"{environment['PYTHONPATH']}\n")
    assert lines[-1].startswith("⚡ nothing was recorded: ")
    assert words[case] in lines[-1]
    if case != "off":
        assert words[case] in lines[0]
        assert lines[-2] == "the program runs without recording"


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        ("-m lightning_otel run --quiet -- {python} -c 'print(17)'", True),
        ("-m lightning_otel run --quiet --store {store} -- {python} -c 'print(17)'", False),
        ("-c 'import lightning_otel; print(17)'", False),
        (
            "-c 'import lightning_otel as lo\nwith lo.auto_trace(): lo.emit_message(str())\n"
            "print(17)'", True,
        ),
    ],
)  # fmt: skip
def test_a_program_runs_in_a_folder_that_is_gone(
    tmp_path: Path, command: str, is_ours: bool
) -> None:
    """As it would without us; where no store can be found because of it, that is said once."""
    gone = tmp_path / "gone"
    environment = {name: os.environ[name] for name in os.environ if name != "LIGHTNING_OTEL_STORE"}
    gone.mkdir()
    python = shlex.quote(sys.executable)
    words = command.format(python=python, store=tmp_path / "s.duckdb")

    done = subprocess.run(
        ["sh", "-c", f"rmdir {gone}; exec {python} {words}"],
        cwd=gone, env=environment, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "17\n"), done.stderr
    assert done.stderr.count("the working directory is gone") == is_ours
    assert "Traceback" not in done.stderr


def test_run_names_spans_the_disk_refused(spawn: Cli, script: Script, tmp_path: Path) -> None:
    """A disk that is full for a while costs the program nothing, and the loss is counted."""
    program = script(
        """\
        import resource, sys
        import lightning_otel as lo
        lo.emit_message("before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        for number in range(12):
            lo.emit_message("x" * 1_000_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        lo.emit_message("after")
        print("done")
        """
    )
    path = tmp_path / "s.duckdb"

    done = spawn("run", "--store", path, "--", "python", program)

    spans = [span for span in Store(path).spans() if span.name == c.SPAN_MESSAGE and span.end_ns]
    found = re.search(r"^  (\d+) spans not stored: the disk refused them$", done.stderr, re.M)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert found is not None
    assert int(found[1]) + len(spans) == 14
    assert spans[-1].attributes[c.MESSAGE_BODY] == "after"


def test_run_keeps_the_code_when_the_store_goes(spawn: Cli, tmp_path: Path) -> None:
    """A program that removes the store it is recorded in still ends with its own code."""
    path = tmp_path / "s.duckdb"

    done = spawn("run", "--store", path, "--", "sh", "-c", f"rm -r {path}.d; exit 6")

    assert done.returncode == 6
    assert done.stderr != ""
    assert "Traceback" not in done.stderr


def test_run_keeps_the_code_when_nobody_listens(tmp_path: Path) -> None:
    """With stderr closed at the other end the exit code is still the program's."""
    with subprocess.Popen(
        [
            sys.executable, "-m", "lightning_otel", "run", "--store", str(tmp_path / "s.duckdb"),
            "--", "sh", "-c", "cat; exit 6",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stderr is not None
        child.stderr.close()
        child.communicate(b"")

    assert child.returncode == 6


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        *((["--", name], 127, name) for name in ("no-such-program", "./no-such", "missing.py")),
        (["--store", ":memory:", "--", "true"], 2, "on disk"),
        (["--reward-evaluator", "nothing:here", "--", "true"], 2, "nothing:here"),
        (["--reward-evaluator", "json:nothing", "--", "true"], 2, "nothing"),
        (["--reward-evaluator", "json", "--", "true"], 2, "MODULE:NAME"),
        (["-q", "--", "true"], 2, "-q"),
    ],
)
def test_run_refuses_before_it_runs(
    cli: Cli, tmp_path: Path, args: list[str], code: int, word: str
) -> None:
    """What cannot be run or loaded is refused with its remedy, and no store is made."""
    done = cli("run", *args)

    lines_of_error(done)
    assert done.returncode == code
    assert word in done.stderr
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize("option", [[], ["--enable-retokenization-fix"]], ids=["without", "with"])
def test_run_has_servers_asked_for_token_ids_only_when_told(
    spawn: Cli, server: DemoServer, tmp_path: Path, option: list[str]
) -> None:
    """The program stays as it is, and its calls have the engine's own tokens."""
    store = tmp_path / "traces.duckdb"
    (tmp_path / "agent.py").write_text(
        "import sys, openai\n"
        "with openai.OpenAI(base_url=sys.argv[1], api_key='k') as client:\n"
        "    said = [{'role': 'user', 'content': 'hello'}]\n"
        "    client.chat.completions.create(model='toy', messages=said)\n"
    )

    done = spawn("run", "--store", store, *option, "python", "agent.py", server.base_url)

    assert done.returncode == 0
    assert ["return_token_ids" in (exchange.request or {}) for exchange in server.log] == [
        bool(option)
    ]
    assert Store(store).report().exact == bool(option)
    assert ("1 with token ids" in done.stderr) == bool(option)


def test_run_of_a_small_program_opens_no_database(tmp_path: Path) -> None:
    """What it recorded is counted in its segments, and the catalogue is made of a template."""
    command = [sys.executable, "-X", "importtime", "-m", "lightning_otel", "run"]
    program = ["--", "python", "-c", "import lightning_otel as lo; lo.emit_reward(1.0)"]
    done = subprocess.run(
        [*command, "--store", str(tmp_path / "t.duckdb"), *program],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip

    assert "⚡ 1 span, 0 calls, 1 reward → " in done.stderr
    assert not re.search(r"\| +duckdb$", done.stderr, re.MULTILINE)


def test_run_leaves_a_disabled_instrumentor_off(
    cli: Cli, tmp_path: Path, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own switch counts as under ``opentelemetry-instrument``; others stay on."""
    code = "import openai; openai.OpenAI().chat.completions.create(model='m', messages=[])"
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    counts = []
    for disabled in ("openai,lightning-openai-agents", "lightning-openai"):
        monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", disabled)
        place = tmp_path / disabled / "traces.duckdb"
        cli("run", "--store", place, "--", sys.executable, "-c", code)
        counts.append(len(Store(place).sql("SELECT 1 FROM calls").rows()))

    assert counts == [1, 0]


def test_run_and_doctor_name_a_sampler_that_leaves_spans_out(
    spawn: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a disk, which took what it was given."""
    store, fault = tmp_path / "traces.duckdb", "OTEL_TRACES_SAMPLER=always_off leaves spans out"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")

    done = spawn("run", "--store", store, "--", sys.executable, "-c", "")
    doctor = spawn("doctor", "--store", store)

    assert (done.returncode, done.stderr.count(fault)) == (0, 1), done.stderr
    assert "disk" not in done.stderr
    assert fault in doctor.stdout

"""``run``: what the program starts sees nothing of ours, and what it executes is apart."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import entry_points
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.cli.conftest import Cli
from tests.viewer.client import AskingOf

import lightning_otel
from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

START = Path(lightning_otel.__file__).parent / "provider" / "startup" / "sitecustomize.py"
ASK = """\
import os, sys, openai
def ask(text):
    with openai.OpenAI(base_url=os.environ["URL"], api_key="k") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without lightning-otel."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def run_bare(*command: object, **environment: str) -> CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=50,
        env={**os.environ, **environment},
    )  # fmt: skip


def models(store: Path) -> dict[str, Any]:
    """Each call's span by what was asked."""
    return {
        json.loads(span.attributes[c.INPUT_MESSAGES])[0]["parts"][0]["content"]: span
        for span in Store(store).spans()
        if c.INPUT_MESSAGES in span.attributes
    }


LOOK = "import sys; print(42, len(sys.modules), 'lightning_otel' in sys.modules)"
AGENT = """\
import json, subprocess, sys
for command in json.loads(sys.argv[1]):
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.returncode, done.stdout.split()[:1], done.stderr)
"""


@pytest.mark.parametrize("children", ["all", "own", "none"])
def test_what_tools_print_is_what_they_print_bare(
    spawn: Cli, bare_python: Path, tmp_path: Path, children: str
) -> None:
    """Whatever Python it is, however it is started, and where warnings are errors."""
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "zipped.py").write_text("print(17)")
    shutil.make_archive(str(archive), "zip", archive)
    zipped = f"import sys; sys.path.insert(0, {str(archive) + '.zip'!r}); import zipped"
    commands = [
        [str(bare_python), "-c", "print(42)"],
        [sys.executable, "-W", "error", "-c", "import openai; print(3)"],
        [sys.executable, "-W", "error", "-c", zipped],
        [sys.executable, "-c", "import importlib, sitecustomize, json; importlib.reload(json)"],
        [sys.executable, "-c", "import importlib, json, openai; importlib.reload(openai)"],
        *([sys.executable, flag, "-c", "print(4)"] for flag in ("-S", "-I", "-E", "-s")),
    ]
    commands += [[found, "-c", "print 2"] for found in [shutil.which("python2.7")] if found]
    (tmp_path / "agent.py").write_text(AGENT)
    agent = ["python", tmp_path / "agent.py", json.dumps(commands)]
    own = {"PYTHONPATH": str(archive), "PYTHONNOUSERSITE": "1"}
    (archive / "sitecustomize.py").write_text("")

    bare = run_bare(sys.executable, *agent[1:], **own)
    done = spawn("run", "--quiet", "--children", children, "--", *agent, env=own)

    assert bare.returncode == 0, bare.stderr
    assert done.stdout == bare.stdout
    assert done.stderr == bare.stderr == ""


def test_python_that_imports_nothing_of_ours_loads_nothing_of_ours(spawn: Cli) -> None:
    """It has at most 15 modules more; so has one that only looks for a library."""
    program = f"import importlib.util; importlib.util.find_spec('openai'); {LOOK}"

    bare = run_bare(sys.executable, "-c", program)
    done = spawn("run", "--quiet", "--", "python", "-c", program)

    _, before, _ = bare.stdout.split()
    _, after, is_loaded = done.stdout.split()
    assert int(after) - int(before) <= 15
    assert is_loaded == "False"


@pytest.mark.parametrize("name", ["context", "propagate", "trace", "sdk.trace"])
def test_telemetry_is_whole_whichever_module_comes_first(
    name: str, cli: Cli, tmp_path: Path
) -> None:
    """The recording starts before the first module of OpenTelemetry, which it imports itself."""
    program, store = tmp_path / "program.py", tmp_path / "s.duckdb"
    program.write_text(
        f"import opentelemetry.{name} as first, sys\n"
        f"assert sys.modules['opentelemetry.{name}'] is first\n"
        "from opentelemetry import trace\n"
        "with trace.get_tracer('x').start_as_current_span('mine'): pass\n"
    )

    done = cli("run", "--store", store, "--", sys.executable, program)

    assert done.returncode == 0, done.stderr
    assert "mine" in {span.name for span in Store(store).spans()}


def test_start_is_python_2_and_knows_each_library() -> None:
    """No syntax that Python 2.7 lacks, and the libraries are those of the instrumentors."""
    tree = ast.parse(START.read_text())
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef)
    names: dict[str, Any] = {}
    for name in ("LIBRARIES", "_CLIENTS"):
        text = START.read_text().partition(f"\n{name} = ")[2].partition('"""')[0]
        exec(f"{name} = {text}", names)

    for node in ast.walk(tree):
        assert not isinstance(node, newer), ast.dump(node)
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.args, node.args.vararg, node.args.kwarg]
            assert not node.args.kwonlyargs
            assert node.returns is None
            assert not any(each.annotation for each in every if each)
    patched = {
        module.partition(".")[0]
        for entry in entry_points(group="opentelemetry_instrumentor")
        if entry.name.startswith("lightning-")
        for module in entry.load()().patches()
    }
    clients = {module.partition(".")[0] for module in names["_CLIENTS"]}
    assert names["LIBRARIES"] | clients == patched
    assert not names["LIBRARIES"] & clients


THREADS = f"""{ASK}
import threading
from importlib import import_module
names = ("langchain_core.runnables", "agents", "autogen_core", "opentelemetry.trace")
threads = [threading.Thread(target=import_module, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
ask("hello")
from langchain_core.runnables import RunnableLambda
RunnableLambda(len, name="counted").invoke("word")
"""


def test_threads_that_import_at_once_are_recorded(
    spawn: Cli, server: DemoServer, tmp_path: Path
) -> None:
    """Each library is patched, whichever thread is first."""
    for module in ("langchain_core", "agents", "autogen_core"):
        pytest.importorskip(module)
    store = tmp_path / "s.duckdb"

    done = spawn("run", "--store", store, "--", "python", "-c", THREADS,
                 env={"URL": server.base_url})  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert set(models(store)) == {"hello"}
    assert any("counted" in span.name for span in Store(store).spans())


TESTED = f"""{ASK}
import lightning_otel as lo
from opentelemetry import trace
tracer = trace.get_tracer("app")
with tracer.start_as_current_span("GET /"):
    ask("tested")
late = tracer.start_span("late")
late.set_attribute("gen_ai.operation.name", "invoke_agent")
late.end()
lo.emit_message("said")
with lo.auto_trace(rollout_id="of-the-tested"):
    ask("traced")
"""
PROGRAM = f"""{ASK}
import multiprocessing, subprocess
if __name__ == "__main__":
    if sys.argv[-1] == "again":
        ask("again")
        raise SystemExit
    ask("agent")
    for method in ("fork", "spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=ask, args=(method,))
        worker.start(); worker.join()
    seen = [name for name in ("PYTHONPATH", "TRACEPARENT", *os.environ) if "LIGHTNING" in name]
    subprocess.run([sys.executable, sys.argv[1]], check=True)
    subprocess.run(["sh", "-c", "env"], check=True)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""
OWN = {"agent", "fork", "spawn", "forkserver", "again"}


@pytest.fixture
def programs(tmp_path: Path) -> list[object]:
    """A program with workers, and the one that it executes."""
    for name, text in (("program", PROGRAM), ("tested", TESTED)):
        (tmp_path / f"{name}.py").write_text(text)
    return ["python", tmp_path / "program.py", tmp_path / "tested.py"]


def test_executed_program_is_apart(
    spawn: Cli, cli: Cli, server: DemoServer, programs: list[object], tmp_path: Path
) -> None:
    """Workers and what the program becomes are its own; @last is what the user started."""
    path = tmp_path / "s.duckdb"

    done = spawn("run", "--store", path, "--rollout-id", "r1", "--", *programs,
                 env={"URL": server.base_url})  # fmt: skip

    assert done.returncode == 0, done.stderr
    found, store = models(path), Store(path)
    programs_of = {text: span.attributes.get(c.EXECUTED) for text, span in found.items()}
    assert set(found) == {*OWN, "tested", "traced"}
    assert {text for text, program in programs_of.items() if program is None} == OWN
    assert programs_of["tested"] == programs_of["traced"]
    names = {span.name for span in store.spans()}
    assert {"late", c.SPAN_MESSAGE} <= names
    assert "GET /" not in names
    paths = [[step.span_id for step in path.transitions] for path in store.trajectories()]
    assert [found["tested"].span_id] in paths
    assert cli("show", "@last", "--json", "--store", path).stdout == (
        cli("show", "r1", "--json", "--store", path).stdout
    )
    assert "not stored" not in cli("doctor", "--store", path).stdout


@pytest.mark.parametrize(("children", "expected"), [("own", OWN), ("none", {"agent", "again"})])
def test_children_are_chosen(
    spawn: Cli, server: DemoServer, programs: list[object], tmp_path: Path, children: str,
    expected: set[str],
) -> None:  # fmt: skip
    """Others are neither recorded nor see a variable, by the option or by the environment's."""
    path = tmp_path / "s.duckdb"
    bare = {"URL": server.base_url, "LIGHTNING_OTEL_CHILDREN": children}

    done = spawn("run", "--quiet", "--store", path, "--", *programs, env=bare)

    seen = set(re.findall(r"^(PYTHONPATH|TRACEPARENT|LIGHTNING_OTEL\w*)=", done.stdout, re.M))
    assert done.returncode == 0, done.stderr
    assert set(models(path)) == expected
    assert seen - set(os.environ) == {"LIGHTNING_OTEL_CHILDREN"}


def test_pythons_that_could_not_record_are_counted(
    spawn: Cli, bare_python: Path, tmp_path: Path
) -> None:
    """By the parent, at the end, with the libraries that they imported; nothing stays behind."""
    (tmp_path / "openai.py").write_text("")
    commands = [[str(bare_python), "-c", code] for code in ("import openai", "pass")]
    (tmp_path / "agent.py").write_text(AGENT)

    done = spawn("run", "--store", tmp_path / "s.duckdb", "--", "python", tmp_path / "agent.py",
                 json.dumps(commands), env={"PYTHONPATH": str(tmp_path)})  # fmt: skip

    line = f"not recorded: 2 processes of {bare_python}, without lightning-otel"
    assert f"  warning: {line}, which imported openai\n" in done.stderr
    assert not [*(tmp_path / "s.duckdb.d").glob("unrecorded*")]


def test_spans_without_a_call_are_a_warning(spawn: Cli, cli: Cli, tmp_path: Path) -> None:
    """``run`` and ``doctor`` say so, and ``--require-spans`` is not content."""
    path = tmp_path / "s.duckdb"
    code = (
        "from opentelemetry import trace\n"
        "with trace.get_tracer('mcp').start_as_current_span('tools/list'): pass"
    )

    done = spawn("run", "--require-spans", "--store", path, "--", "python", "-c", code)
    examined = cli("doctor", "--store", path)

    assert done.returncode == 3
    assert "\n  warning: no request to a model was recorded; " in done.stderr
    assert "no request to a model" in examined.stdout
    assert examined.stdout.endswith("no problem, 1 warning\n")


def test_agents_without_names_come_with_what_names_them(
    spawn: Cli, cli: Cli, server: DemoServer, tmp_path: Path
) -> None:
    """At the end of ``run`` and in ``doctor``; not where somebody is named."""
    (tmp_path / "smolagents.py").write_text("")
    code = f"{ASK}\nimport smolagents; ask('hello')"
    told = []
    for name, options in (("a", ()), ("b", ("--agent", "bob"))):
        path = tmp_path / f"{name}.duckdb"
        done = spawn("run", "--store", path, *options, "--", "python", "-c", code,
                     env={"URL": server.base_url, "PYTHONPATH": str(tmp_path)})  # fmt: skip
        told.append((done.stderr, cli("doctor", "--store", path).stdout))

    remedy = "pip install openinference-instrumentation-smolagents"
    assert [[remedy in text for text in texts] for texts in told] == [[True] * 2, [False] * 2]


COUNTED = f"""{ASK}
import time
from opentelemetry import context, trace
tracer = trace.get_tracer("a_framework")
keys = {{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}}
agent = tracer.start_span("invoke_agent a", attributes={{"gen_ai.operation.name": "invoke_agent"}})
context.attach(trace.set_span_in_context(agent))
tracer.start_span("prepared", attributes=keys).end()
client = openai.OpenAI(base_url=os.environ["URL"], api_key="k", max_retries=1)
def send(text, **more):
    request = {{"model": "m", "messages": [{{"role": "user", "content": text}}], **more}}
    return client.chat.completions.create(**request)
with tracer.start_as_current_span("chat m", attributes=keys):
    ask("whole")
with tracer.start_as_current_span("chat m", attributes=keys):
    list(send("streamed", stream=True))
name, early = "llm.{{}}_messages.0.message.{{}}", time.time_ns()
late = trace.get_tracer("openinference.instrumentation.llama_index").start_span(
    "OpenAI.astream_chat", attributes={{"openinference.span.kind": "LLM", "llm.model_name": "m",
    name.format("input", "role"): "user", name.format("input", "content"): "late"}})
chunks = [chunk for chunk in send("late", stream=True) if chunk.choices]
late.set_attribute(name.format("output", "role"), "assistant")
late.set_attribute(name.format("output", "content"),
                   "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
late.end(end_time=early)
try: send("failing", model="fail-400")
except openai.BadRequestError: pass
send("tried twice", model="flaky-500")
client.embeddings.create(model="m", input="embedded")
agent.end()
"""


def test_one_request_is_one_call_everywhere(
    spawn: Cli, cli: Cli, server: DemoServer, asking: AskingOf, tmp_path: Path
) -> None:
    """However many record it, whole or streamed, ended early, failed or tried again."""
    path = tmp_path / "s.duckdb"

    done = spawn("run", "--store", path, "--", "python", "-c", COUNTED,
                 env={"URL": server.base_url})  # fmt: skip
    (row,) = json.loads(cli("ls", "--json", "--store", path).stdout)
    stats = json.loads(cli("stats", "--json", "--store", path).stdout)
    findings = json.loads(cli("show", "@last", "--findings", "--json", "--store", path).stdout)
    report, store = Store(path).report(), Store(path)
    (trace_id,) = {span.trace_id for span in store.spans() if span.name == "chat m"}
    paths = (
        "/home/funnel", "/traces?show=models&show=calls&show=spans", f"/traces/{trace_id}",
    )  # fmt: skip
    funnel, traces, trace = (asking(store).get(path).words for path in paths)

    assert len(server.log) == 7
    assert "⚡ 11 spans, 6 calls, " in done.stderr
    assert (row["calls"], report.calls, report.transitions, findings["calls"]) == (6, 6, 4, 6)
    assert len(store.sql("SELECT 1 FROM calls").rows()) == 6
    assert '"calls": 6' in json.dumps(stats)
    assert "Model calls 6 " in funnel
    assert " m 6 11 " in traces
    assert "6 calls, 4 steps" in trace
    assert "nothing wrong" in cli("doctor", "--store", path).stdout

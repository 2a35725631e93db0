"""Runs tests against real releases that cannot all live in one environment.

    python tests/environments.py [NAME ...] [--jobs N] [--folder FOLDER] [--list]

Each name is one virtual environment, made here in this order: the newest releases of what
lives together, the oldest we claim, and one for each library that pins what the others need. A
framework's tests skip themselves where the framework is missing; in the environment that is made
for them such a skip is a failure.

With a folder the environments are kept there, and made anew only when their requirements changed.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_LIMIT_S = 1200
TEST_LIMIT_S = 900
TAIL_LINES = 40
# openai breaks when a pre-release of the old httpx is importable.
RUNNERS = "httpx<1 hypothesis>=6.140 pytest>=8.4 pytest-randomly>=4 pytest-timeout>=2.4"
"""What the tests themselves need, in every environment."""
TOGETHER = (
    "tests/test_capture.py tests/instrumentors/test_base.py tests/instrumentors/openai "
    "tests/instrumentors/langchain tests/instrumentors/autogen tests/instrumentors/openai_agents"
)
"""Tests of what lives in one environment."""
EXAMPLE = "tests/examples/test_examples.py::test_program_is_captured_once_and_undisturbed"
"""The test of programs under ``examples/``."""
APPLICATION = (
    "tests/applications/test_applications.py::test_steps_are_the_agents_and_requests_as_bare"
)
"""The test of whole applications."""
_FRAMEWORKS = "tests/examples/test_frameworks.py"


def list_tests(*programs: str) -> str:
    """List the tests of programs under ``examples/frameworks/``."""
    modes = ("-off-whole-R", "-on-streamed-O")
    steps = [f"test_each_request_is_a_step_of_its_agent[{p}{m}]" for p in programs for m in modes]
    runs = [f"test_program_does_the_same_recorded[{program}]" for program in programs]
    return " ".join(f"{_FRAMEWORKS}::{name}" for name in [*steps, *runs])


def list_clients(*programs: str) -> str:
    """List the tests of programs under ``examples/clients/``."""
    test = "tests/examples/test_clients.py::test_each_request_is_a_call_and_the_program_undisturbed"
    ways = ("run", "opentelemetry-instrument")
    return " ".join(f"{test}[clients/{program}-{way}]" for program in programs for way in ways)


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment: what is installed into it, and which tests run there, each list as words.

    Attributes:
        requirements: As pip takes them, beside this checkout and ``RUNNERS``.
        paths: What pytest is given.
        shown: Distributions whose releases are printed.
        alone: Requirements that are installed without what they ask for.
        extras: Of this checkout, in brackets.
    """

    requirements: str
    paths: str
    shown: str
    alone: str = ""
    extras: str = ""


ENVIRONMENTS = {
    # 1.8 asks for a certifi that not every index has.
    "newest": Environment(
        "openai>=3 langchain>=1.4 langchain-core<1.8 langchain-openai>=1.7 langgraph>=1.2 "
        "autogen-agentchat>=0.7.5 autogen-ext[openai]>=0.7.5 openai-agents>=0.24 "
        "sqlalchemy>=2.0.40",
        f"{TOGETHER} tests/instrumentors/contract",
        "openai langchain-core langchain-openai langgraph autogen-core openai-agents "
        "opentelemetry-sdk",
    ),
    # Below these openai leaves a broken stream to the garbage collector, and LangChain does not
    # name the agents within its graphs. AutoGen's oldest release is its newest.
    "oldest": Environment(
        "openai==2.20.0 langchain==1.3.6 langchain-core==1.4.0 langchain-openai==1.1.10 "
        "langgraph==1.2.4 opentelemetry-sdk==1.40.0 sqlalchemy==2.0.40",
        "tests/test_capture.py tests/instrumentors/test_base.py tests/instrumentors/openai "
        "tests/instrumentors/langchain",
        "openai langchain-core langchain-openai langgraph opentelemetry-sdk",
    ),
    # It needs a newer openai than the oldest that the rest holds on.
    "oldest-agents": Environment(
        "openai-agents==0.24.0 opentelemetry-sdk==1.40.0",
        "tests/instrumentors/openai_agents",
        "openai-agents openai opentelemetry-sdk",
    ),
    # CrewAI keeps openai below its third release: it is called in the same ways there.
    "crewai": Environment(
        "crewai[litellm]>=1.15 sqlalchemy>=2.0.40",
        "tests/instrumentors/crewai tests/instrumentors/contract "
        "tests/instrumentors/openai/test_surfaces.py "
        f"{EXAMPLE}[crewai_crew] "
        f"{EXAMPLE}[crewai_async]",
        "crewai litellm openai",
    ),
    "ag2": Environment(
        "ag2[openai]>=0.14,<1 sqlalchemy>=2.0.40",
        "tests/instrumentors/ag2/test_classic.py tests/instrumentors/contract "
        f"{EXAMPLE}[ag2_chat] "
        f"{EXAMPLE}[ag2_async]",
        "ag2 openai",
    ),
    "ag2-1": Environment(
        "ag2[openai]>=1 sqlalchemy>=2.0.40",
        "tests/instrumentors/ag2/test_turns.py tests/instrumentors/contract",
        "ag2 openai",
    ),
    # AutoGen's tools of MCP servers need mcp below its second release, which others are past; and
    # here OpenInference's instrumentor of AutoGen is switched on beside ours. Our own MCP server
    # runs here on the first release of the SDK, and elsewhere on the second.
    "autogen-mcp": Environment(
        "autogen-agentchat>=0.7.5 autogen-ext[openai,mcp]>=0.7.5 mcp<2 openai<3 "
        "openinference-instrumentation-autogen-agentchat>=0.1.22",
        "tests/instrumentors/autogen tests/cli/test_mcp.py",
        "autogen-core mcp openai",
    ),
    # Frameworks that no instrumentor of ours patches. Two of them keep openai below its third
    # release.
    "frameworks": Environment(
        "pydantic-ai-slim[openai]>=2.60 smolagents[openai]>=1.26 dspy>=3.4 haystack-ai>=3.4 "
        "agno>=3.1 google-adk>=2.13 litellm>=1.106 semantic-kernel>=1.45 "
        "agent-framework-core>=1.23 agent-framework-openai>=1.17 "
        "openinference-instrumentation-smolagents openinference-instrumentation-dspy "
        "opentelemetry-haystack openinference-instrumentation-agno",
        list_tests(
            "pydantic_ai_agents",
            "smolagents_agents",
            "dspy_react",
            "adk_agents",
            "haystack_agents",
            "agno_agents",
            "agent_framework_agents",
            "semantic_kernel_agents",
        ),
        "pydantic-ai-slim smolagents dspy google-adk haystack-ai agno agent-framework-core "
        "semantic-kernel",
    ),
    "frameworks-openai-2": Environment(
        "strands-agents[openai]>=1.60 llama-index-core>=0.14 llama-index-llms-openai-like>=0.6 "
        "openinference-instrumentation-llama-index",
        list_tests("strands_agents", "llama_index_agents"),
        "strands-agents llama-index-core openai",
    ),
    # Without mcp, completion() of 1.106 cannot take tools.
    "litellm": Environment(
        "litellm[mcp]>=1.106 sqlalchemy>=2.0.40",
        f"tests/instrumentors/litellm tests/instrumentors/contract {EXAMPLE}[litellm_loop]",
        "litellm openai",
    ),
    # Other vendors' clients, and the HTTP libraries that they stand on. Two other instrumentors of
    # anthropic record beside ours under opentelemetry-instrument.
    "clients": Environment(
        "openai anthropic>=2 google-genai>=3 aiohttp>=3.9 requests groq together mistralai "
        "huggingface_hub langchain-anthropic>=1.7 openinference-instrumentation-anthropic>=3 "
        "opentelemetry-instrumentation-anthropic>=0.62 starlette sqlalchemy>=2.0.40",
        "tests/instrumentors/http tests/instrumentors/contract tests/examples/test_clients.py "
        f"{EXAMPLE}[httpx_loop]",
        "anthropic google-genai aiohttp httpx httpx2 requests groq together mistralai "
        "huggingface_hub langchain-anthropic",
    ),
    "clients-oldest": Environment(
        "openai anthropic==0.70.0 google-genai==1.40.0 requests starlette sqlalchemy>=2.0.40",
        f"tests/instrumentors/http/test_vendors.py {list_clients('anthropic_tools', 'genai_chat')}",
        "anthropic google-genai httpx requests",
    ),
    # It patches the standard library, so it stands beside nothing else.
    "gevent": Environment(
        "gevent>=24 openai>=3", "tests/instrumentors/test_greenlets.py", "gevent greenlet"
    ),
    # DuckDB's extensions stop at a release that is older than what the rest is tested with. A
    # PostgreSQL server must be installed beside Python: apt-get install postgresql.
    # The queue's contract holds in PostgreSQL as it does in SQLite.
    "lake": Environment(
        "duckdb==1.5.5 duckdb-extension-ducklake==1.5.5 duckdb-extension-httpfs==1.5.5 "
        "duckdb-extension-postgres-scanner==1.5.5 moto[s3,server]>=5.1 psycopg[binary]>=3.2 "
        "sqlalchemy>=2.0.40",
        "tests/store/lake tests/state",
        "duckdb duckdb-extension-ducklake moto psycopg",
    ),
    # ClickHouse's own engine is in chdb, 530 MB.
    "clickhouse": Environment(
        "chdb>=4.4",
        "tests/store/contract tests/store/test_clickhouse.py",
        "chdb duckdb",
        extras="[serve]",
    ),
    # Whoever reads our formats, and who trains. Of verl the data classes, the algorithms and the
    # agent loop, which need no more than this; the whole of it holds transformers below what TRL is
    # tested with. Of Agent Lightning its types.
    "trainers": Environment(
        "torch==2.13.0 trl>=1.16,<1.17 alembic cachetools codetiming fastapi hydra-core>=1.3 "
        "mlflow-skinny>=3 omegaconf>=2.3 openai>=2.20 peft>=0.19 pillow pydantic>=2.11 ray>=2.41 "
        "sqlalchemy>=2.0.40 tensorboardx>=2.6 tensordict>=0.8,!=0.9.0,<=0.10.0 uvicorn wandb>=0.20",
        "tests/formats/consumers tests/algorithms/test_closed_loop.py "
        "tests/algorithms/test_gradients.py tests/algorithms/test_kill.py "
        "tests/algorithms/test_gpu_page.py tests/algorithms/test_own_trainer.py "
        "tests/algorithms/test_page.py "
        "tests/algorithms/test_ppo.py "
        "tests/algorithms/test_recorded.py tests/algorithms/test_reporting.py "
        "tests/algorithms/test_verl.py tests/runner/test_ray.py",
        "torch trl transformers datasets peft ray verl agentlightning",
        alone="verl==0.9.1 agentlightning==0.3.0",
    ),
    # Its adapters and its store alone: the whole of Agent Lightning brings an LLM gateway, 470 MB.
    "differential": Environment(
        "agentops>=0.4.13 aiohttp aiologic fastapi gunicorn openai>=2 "
        "opentelemetry-exporter-otlp==1.44.0 opentelemetry-sdk==1.44.0 portpicker uvicorn",
        "tests/adapter/differential tests/microsoft",
        "agentlightning agentops opentelemetry-sdk",
        alone="agentlightning==0.3.0",
    ),
    # Of these projects only releases that pip finds no way around live together.
    "foreign": Environment(
        "autogen-agentchat>=0.7.5 autogen-ext[openai]>=0.7.5 langchain>=1.4 langchain-core<1.8 "
        "langchain-openai>=1.7 langgraph>=1.2 numpy>=2 openai-agents>=0.24 "
        "openinference-instrumentation-langchain==0.1.80 "
        "openinference-instrumentation-openai==0.1.66 opentelemetry-instrumentation==0.66b2 "
        "opentelemetry-instrumentation-genai-openai==1.3b0 "
        "opentelemetry-instrumentation-langchain==0.62.4 "
        "opentelemetry-instrumentation-openai==0.62.4 opentelemetry-sdk==1.45.2 "
        "opentelemetry-semantic-conventions==0.66b2 opentelemetry-util-genai==1.3b0",
        "tests/examples/test_foreign.py tests/instrumentors/foreign",
        "openinference-instrumentation-openai opentelemetry-instrumentation-genai-openai "
        "opentelemetry-instrumentation-openai",
    ),
    "pools": Environment(
        "gevent joblib loky openai>=3 pytest-xdist>=3.8 ray>=2.41",
        "tests/cli/test_pools.py",
        "gevent joblib loky ray execnet",
    ),
    # Whole applications, each with pins of its own, take 10 minutes: .ci/run leaves them out.
    "aider": Environment(
        "aider-chat>=0.86",
        f"{APPLICATION}[aider] {APPLICATION}[aider-whole]",
        "aider-chat litellm openai",
    ),
    "mini": Environment("mini-swe-agent>=2.4", f"{APPLICATION}[mini]", "mini-swe-agent litellm"),
    "inspect": Environment("inspect-ai>=0.3.285 openai", f"{APPLICATION}[inspect]", "inspect-ai"),
    # Needs Python 3.12.
    "openhands": Environment(
        "openhands-sdk>=1.58 openhands-tools>=1.58",
        f"{APPLICATION}[openhands]",
        "openhands-sdk litellm",
    ),
}


class FailedError(Exception):
    """An environment could not be made, or its tests failed; says which, with the output's end."""


def run(command: Sequence[str | Path], *, limit_s: float) -> str:
    shown = shlex.join(map(str, command))
    # CrewAI asks on the console whether to show traces, and counts its users from elsewhere.
    settings = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TESTING": "true"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise FailedError(f"{shown}\nstill ran after {limit_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        raise FailedError(f"{shown}\nended with {process.returncode}:\n{tail}")
    return output


def make(folder: Path, environment: Environment) -> Path:
    """The Python of the environment, made in the folder unless it stands there as it should."""
    python = folder / "bin" / "python"
    mark = folder / "requirements.txt"
    wanted, alone = f"{environment.requirements} {RUNNERS}".split(), environment.alone.split()
    written = "\n".join([*alone, *wanted, f"-e {ROOT}{environment.extras}", ""])
    if python.exists() and mark.exists() and mark.read_text() == written:
        return python
    venv.create(folder, clear=True, with_pip=True)
    install = [python, "-m", "pip", "install", "-qq", "--no-input"]
    if alone:
        run([*install, "--no-deps", *alone], limit_s=INSTALL_LIMIT_S)
    run([*install, *wanted, "--editable", f"{ROOT}{environment.extras}"], limit_s=INSTALL_LIMIT_S)
    mark.write_text(written)
    return python


def releases(python: Path, distributions: str) -> str:
    code = (
        "import sys; from importlib.metadata import version\n"
        "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
    )
    return run([python, "-c", code, *distributions.split()], limit_s=60).strip()


def test(python: Path, environment: Environment, report: Path) -> str:
    """What came of the environment's tests, in words."""
    words = environment.paths.split()
    paths = [path for path in words if (ROOT / path.partition("::")[0]).exists()]
    if not paths:
        raise FailedError(f"none of its tests are here: {environment.paths}")
    run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths],
        limit_s=TEST_LIMIT_S,
    )
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skips = [skip for case in cases for skip in case.iter("skipped")]
    missing = sorted({str(skip.get("message")) for skip in skips if _is_for_want(skip)})
    if missing:
        raise FailedError("skipped for want of what it is made to have:\n" + "\n".join(missing))
    if len(skips) == len(cases):
        raise FailedError("no test ran")
    return f"{len(cases) - len(skips)} passed, {len(skips)} skipped"


def _is_for_want(skip: ElementTree.Element) -> bool:
    words = ("could not import", "is not installed here")
    return any(each in str(skip.get("message")) for each in words)


def main(arguments: Sequence[str]) -> int:
    """Run the environments that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--list", action="store_true", help="print the names and requirements")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(ENVIRONMENTS))
    if unknown:
        parser.error(f"no environment {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    names = given.names or list(ENVIRONMENTS)
    if given.list:
        for name in names:
            say(f"{name:8} {shlex.join(ENVIRONMENTS[name].requirements.split())}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder.resolve() if given.folder else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(given.jobs) as pool:
            reports = [Path(scratch) / f"{name}.xml" for name in names]
            results = list(pool.map(passes, names, [folder] * len(names), reports))
    return 0 if all(results) else 1


def passes(name: str, folder: Path, report: Path) -> bool:
    """Whether the environment could be made and its tests passed, having said so in one line."""
    environment = ENVIRONMENTS[name]
    started_s = time.monotonic()
    try:
        python = make(folder / name, environment)
        found = releases(python, environment.shown)
        outcome = test(python, environment, report)
    except FailedError as failure:
        say(f"{name:8} FAILED after {time.monotonic() - started_s:.0f} s\n{failure}")
        return False
    say(f"{name:8} ok  {outcome}, {time.monotonic() - started_s:.0f} s  ({found})")
    return True


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a command's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

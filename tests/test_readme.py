"""What the README says is run as it stands there, in an empty folder."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.examples import matrix
from tests.receivers.requests import json_of
from tests.serve.serving import request_of

from lightning_otel.demo.server import DemoServer

README = Path(__file__).parent.parent / "README.md"
AGENT = """\
import os

import openai

from lightning_otel.demo.agent import solve

client = openai.OpenAI(base_url=os.environ["AGENT_MODEL_URL"], api_key="none")
print(solve(client, "What is 17*23?"))
"""


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path, server: DemoServer) -> dict[str, str]:
    """An environment in which `your_agent.py` works and the README's commands are found."""
    (tmp_path / "your_agent.py").write_text(AGENT)
    found = {name: value for name, value in os.environ.items() if name != "LIGHTNING_OTEL_STORE"}
    scripts = Path(sys.executable).parent
    return {
        **found,
        "PATH": f"{scripts}{os.pathsep}{found['PATH']}",
        "AGENT_MODEL_URL": server.base_url,
    }


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """A command's stdout; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50
    )

    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_python_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    """Every Python block of the README runs, one after the other, in a fresh folder."""
    program = "\n".join(blocks("python"))

    out = run([sys.executable, "-W", "error", "-c", program], tmp_path, shell)

    assert (tmp_path / "transitions.parquet").exists()
    assert "None" not in out


def test_readme_ways_in_record_the_agent(tmp_path: Path, shell: dict[str, str]) -> None:
    """Both commands of "Your own agent" record the same two calls of an unchanged program."""
    commands = [block.strip() for block in blocks("bash") if "your_agent.py" in block][:2]

    for command in commands:
        assert "The answer is" in run(["bash", "-c", command], tmp_path, shell)

    count = run(
        ["lightning-otel", "sql", "--json", "SELECT count(*) AS calls FROM calls"], tmp_path, shell
    )
    assert '"calls": 4' in count


def test_readme_data_commands_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """Every command of "Get training data" works on a recorded run."""
    run(["lightning-otel", "run", "--", "python", "your_agent.py"], tmp_path, shell)
    block = next(block for block in blocks("bash") if "export triplets" in block)

    out = run(["bash", "-euc", block], tmp_path, shell)

    assert "toy-policy" in out
    assert (tmp_path / "triplets.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "everything.duckdb").exists()


def test_readme_resources_reach_the_agent(
    tmp_path: Path, shell: dict[str, str], server: DemoServer
) -> None:
    """What is published is in the requests of the next run, whose code is as it was."""
    block = next(block for block in blocks("bash") if "resources publish" in block)

    out = run(["bash", "-euc", block], tmp_path, shell)

    prompts = [(exchange.request or {})["messages"][0]["content"] for exchange in server.log]
    assert prompts == ["Answer with a number and nothing else."] * 2
    assert "system_prompt\tprompt\t1\t1" in out


def test_readme_spans_from_elsewhere_arrive(tmp_path: Path, shell: dict[str, str]) -> None:
    """`serve` listens and stops when told to, and `import` reads what a Collector wrote."""
    block = next(block for block in blocks("bash") if "lightning-otel serve" in block)
    serve, load = block.strip().splitlines()
    (tmp_path / "traces.jsonl").write_bytes(json_of(request_of(3)))

    with subprocess.Popen(
        ["bash", "-c", f"exec {serve}"], cwd=tmp_path, env=shell, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("http://127.0.0.1:43")
        running.terminate()
    run(["bash", "-euc", load], tmp_path, shell)

    assert running.returncode == 0
    count = run(
        ["lightning-otel", "sql", "--json", "SELECT count(*) AS n FROM spans"], tmp_path, shell
    )
    assert '"n": 3' in count


def test_readme_matrix_is_what_the_examples_prove() -> None:
    """The matrix names for each cell the program whose test fails if the cell is not true."""
    assert matrix.table() in README.read_text()


def test_readme_extras_are_those_of_the_package() -> None:
    """Every extra named exists, and every one that brings a library is named."""
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (named,) = re.findall(r"The extras bring the libraries:.*?\n\n", README.read_text(), re.DOTALL)

    found = set(re.findall(r"\[(\w+)\]|`(\w+)`", named))

    assert {one or other for one, other in found} - {"openai"} == set(extras) - {
        "openai", "demo", "distro", "test", "serve", "lake", "remote", "clickhouse", "drift",
    }  # fmt: skip

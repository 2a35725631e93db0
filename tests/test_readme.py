"""What the README says is run as it stands there, in an empty folder."""

import re
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from tests.algorithms.apo.test_page import Writer
from tests.examples import matrix
from tests.forwarding.collector import Endpoint
from tests.pages import AGENT, README, ROOT, blocks, part, python, ran

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel.demo.agent import solve
from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer

PAGE = part(README, __file__)


class Commands(NamedTuple):
    """Every bash block of the README, in order; one more of them does not fit in here.

    ``try_it``, ``docs`` and ``test`` are run by ``.ci/run``, which cuts them out from below their
    headings.
    """

    try_it: str
    run: str
    instrument: str
    send: str
    data: str
    resources: str
    look: str
    docs: str
    test: str


class Model(Writer):
    """Adds, is polite if it is told to be, and writes prompts."""

    def reply(self, body: object, rng: object) -> Reply:
        """An answer to each of the page's agents, by its instructions."""
        assert isinstance(body, dict)
        answers = {
            "Answer with a number.": "4",
            "Answer briefly.": "Sugar?",
            "Answer briefly and ask politely.": "Sugar, please?",
        }
        answer = answers.get(body["messages"][0]["content"])
        return super().reply(body, rng) if answer is None else Reply(text=answer)


COMMANDS = Commands(*blocks(PAGE, "bash"))


@pytest.fixture
def shell(tmp_path: Path, server: DemoServer) -> dict[str, str]:
    """The settings with which `your_agent.py` works."""
    (tmp_path / "your_agent.py").write_text(AGENT)
    return {"AGENT_MODEL_URL": server.base_url}


def test_readme_python_runs(tmp_path: Path, shell: dict[str, str], server: DemoServer) -> None:
    """Every Python block of the README runs, one after the other, in a fresh folder."""
    with DemoServer(Model()) as model:
        settings = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "none"}
        out = ran(python(PAGE), tmp_path, **settings).stdout

    assert (tmp_path / "transitions.parquet").exists()
    assert "None" not in out
    assert out.splitlines()[-1].startswith("held-out reward 0.000 → 1.000 over 8 tasks, ")
    assert "What is 2+2?" in out.splitlines()[0]  # the first step, with its reward
    assert out.splitlines()[0].endswith(" 1.0")
    store = Store(tmp_path / ".lightning" / "traces.duckdb")
    (step,) = store.transitions(agents="calc")
    assert dict(step.rewards).keys() == {"primary", "correct", "short", "politeness", "useful"}
    ran(["bash", "-euc", COMMANDS.resources], tmp_path, **shell)
    prompts = [(exchange.request or {})["messages"][0]["content"] for exchange in server.log]
    assert prompts == ["Answer with a number and nothing else."] * 2


def test_readme_ways_in_record_the_agent(tmp_path: Path, shell: dict[str, str]) -> None:
    """Both commands of "Your own agent" record the same two calls of an unchanged program."""
    for command in (COMMANDS.run, COMMANDS.instrument):
        assert "The answer is" in ran(["bash", "-c", command], tmp_path, **shell).stdout

    query = "SELECT count(*) AS calls FROM calls"
    count = ran(["lightning-otel", "sql", "--json", query], tmp_path, **shell)
    assert '"calls": 4' in count.stdout


@pytest.fixture
def recorded(tmp_path: Path, server: DemoServer) -> None:
    """The store in the folder has two rewarded steps."""
    with auto_trace(store=tmp_path / ".lightning" / "traces.duckdb", agent="calc"):
        with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
            solve(client, "What is 17*23?")
        emit_reward(1.0)


def test_readme_send_commands_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """The block of "Beside OpenTelemetry" records, and the endpoint gets each span once."""
    endpoint = Endpoint()

    command = COMMANDS.send.replace("http://127.0.0.1:4318", endpoint.url)
    ran(["bash", "-euc", command], tmp_path, **shell)
    endpoint.close()

    assert sorted(endpoint.counts().values()) == [1] * (2 + 3)


@pytest.mark.usefixtures("recorded")
def test_readme_data_commands_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """Every command of "Get training data" works on a recorded run."""
    out = ran(["bash", "-euc", COMMANDS.data], tmp_path, **shell).stdout

    assert "toy-policy" in out
    assert (tmp_path / "triplets.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "sft.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "everything.duckdb").exists()


@pytest.mark.usefixtures("recorded")
def test_readme_look_commands_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """Every command of "Look" shows that run."""
    out = ran(["bash", "-euc", COMMANDS.look], tmp_path, **shell).stdout

    assert out.count("calculator(") >= 2
    assert "nothing wrong" in out


def test_readme_resources_reach_the_agent(
    tmp_path: Path, shell: dict[str, str], server: DemoServer
) -> None:
    """What is published is in the requests of the next run, whose code is as it was."""
    out = ran(["bash", "-euc", COMMANDS.resources], tmp_path, **shell).stdout

    prompts = [(exchange.request or {})["messages"][0]["content"] for exchange in server.log]
    assert prompts == ["Answer with a number and nothing else."] * 2
    assert "system_prompt\tprompt\t1\t1" in out


def test_readme_matrix_is_what_the_examples_prove() -> None:
    """The matrix names for each cell the program whose test fails if the cell is not true."""
    assert matrix.table() in README.read_text()


def test_readme_links_lead_somewhere() -> None:
    """Each file that the README links to is there."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", README.read_text())

    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).exists()] == []

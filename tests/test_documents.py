"""The documents name all there is, and each block of code in them runs or says why not."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import openai
import pytest
from tests.cli.reference import reference
from tests.pages import AGENT, DOCS, README, ROOT, Part, parts, walk
from tests.test_picture import parsed, texts

from lightning_otel import Store, auto_trace, config, emit_reward
from lightning_otel.algorithms.options import TrainingOptions
from lightning_otel.cli import _COMMANDS
from lightning_otel.cli import doctor as cli_doctor
from lightning_otel.dataset import formats
from lightning_otel.dataset.query import QueryKeywords
from lightning_otel.demo.agent import solve
from lightning_otel.demo.server import DemoServer
from lightning_otel.views import doctor, waiting


def test_every_code_of_doctor_is_explained() -> None:
    """The table of troubleshooting has each code, and no other."""
    page = (DOCS / "settings.md").read_text().partition("## Troubleshooting\n")[2]
    found = re.findall(r"^\| `([\w-]+)` \| \S", page, re.MULTILINE)

    assert sorted(found) == sorted(get_args(doctor.Code))


def test_every_code_of_doctor_is_used() -> None:
    """No code is left over from a finding that is gone."""
    text = "".join(Path(str(each.__file__)).read_text() for each in (doctor, cli_doctor, waiting))
    used = re.findall(r'\b(?:Check|Wait|ok|note|problem)\(\s*"([\w-]+)",', text)

    assert sorted(set(used)) == sorted(get_args(doctor.Code))


def test_every_setting_is_named() -> None:
    """The page of settings names each variable of ours that the one reader knows, and no other."""
    named = set(re.findall(r"`(LIGHTNING_OTEL\w*)`", (DOCS / "settings.md").read_text()))

    assert named == config.OURS


def test_every_page_is_in_the_index() -> None:
    """The tables of contents list each page once, and those that the build makes."""
    trees = re.findall(r"```\{toctree\}\n(?::.*\n)*((?s:.*?))```", (DOCS / "index.md").read_text())

    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"} | {"api", "cli"}
    assert sorted(" ".join(trees).split()) == sorted(pages)


def test_every_extra_is_named() -> None:
    """The page about the start names each extra of the package, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (DOCS / "start.md").read_text().partition("## Extras\n")[2]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))

    assert sorted(named) == sorted(project["optional-dependencies"])


def test_every_format_and_option_is_named() -> None:
    """Their tables are complete."""
    rows = {
        page: re.findall(r"^\| (`.*?) \|", (DOCS / page).read_text(), re.MULTILINE)
        for page in ("exports.md", "transitions.md", "training.md")
    }
    names = {page: set(re.findall(r"`(\w+)`", "".join(found))) for page, found in rows.items()}

    assert {row.strip("`") for row in rows["exports.md"]} == set(formats.names())
    assert names["transitions.md"] >= set(QueryKeywords.__annotations__)
    assert names["training.md"] >= set(TrainingOptions.__annotations__)


def test_pictures_are_of_the_demo_and_small() -> None:
    """Each has the text that the page describes."""
    curves, concepts = ((DOCS / f"{name}.svg").read_text() for name in ("curves", "concepts"))

    assert {"240 values · line: mean of the last 24", "reward"} <= set(texts(parsed(curves)))
    assert {"sum · 4 spans · 2 steps · 1 of 1 reward credited", "1 → #1"} <= set(
        texts(parsed(concepts))
    )
    assert len(curves) < 60_000
    assert len(concepts) < 8_000
    assert len((DOCS / "viewer.png").read_bytes()) <= 150_000


def test_picture_beside_a_trace_shows_what_a_run_gives(store: Store) -> None:
    """Its rows are the steps of the demo's agent: actions, rewards and token ids."""
    with (
        auto_trace(store=store, agent="calc", task="What is 17*23?"),
        DemoServer(seed=7) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        answer = solve(client, "What is 17*23?")
        emit_reward(1.0)

    picture = (DOCS / "beside.svg").read_text()
    shown = set(texts(parsed(picture)))

    first, last = store.transitions()
    assert f"“{answer}”" in shown
    assert (first.reward, last.reward) == (None, 1.0)
    for step in (first, last):
        assert f"[{' '.join(map(str, step.response_ids))}]" in shown
        logprobs = (f"{value:.1f}".replace("0.0", ".0") for value in step.logprobs)
        assert f"[{' '.join(logprobs)}]" in shown
    assert len(picture) < 5_000


PARTS = [
    pytest.param(each, id=f"{page.stem}-{number}")
    for page in sorted([README, *DOCS.glob("*.md"), ROOT / "benchmarks" / "README.md"])
    for number, each in enumerate(parts(page))
]
_RUN = re.compile(r'\b(?:blocks\(.+?, "(\w+)"\)|python\()')


@pytest.mark.timeout(300)  # a page may hold many commands, each a process
@pytest.mark.parametrize("part", PARTS)
def test_every_block_runs_or_says_why_not(part: Part, tmp_path: Path, server: DemoServer) -> None:
    """A block is a drawing, TOML that parses, excused, run by a test of its own, or run here."""
    for text in (block.text for block in part.blocks if block.language == "toml"):
        assert tomllib.loads(text)
    languages = {block.language for block in part.blocks if block.language and not block.why}
    languages -= {"toml"}
    if part.test:
        taken = {found[1] or "python" for found in _RUN.finditer((ROOT / part.test).read_text())}
        assert languages <= taken
    else:
        assert languages <= {"python", "bash", "text"}
        (tmp_path / "your_agent.py").write_text(AGENT)
        walk(part.blocks, tmp_path, {"AGENT_MODEL_URL": server.base_url})


def test_documents_name_every_command_setting_and_exit_code() -> None:
    """Commands in the reference, codes in their table; what ``run`` sets for its child nowhere."""
    sections = re.findall(r"^## ([\w-]+)$", reference(), re.MULTILINE)
    table = (DOCS / "looking.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    inner = {config.RUN.name, config.RUN_AGENT.name, config.ROLLOUT.name, config.ATTEMPT.name}
    inner |= {config.PROCESS.name, config.HANDED.name, config.RUN_IS_NAMED.name, config.PROXY.name}

    assert sections == list(_COMMANDS)
    assert "\n### resources promote\n" in reference()
    assert set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE)) == set("01234") | {"130"}
    assert set(config.OURS) - inner <= {each["name"] for each in config.list_settings()}

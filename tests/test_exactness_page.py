"""What docs/exactness.md says is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.pages import DOCS, blocks, fences, python, ran

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.config import RETOKENIZATION_FIX_ENV
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.openai import asking

PAGE = DOCS / "exactness.md"
PLAIN = """\
import os

import openai

client = openai.OpenAI(base_url=os.environ["MODEL_URL"], api_key="none")
client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hello"}])
"""


def test_page_runs(tmp_path: Path) -> None:
    """The Python blocks record two exact steps with what was asked, and make one row of them."""
    done = ran(python(PAGE), tmp_path)

    first, second, notes = done.stdout.splitlines()
    assert re.fullmatch(r"exact \d+ \d+ {'temperature': 0\.7}", first)
    assert second.startswith("exact ")
    assert "raw or processed" in notes


def test_commands_ask_for_an_unchanged_program(tmp_path: Path, server: DemoServer) -> None:
    """Run in either way, a program that asks for no token ids leaves an exact call."""
    (tmp_path / "your_agent.py").write_text(PLAIN)
    (commands,) = blocks(PAGE, "bash")

    ran(["bash", "-euc", commands], tmp_path, MODEL_URL=server.base_url)

    steps = Store(tmp_path / ".lightning" / "traces.duckdb").transitions().rows()
    assert [step.capture for step in steps] == ["exact", "exact"]


def test_page_names_what_there_is() -> None:
    """Hosts, keys and commands on the page are those of the code."""
    page = PAGE.read_text()
    told = "\n".join(block.text for block in fences(PAGE) if block.language == "bash")
    commands = re.findall(r"lightning-otel (\w+) (--[\w-]+)", told)

    assert all(f"`*{host}`" in page for host in asking._ELSEWHERE)
    assert f"{c.LOGPROBS_MODE}=processed" in page
    assert f"{RETOKENIZATION_FIX_ENV}=1" in page
    assert len(commands) == 2
    for command, option in commands:
        help_text = subprocess.run(
            [sys.executable, "-m", "lightning_otel", command, "--help"],
            capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert option in help_text.stdout

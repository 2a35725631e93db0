"""What the tests of pages do alike: cut code out of the README and ``docs/``, and run it.

A fenced block is run by a test, or the line above it says why not: ``<!-- not run: WHY -->``.
Blocks without a language are drawings, ``text`` is what the block before prints.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
AGENT = """\
import os

import openai

from lightning_otel.demo.agent import solve

client = openai.OpenAI(base_url=os.environ["AGENT_MODEL_URL"], api_key="none")
print(solve(client, "What is 17*23?"))
"""
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>.*)\n(?P<text>(?s:.*?))^```$",
    re.MULTILINE,
)
_WALK = """\
import json, subprocess, sys
names = {"__name__": "page"}
for language, text in json.load(sys.stdin):
    if language == "python":
        exec(compile(text, "page", "exec"), names)
    else:
        subprocess.run(["bash", "-euc", text], check=True, stdin=subprocess.DEVNULL)
    print("\\0", end="", flush=True)
"""


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and why nothing runs it, if so."""

    language: str
    text: str
    why: str


def fences(page: Path) -> list[Block]:
    """Every fenced block of a page, in order; directives of the documents' builder are none."""
    found = (
        Block(each["language"], each["text"], each["why"] or "")
        for each in _FENCE.finditer(page.read_text())
    )
    return [block for block in found if not block.language.startswith("{")]


def blocks(page: Path, language: str) -> list[str]:
    """A page's code blocks of one language that are to be run, in order."""
    return [each.text for each in fences(page) if each.language == language and not each.why]


def python(page: Path, *, before: str = "") -> list[str]:
    """The command that runs a page's Python blocks, one after the other; warnings are errors."""
    program = "\n".join([before, *blocks(page, "python")])
    return [sys.executable, "-W", "error", "-c", program]


def environment(**more: str) -> dict[str, str]:
    """Where our programs are found, and the store is the one in the working directory."""
    return {
        **{name: value for name, value in os.environ.items() if name != "LIGHTNING_OTEL_STORE"},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def ran(
    command: Sequence[str], folder: Path, *, exit_code: int = 0, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """A command that ended in a folder as it should, with our programs and its store there."""
    done = subprocess.run(
        command, cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=55
    )
    assert done.returncode == exit_code, done.stderr
    return done


def walk(page: Path, folder: Path, settings: Mapping[str, str]) -> None:
    """Run a page's Python and bash blocks in their order; each ``text`` is what was printed.

    Python's names last from block to block; all of it happens in one folder.
    """
    run = [each for each in fences(page) if each.language in ("python", "bash") and not each.why]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _WALK],
        input=json.dumps([each[:2] for each in run]),
        cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=160,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.split("\0"))
    last = ""
    for each in fences(page):
        if each in run:
            last = next(printed)
        elif each.language == "text" and not each.why:
            assert last == each.text

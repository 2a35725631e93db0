"""Code of the README and ``docs/``, cut out and run.

A test runs each fenced block, or the line above the block says why not: ``<!-- not run: WHY -->``.
Blocks without a language are drawings, ``text`` is the output of the block before it, in which
``…`` stands for anything. The blocks of a page run one after the other. A page begins anew, in a
folder of its own, at ``<!-- in a new folder -->``, and leaves its blocks to a test of theirs at
``<!-- run by tests/FILE -->``.
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
_PART = re.compile(r"^<!-- (?:in a new folder|run by (tests/\S+)) -->$", re.MULTILINE)
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
    """A fenced block of a page, with the reason why no test runs it."""

    language: str
    text: str
    why: str


class Part(NamedTuple):
    """Consecutive blocks of a page that share a folder, and the file of the test that runs them."""

    test: str
    blocks: list[Block]


def fences(text: str) -> list[Block]:
    """Return every fenced block in order, without directives of the documents' builder."""
    found = (
        Block(each["language"], each["text"], each["why"] or "") for each in _FENCE.finditer(text)
    )
    return [block for block in found if not block.language.startswith("{")]


def parts(page: Path) -> list[Part]:
    """Return the parts of a page that have blocks."""
    first, *rest = _PART.split(page.read_text())
    pairs = [("", first), *zip(rest[::2], rest[1::2], strict=True)]
    return [Part(test or "", fences(text)) for test, text in pairs if fences(text)]


def part(page: Path, test: str) -> list[Block]:
    """Return the blocks of a page that a test file, given as its ``__file__``, runs."""
    name = str(Path(test).relative_to(ROOT))
    return [block for each in parts(page) if each.test == name for block in each.blocks]


def blocks(part: Sequence[Block], language: str) -> list[str]:
    """Return the code blocks of one language that are to be run, in order."""
    return [each.text for each in part if each.language == language and not each.why]


def python(part: Sequence[Block]) -> list[str]:
    """Return the command that runs all Python blocks; warnings are errors."""
    return [sys.executable, "-W", "error", "-c", "\n".join(blocks(part, "python"))]


def environment(**more: str) -> dict[str, str]:
    """Return an environment that finds our programs and uses the store in the working directory."""
    return {
        **{name: value for name, value in os.environ.items() if name != "LIGHTNING_OTEL_STORE"},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def ran(
    command: Sequence[str], folder: Path, *, exit_code: int = 0, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, with our programs and its store there, and check how it ends."""
    done = subprocess.run(
        command, cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=55
    )
    assert done.returncode == exit_code, done.stderr
    return done


def walk(part: Sequence[Block], folder: Path, settings: Mapping[str, str]) -> None:
    """Run Python and bash blocks in order in one folder, and compare each ``text``.

    Names of Python last from block to block.
    """
    run = [each for each in part if each.language in ("python", "bash") and not each.why]
    done = subprocess.run(
        [sys.executable, "-u", "-W", "error", "-c", _WALK],
        input=json.dumps([each[:2] for each in run]), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, cwd=folder, env=environment(**settings), text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    printed = iter(done.stdout.split("\0"))
    last = ""
    for each in part:
        if each in run:
            last = next(printed)
        elif each.language == "text" and not each.why:
            assert re.fullmatch(re.escape(each.text).replace("…", ".*"), last), last

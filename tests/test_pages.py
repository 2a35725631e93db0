"""No block of code in the README or the documents goes unrun without a reason."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.pages import AGENT, DOCS, README, ROOT, fences, walk

from lightning_otel.demo.server import DemoServer

PAGES = sorted([README, *DOCS.glob("*.md"), ROOT / "benchmarks" / "README.md"])
_TAKEN = re.compile(r'\b(?:blocks|block|python)\(PAGE(?:, "(\w+)")?')


@cache
def takers() -> Mapping[Path, list[str]]:
    """Each page that has tests of its own, with their source."""
    found: dict[Path, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r'^PAGE = .*?(?:/ "([\w-]+\.md)"|README)$', path.read_text(), re.M):
            page = DOCS / name if name else README
            found.setdefault(page, []).append(path.read_text())
    return found


def taken(page: Path) -> Iterator[str]:
    """The languages whose blocks a page's own tests take, all of them."""
    for source in takers()[page]:
        for call in _TAKEN.finditer(source):
            yield call[1] or "python"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    """A block is a drawing, TOML that parses, excused, or taken by a test."""
    has_tests = page in takers()
    languages = {*taken(page)} if has_tests else {"python", "bash", "text"}

    for block in fences(page):
        if block.language == "toml":
            assert tomllib.loads(block.text)
        elif block.language and not block.why:
            assert block.language in languages, f"nothing runs this:\n{block.text}"
    if has_tests:
        # One of several would leave the others out.
        assert not re.search(r'\bblocks\(PAGE, "\w+"\)\[', "".join(takers()[page]))


@pytest.mark.timeout(180)  # a page may hold many commands, each a process
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page not in takers() and any(b.language and not b.why for b in fences(page))
    ],
    ids=lambda page: page.stem,
)
def test_a_page_without_tests_of_its_own_runs(
    page: Path, tmp_path: Path, server: DemoServer
) -> None:
    """Block after block, beside an agent ``your_agent.py``; what it says is printed is printed."""
    (tmp_path / "your_agent.py").write_text(AGENT)

    walk(page, tmp_path, {"AGENT_MODEL_URL": server.base_url})

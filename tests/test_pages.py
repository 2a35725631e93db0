"""No block of code in the README or the documents goes unrun without a reason."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.pages import AGENT, DOCS, README, ROOT, Part, parts, walk

from lightning_otel.demo.server import DemoServer

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

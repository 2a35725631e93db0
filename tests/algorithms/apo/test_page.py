"""The page's blocks about APO run as they are written."""

from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, part

from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer

PAGE = DOCS / "training.md"


class Writer:
    """A model that has read what the agent emitted."""

    def reply(self, body: object, rng: object) -> Reply:
        """The prompt anew, with what was missing, if it was told."""
        told = "must ask politely" in str(body)
        return Reply(text="```\nAnswer briefly and ask politely.\n```" if told else "")


def test_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every Python block, one after the other; what is said in comments comes out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    with DemoServer(Writer()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        exec(compile("\n".join(blocks(part(PAGE, __file__), "python")), str(PAGE), "exec"), {})

    assert capsys.readouterr().out.splitlines() == [
        "held-out reward 0.000 → 1.000 over 8 tasks, a difference of +1.000 [+0.004, +1.000]",
        "Answer briefly and ask politely.",
    ]

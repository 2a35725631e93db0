"""The page's blocks about weights run against an engine and a store that are made here."""

from pathlib import Path

import pytest
from examples.closed_loop import tiny
from tests.formats.consumers.recorded import recorded
from tests.pages import DOCS, blocks, part

pytest.importorskip("trl")

from examples.closed_loop.engine import Engine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
PAGE = DOCS / "training.md"


def test_the_pages_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block, in a folder with a model, beside a store of rewarded rollouts."""
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "default" / "traces.duckdb")
    model = tiny.saved(tmp_path / "path" / "to" / "model", sharpness=8.0)
    program = "\n".join(blocks(part(PAGE, __file__), "python"))

    with Engine(model) as engine:
        program = program.replace("http://127.0.0.1:8000/v1", engine.base_url)
        exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})

    printed = capsys.readouterr().out.splitlines()
    loss, uri = printed[-3].split()
    assert float(loss) > 0
    assert (Path(uri) / "model.safetensors").exists()
    assert printed[-2] == "4.0 4.0"
    reward, name = printed[-1].split()
    assert 0 < float(reward) <= 1
    assert name.startswith("weights-000002-")

"""``plot``: curves in a terminal, in a pipe, as JSON and as pictures."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

from tests.cli.conftest import EVIL
from tests.plot.made import fill, rollout

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel import conventions as c

Cli = Callable[..., CompletedProcess[str]]
Terminal = Callable[..., str]


def test_a_pipe_gets_plain_curves_eighty_cells_wide(cli: Cli, kept: Path) -> None:
    """No colour, no cursor, no line longer than 80 characters; talk is on stderr."""
    done = cli("plot", "--store", kept)

    assert done.returncode == 0
    assert done.stderr.startswith("→ ")
    assert done.stdout.startswith("reward  3 values  mean of 5: ")
    assert "  2 rollouts without a reward\n" in done.stdout
    assert "length, calls to a model  5 values" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_terminal_gets_its_width(terminal: Terminal, kept: Path) -> None:
    """Every line fits, and is as wide as can be; what its encoding lacks is drawn in ASCII."""
    text = terminal("plot", "reward", "--store", kept, columns=50)
    plain = terminal("plot", "reward", "--store", kept, env={"PYTHONIOENCODING": "latin-1"})

    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in bare.splitlines() if "→ " not in line) == 50
    assert "+---" in plain
    assert "*" in plain


def test_json_has_every_point(cli: Cli, store: Store) -> None:
    """With count and moving mean; `--by` and `--window` are those of the curves."""
    fill(store, [0.0, 1.0])

    (chart,) = json.loads(cli("plot", "reward", "--json", "--store", store.name).stdout)

    assert chart["axis"] == "rollout"
    assert chart["series"][0]["points"] == [
        {"rollout": 1, "value": 0.0, "low": 0.0, "high": 0.0, "count": 1, "mean": 0.0,
         "mean_count": 1},
        {"rollout": 2, "value": 1.0, "low": 1.0, "high": 1.0, "count": 1, "mean": 0.5,
         "mean_count": 2},
    ]  # fmt: skip


def test_pictures_are_written(cli: Cli, kept: Path, tmp_path: Path) -> None:
    """SVG or PNG by the name; what is none is refused before anything is read."""
    picture, pixels = tmp_path / "c.svg", tmp_path / "c.png"

    done = cli("plot", "reward", "-o", picture, "--store", kept)
    cli("plot", "-o", pixels, "--store", kept)
    refused = cli("plot", "-o", tmp_path / "c.html", "--store", tmp_path / "none.duckdb")

    assert (done.stdout, done.stderr) == ("", f"1 curve, 3 points → {picture}\n")
    ElementTree.fromstring(picture.read_text())
    assert pixels.read_bytes().startswith(b"\x89PNG")
    assert refused.returncode == 2
    assert "c.html is no picture" in refused.stderr


def test_names_of_versions_cannot_act(cli: Cli, store: Store, tmp_path: Path) -> None:
    """What a program stamped is shown as text: in the terminal, in JSON, in a picture."""
    for number in (1, 2):
        evil = f"{EVIL}<script>{number}"
        store.add(rollout(number, 1.0, stamps={c.RESOURCE_VERSION: evil}))
    picture = tmp_path / "c.svg"

    options = ("reward", "--by", "version", "--store", store.name)
    texts = [cli("plot", *options).stdout, cli("plot", *options, "--json").stdout]
    cli("plot", *options, "-o", picture)

    for text in [*texts, picture.read_text()]:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066]", text)
    assert "<script>" not in picture.read_text()


def test_one_rollout_has_its_curve_by_time(cli: Cli, store: Store) -> None:
    """As large as a time in nanoseconds is, the axis has a length."""
    with auto_trace(store=store):
        emit_reward(1.0)

    done = cli("plot", "reward", "--by", "time", "--store", store.name)

    assert done.returncode == 0
    assert done.stdout.startswith("reward  1 value ")


def test_what_is_wrong_is_told(cli: Cli, store: Store, tmp_path: Path) -> None:
    """An unknown metric, a store that is not there, and one with nothing in it."""
    store.writer()

    unknown = cli("plot", "rewarde", "--store", store.name)
    missing = cli("plot", "--store", tmp_path / "none.duckdb")
    empty = cli("plot", "--store", store.name)

    assert unknown.returncode == 2
    assert "no metric 'rewarde'" in unknown.stderr
    assert missing.returncode == 4
    assert empty.returncode == 0
    assert "reward: nothing to draw" in empty.stdout
    assert "→ lightning-otel run -- python your_agent.py" in empty.stderr

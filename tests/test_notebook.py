"""What a notebook shows of what was recorded and learnt; and the example notebook, run whole."""

import json
import os
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.acting import act
from tests.pages import ran
from tests.test_picture import parsed

from lightning_otel import (
    Recording,
    Resources,
    Store,
    auto_trace,
    emit_action,
    emit_observation,
    emit_reward,
)
from lightning_otel.adapter import TripletAdapter
from lightning_otel.resources.comparison import Comparison
from lightning_otel.state import State
from lightning_otel.state.runs import TrainingRun
from lightning_otel.store import table
from lightning_otel.store.table import Table
from lightning_otel.trainer import Fit, Verdict
from lightning_otel.types import Dropped, Report, Resource, Trajectory

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
EVIL = "</td></pre><script>alert(1)</script><img src=x onerror=alert(1)>"
LOSSY = Report(
    spans=9, calls=4, transitions=1, dropped=(Dropped("a", "b", "call", EVIL),) * 3,
    inexact={EVIL: 1},
)  # fmt: skip
MANY = Report(dropped=tuple(Dropped("a", "b", "call", f"why {n}") for n in range(50)))
RUN = TrainingRun("run-1", EVIL, "c", "failed", {"agent": EVIL}, 3, EVIL, 0, 0, 2_000_000_000)
MADE = Resource("p", 2, "prompt", {"template": "x"})
LONG = Resource("p", 2, "prompt", {"template": "x" * 5000, "examples": ()}, parent=1)
FIT = Fit(RUN, {"reward": 0.5}, {"p": MADE}, Verdict(("p",), EVIL), {EVIL: 4})
UNSURE = Comparison("p", 1, 2, 9, 9, 9, 0.25, 0.5, 0.25, -0.1, 0.6, 70, {EVIL: 2})


def published(store: Store) -> Resource:
    """A prompt whose text is an attack."""
    return Resources(State(store.name)).publish("system_prompt", f"one\n{EVIL}")


def record_evil(store: Store) -> Recording:
    with auto_trace(store=store, rollout_id="<b>r</b>") as recording:
        emit_action("</td><script>alert(1)</script>")
        emit_reward("<i>", 0.5)
    parsed(recording._repr_html_())
    return recording


def path_of(store: Store) -> Trajectory:
    return next(iter(store.trajectories()))


SHOWN: dict[str, tuple[Callable[[Store], Any], list[str], int | None]] = {
    "a trajectory": (
        path_of, ["r0&lt;b&gt;", "1 step, reward 0.5", "&lt;script&gt;"], 2,
    ),
    "a long one": (
        lambda store: Trajectory("r", "1", "a", 0, path_of(store).transitions * 1000),
        ["the first 20 of 1,000 steps"], 21,
    ),
    "a step": (
        lambda store: path_of(store).transitions[0],
        ["&lt;img src=x onerror=alert(1)&gt;", ">observation<", ">action<"], None,
    ),
    "a recording": (record_evil, ["&lt;b&gt;r&lt;/b&gt;"], None),
    "an empty one": (lambda _: Recording(), ["&lt;Recording of nothing&gt;"], None),
    "an answer": (
        lambda store: store.sql("SELECT '<script>' AS \"<b>\", range AS n FROM range(50)"),
        ["&lt;b&gt;", "the first 20 of 50 rows"], 21,
    ),
    "steps": (Store.transitions, ["&lt;/td&gt;&lt;/pre&gt;&lt;script&gt;"], None),
    "a trace": (lambda store: store.spans(rollout_id="r0<b>"), ["<svg"], None),
    "several traces": (lambda store: store.spans(), ["<p>8 spans</p>"], 9),
    "no trace": (lambda store: store.spans(rollout_id="none"), [], None),
    "the funnel": (Store.report, ["2 in a transition, 0 left out"], None),
    "a lossy one": (lambda _: LOSSY, ["1 in a transition, 3 left out", "&lt;script&gt;"], None),
    "many reasons": (lambda _: MANY, ["for 30 further reasons"], 1 + 6 + 20 + 1),
    "a resource": (published, ["system_prompt@1", "one\n&lt;/td&gt;"], None),
    "a long resource": (lambda _: LONG, ["the first 4,000 of 5,000 characters", "p@1"], None),
    "a run": (lambda _: RUN, [">2.0<"], None),
    "a fit": (
        lambda _: FIT, [">p@2<", ">live<", "plot_training_metrics(runs=&#x27;run-1&#x27;)"], None,
    ),
    "a comparison": (
        lambda _: UNSURE,
        [
            "p@2 is not significantly different: about 70 more tasks are needed (95 %)",
            "[-0.100, +0.600]",
        ],
        None,
    ),
}  # fmt: skip


def shown(thing: object) -> str:
    """What a notebook shows of a thing: one tree of elements, in which nothing runs or loads."""
    html: str = thing._repr_html_()  # type: ignore[attr-defined]  # notebooks ask for it
    names = {
        element.tag.rpartition("}")[2]
        for element in ElementTree.fromstring(f"<p>{html}</p>").iter()
    }
    assert not names & {"script", "img", "a", "iframe", "link", "object", "embed"}
    assert "<script" not in html
    return html


@pytest.fixture
def recorded(store: Store) -> Store:
    """A store with two rollouts whose every text is an attack."""
    for index in range(2):
        with auto_trace(store=store, rollout_id=f"r{index}<b>", task=EVIL, agent=EVIL):
            emit_observation(EVIL)
            emit_action(EVIL)
            emit_reward(EVIL, 0.5)
    return store


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_shows(recorded: Store, name: str) -> None:
    """Its facts, in so many rows; what a model or program wrote is text in it."""
    find, texts, rows = SHOWN[name]

    html = shown(find(recorded))

    assert [text for text in texts if text not in html] == []
    assert rows is None or html.count("<tr>") == rows


def test_plain_reprs_are_short(recorded: Store) -> None:
    """However long the messages, what stands in an error or a list is one line."""
    text = repr(path_of(recorded))

    assert text.startswith("<Trajectory of r0<b>, attempt 1, </td>")
    assert text.endswith("branch 0: 1 step, reward 0.5>")
    assert "observation" not in text
    assert repr(LOSSY) == (
        f"Report(spans=9, calls=4, transitions=1, dropped={{{EVIL!r}: 3}}, inexact={{{EVIL!r}: 1}})"
    )
    assert repr(TripletAdapter().explain([]).report) == "Report()"


@pytest.mark.pain(13)
def test_notebook_tables_say_how_many_rows_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty rows are shown; the whole count stands below, unless to count takes too long."""
    for index in range(25):
        act(store, f"r{index}")

    assert "the first 20 of 25 transitions" in shown(store.transitions())
    assert "the first 20 of 25 conversations" in shown(store.messages())
    assert "the first 20 of 50 spans" in shown(store.spans())
    assert "the first 20 of 25 rows" in shown(store.rollouts())
    assert "20,000 rows" in shown(store.sql("SELECT range AS n FROM range(20_000)"))
    assert "the first 20 of 25 transitions" in shown(store.transitions(is_call=lambda span: None))
    monkeypatch.setattr(table, "_COUNTING_S", -1)
    many = Table(lambda: pytest.fail("no query"), lambda: ({"n": n} for n in range(100)), "rows")
    assert "the first 20 of more than 20 rows" in shown(many)


def _texts(notebook: Any) -> list[list[tuple[str, str]]]:
    """What each cell of a notebook's JSON shows, in words; ids and times are alike in every run."""

    def words(text: Any) -> str:
        text = unescape(re.sub(r"(?s)<style.*?</style>|<[^>]*>", " ", "".join(text)))
        text = re.sub(r"\b(?=\w*\d)[0-9a-f]{6,}\b", "ID", text)
        return " ".join(re.sub(r"\b\d[\d.,]*(?: ?(?:ms|µs|s)\b)", "TIME", text).split())

    return [
        [(kind, words(text)) for part in cell["outputs"] for kind, text in part["data"].items()]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def test_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs in a real kernel, and shows what is kept; WRITE_PINS=1 keeps it anew."""
    pytest.importorskip("nbclient", reason="the notebook needs nbclient and ipykernel")
    program = "import sys; from nbclient.cli import main; sys.exit(main())"
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # else in the user's home
        monkeypatch.setenv(name, str(tmp_path / name))
    kept = json.loads(NOTEBOOK.read_text())
    made = tmp_path / "made.ipynb"
    made.write_text(json.dumps(kept))  # a kernel works in the folder of its notebook

    ran([sys.executable, "-c", program, str(made), "--inplace", "--timeout=50"], tmp_path)

    new = json.loads(made.read_text().replace(f"{tmp_path}/", ""))
    for cell in new["cells"]:
        cell["metadata"].pop("execution", None)
    new["metadata"] = kept["metadata"]
    if os.environ.get("WRITE_PINS"):
        NOTEBOOK.write_text(json.dumps(new, ensure_ascii=False, indent=1) + "\n")
    assert _texts(kept) == _texts(new)
    shown = " ".join(text for cell in _texts(new) for _, text in cell)
    assert "3 spans · 1 step · 1 of 1 reward credited" in shown
    assert "the first 20 of 21 transitions" in shown
    assert "system_prompt@2 is better (95 %)" in shown

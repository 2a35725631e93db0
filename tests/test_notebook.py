"""What a notebook shows of what was recorded and learnt; and the example notebook, run whole."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.pages import ran

from lightning_otel import Store, auto_trace, emit_action, emit_observation, emit_reward
from lightning_otel.adapter import TripletAdapter
from lightning_otel.resources import Resources
from lightning_otel.resources.comparing import Comparison
from lightning_otel.state import State
from lightning_otel.state.runs import TrainingRun
from lightning_otel.store import table
from lightning_otel.store.table import Table
from lightning_otel.trainer import Fit, Verdict
from lightning_otel.types import Dropped, Report, Resource, Trajectory

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
EVIL = "</td></pre><script>alert(1)</script><img src=x onerror=alert(1)>"


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


def test_notebook_shows_steps_and_where_they_belong(recorded: Store) -> None:
    """A trajectory and a step are tables; what a model or program wrote is text in them."""
    (path, _) = recorded.trajectories()

    table, step = shown(path), shown(path.transitions[0])

    assert "r0&lt;b&gt;" in table
    assert "1 step, reward 0.5" in table
    assert table.count("<tr>") == 2
    assert "&lt;script&gt;" in table
    assert "&lt;img src=x onerror=alert(1)&gt;" in step
    assert ">observation<" in step
    assert ">action<" in step


def test_plain_repr_of_a_trajectory_is_a_line(recorded: Store) -> None:
    """However long the messages, what stands in an error or a list is one line."""
    (path, _) = recorded.trajectories()

    assert repr(path).startswith("<Trajectory of r0<b>, attempt 1, </td>")
    assert repr(path).endswith("branch 0: 1 step, reward 0.5>")
    assert "observation" not in repr(path)


def test_notebook_cuts_long_trajectories_and_says_so(recorded: Store) -> None:
    """Of a thousand steps twenty are shown, with the whole count."""
    (path, _) = recorded.trajectories()
    long = Trajectory("r", "1", "a", 0, path.transitions * 1000)

    html = shown(long)

    assert html.count("<tr>") == 21
    assert "the first 20 of 1,000 steps" in html


def test_notebook_shows_a_trace_as_its_picture(recorded: Store) -> None:
    """Spans of one rollout are drawn; of several, and of too many, listed with their count."""
    one = recorded.spans(rollout_id="r0<b>")
    every = recorded.spans()

    drawn, listed = shown(one), shown(every)

    assert drawn.startswith("<svg")
    assert f"<p>{len(every.rows())} spans</p>" in listed
    assert listed.count("<tr>") == len(every.rows()) + 1
    assert "no such" not in shown(recorded.spans(rollout_id="none"))


@pytest.mark.pain(13)
def test_notebook_tables_say_how_many_rows_there_are(store: Store) -> None:
    """Twenty rows are shown of each table; the whole count is true and stands below."""
    for index in range(25):
        with auto_trace(store=store, rollout_id=f"r{index}"):
            emit_action("a")

    assert "the first 20 of 25 transitions" in shown(store.transitions())
    assert "the first 20 of 25 conversations" in shown(store.messages())
    assert "the first 20 of 50 spans" in shown(store.spans())
    assert "the first 20 of 25 rows" in shown(store.rollouts())
    assert "20,000 rows" in shown(store.sql("SELECT range AS n FROM range(20_000)"))
    assert "the first 20 of 25 transitions" in shown(store.transitions(is_call=lambda span: None))


def test_notebook_does_not_count_for_ever(recorded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where to count takes too long, that there are more is said, and more than how many."""
    monkeypatch.setattr(table, "_COUNTING_S", -1)
    many = Table(lambda: pytest.fail("no query"), lambda: ({"n": n} for n in range(100)), "rows")

    assert "the first 20 of more than 20 rows" in shown(many)


def test_notebook_shows_the_funnel_with_its_reasons(recorded: Store) -> None:
    """Every number of a report stands there, and every reason with its count."""
    report = recorded.report()
    lossy = Report(
        spans=9, calls=4, transitions=1, dropped=(Dropped("a", "b", "call", EVIL),) * 3,
        inexact={EVIL: 1},
    )  # fmt: skip

    assert "2 in a transition, 0 left out" in shown(report)
    html = shown(lossy)
    assert "1 in a transition, 3 left out" in html
    assert html.count("&lt;script&gt;") == 2
    assert repr(lossy) == (
        f"Report(spans=9, calls=4, transitions=1, dropped={{{EVIL!r}: 3}}, inexact={{{EVIL!r}: 1}})"
    )


def test_notebook_names_no_reason_beyond_twenty_but_counts_them() -> None:
    """Of very many reasons the most frequent are named, the others counted together."""
    lossy = Report(dropped=tuple(Dropped("a", "b", "call", f"why {n}") for n in range(50)))

    html = shown(lossy)

    assert "for 30 further reasons" in html
    assert html.count("<tr>") == 1 + 6 + 20 + 1


def test_notebook_shows_a_resource_with_its_text(tmp_path: Path) -> None:
    """Name, version and origin, and the template with its lines; of a long one its size."""
    resources = Resources(State(tmp_path / "traces.duckdb"))
    first = resources.publish("system_prompt", f"one\n{EVIL}")
    long = Resource("p", 2, "prompt", {"template": "x" * 5000, "examples": ()}, parent=1)

    assert "system_prompt@1" in shown(first)
    assert "one\n&lt;/td&gt;" in shown(first)
    assert "the first 4,000 of 5,000 characters" in shown(long)
    assert "p@1" in shown(long)


def test_notebook_shows_runs_and_comparisons() -> None:
    """A training run, what it came to, and a comparison say all that they know."""
    run = TrainingRun("run-1", EVIL, "c", "failed", {"agent": EVIL}, 3, EVIL, 0, 0, 2_000_000_000)
    made = Resource("p", 2, "prompt", {"template": "x"})
    fit = Fit(run, {"reward": 0.5}, {"p": made}, Verdict(("p",), EVIL), {EVIL: 4})
    unsure = Comparison("p", 1, 2, 9, 9, 9, 0.25, 0.5, 0.25, -0.1, 0.6, 70, {EVIL: 2})

    html = shown(fit)

    assert ">2.0<" in shown(run)
    assert ">p@2<" in html
    assert ">live<" in html
    assert "plot_training_metrics(runs=&#39;run-1&#39;)" in html
    assert "p@2 is not told apart: about 70 more tasks are needed (95 %)" in shown(unsure)
    assert "[-0.100, +0.600]" in shown(unsure)


def test_importing_types_does_not_import_what_shows_them() -> None:
    """A traced process pays for no markup: it is imported where somebody looks."""
    program = (
        "import sys, lightning_otel.types, lightning_otel.adapter\n"
        "sys.exit('lightning_otel.markup' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


def test_repr_of_what_the_adapter_gives_is_short() -> None:
    """Nothing in, nothing to show: also that is said."""
    found = TripletAdapter().explain([])

    assert repr(found.report) == "Report()"


def test_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs in a real kernel, and shows what it is there to show."""
    nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbclient and ipykernel")
    program = "import sys; from nbclient.cli import main; sys.exit(main())"
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # else in the user's home
        monkeypatch.setenv(name, str(tmp_path / name))
    made = tmp_path / "made.ipynb"
    made.write_text(NOTEBOOK.read_text())  # a kernel works in the folder of its notebook

    ran([sys.executable, "-c", program, str(made), "--inplace", "--timeout=50"], tmp_path)

    cells = [cell for cell in nbformat.read(made, as_version=4).cells if cell.cell_type == "code"]
    shown = ["".join(part.data.get("text/html", "") for part in cell.outputs) for cell in cells]
    of = {cell.source.partition("\n")[0]: html for cell, html in zip(cells, shown, strict=True)}
    assert "3 spans" in of["recording"]
    assert "1 step, reward 0" in of["recording.trajectories()[0]"]
    assert "1 in a transition, 0 left out" in of["recording.report()"]
    assert "the first 20 of 21 transitions" in of["store.transitions()"]
    assert '<table border="1" class="dataframe">' in of["frame = store.transitions().df()"]
    assert of['lo.plot_training_metrics(store, ["reward"])'].startswith("<svg")
    compared = of['prompts.compare("system_prompt", 1, 2, store=store)']
    assert "10 tasks done with both" in compared
    assert "system_prompt@2 is better (95 %)" in compared
    assert "carry the one" in of['prompts.set_alias("system_prompt", "live", 2)']
    assert not [cell for cell in cells for part in cell.outputs if part.output_type == "error"]


def test_example_notebook_is_kept_without_outputs() -> None:
    """What is committed is what a person wrote, and nothing that a machine added."""
    kept = json.loads(NOTEBOOK.read_text())

    code = [cell for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)

"""Selections: versions that stay what they were, by Python, the command line and pages."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.acting import act
from tests.command import invoke
from tests.viewer.client import AskingOf

from lightning_otel import (
    Advantage,
    ConfigError,
    Span,
    Store,
    auto_trace,
    emit_action,
    emit_feedback,
    retract_reward,
)
from lightning_otel.errors import NotFoundError, StoreError
from lightning_otel.types import conventions as c


def record(store: Store, rollout_id: str, reward: float) -> None:
    act(store, rollout_id, {"resolved": reward}, seen="seen", agent="solver", task=rollout_id)


@pytest.fixture
def filled(store: Store) -> Store:
    """Five rollouts, from 0 to 1."""
    for number in range(5):
        record(store, f"r{number}", number / 4)
    return store


def rows(store: Store, selection: str, format: str = "triplets") -> list[tuple[str, float]]:
    exported = store.rows(format, selection=selection)
    return [(row["rollout_id"], row["reward"]) for row in exported]


def test_a_version_stays_what_it_was(filled: Store) -> None:
    """Whatever is recorded, rewarded or retracted since; to save again makes the next one."""
    first = filled.save_selection("good", min_reward=0.5)
    again = filled.save_selection("good", min_reward=0.5)
    frozen = rows(filled, "good@1")
    emit_feedback(rating=0, rollout_id="r4", name="resolved", author="ana", store=filled)
    (span_id,) = (
        row["span_id"] for row in filled.sql("FROM rewards WHERE rollout_id = 'r3'").rows()
    )
    with auto_trace(store=filled, rollout_id="later"):
        retract_reward(span_id, rollout_id="r3")
    record(filled, "r9", 1.0)

    assert (str(first), str(again), len(first.steps)) == ("good@1", "good@1", 3)
    assert frozen == [("r2", 0.5), ("r3", 0.75), ("r4", 1.0)]
    assert rows(filled, "good@1") == frozen
    with pytest.raises(ConfigError, match=r"\(resolved, resolved \(ana\)\); say which one counts"):
        filled.save_selection("good", min_reward=0.5)
    second = filled.save_selection("good", min_reward=0.5, reward="resolved")
    assert str(second) == "good@2"
    assert rows(filled, "good") == [("r2", 0.5), ("r4", 1.0), ("r9", 1.0)]
    assert rows(filled, "good@1") == frozen


def test_an_export_names_its_version_and_is_certified(filled: Store, tmp_path: Path) -> None:
    """On the command line: save, export, verify, compare, save the same again."""
    store, out = filled.name, str(tmp_path / "good.jsonl")
    saved = invoke("selections", "save", "good", "--min-reward", "0.5", "--store", store)
    record(filled, "r9", 1.0)
    written = invoke("export", "sft", out, "--selection", "good", "--certificate", "--store", store)
    certificate = json.loads(Path(f"{out}.certificate.json").read_text())
    verdict = invoke("verify", out, "--store", store)
    again = invoke("selections", "save", "good", "--store", store)
    diff = invoke("selections", "diff", "good@1", "good@2", "--store", store)
    listed = json.loads(invoke("selections", "list", "--json", "--store", store).stdout)

    assert (saved.stdout, again.stdout) == ("good@1: 3 steps\n", "good@2: 4 steps\n")
    assert (written.returncode, verdict.returncode) == (0, 0), verdict.stderr
    assert certificate["predicate"]["options"] == {"selection": "good@1"}
    assert diff.stdout.startswith("+ ")
    assert "1 added, 0 gone, 0 with another reward" in diff.stderr
    assert [(row["name"], row["version"], row["steps"]) for row in listed] == [("good", 2, 4)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"selection": "goood"}, NotFoundError, "did you mean 'good'"),
        ({"selection": "good@7"}, NotFoundError, "there are good@1"),
        ({"selection": "good", "min_reward": 1.0}, ConfigError, "leave out min_reward"),
    ],
)
def test_what_is_no_version_is_refused(
    filled: Store, options: dict[str, str], error: type[Exception], words: str
) -> None:
    """With the nearest names."""
    filled.save_selection("good")

    with pytest.raises(error, match=words):
        filled.export("sft", None, **options)


def test_what_cannot_be_saved_is_refused(filled: Store) -> None:
    """A name that is no file's, no step, an unknown reward; and a version that changed is told."""
    for name, options, words in (
        ("../x", {}, "no selection can be named"),
        ("good", {"min_reward": 9.0}, "no step matches"),
        ("good", {"selection": "good"}, "is saved already"),
        ("good", {"reward": "resolvd"}, "did you mean 'resolved'"),
    ):
        with pytest.raises(ConfigError, match=words):
            filled.save_selection(name, **options)
    with pytest.raises(ConfigError, match="no plain value and cannot be saved"):
        filled.save_selection("good", advantage=Advantage())
    wrong: Any = 3
    with pytest.raises(ConfigError, match="name is 3; it must be"):
        filled.save_selection(wrong)
    with pytest.raises(ConfigError, match="selection is 3; it must be"):
        filled.transitions(selection=wrong)
    with auto_trace(store=filled, rollout_id="r5"):
        span_id = emit_action("done")
    filled.save_selection("good")
    link = {f"{c.LINK_PREFIX}.0.key_match": "span_id", f"{c.LINK_PREFIX}.0.value_match": span_id}
    late = {c.ROLLOUT_ID: "r5", c.REWARD_VALUE: 1.0, **link}  # by a clock that is behind
    filled.add([Span("a" * 32, "b" * 16, None, c.SPAN_ANNOTATION, 1, 1, attributes=late)])
    with pytest.raises(StoreError, match="0 of its 6 steps are gone, 1 have other rewards"):
        filled.export("sft", None, selection="good")


def test_pages_save_show_and_compare(asking: AskingOf, filled: Store, tmp_path: Path) -> None:
    """From a list and from transitions; who takes a label back learns where it stays."""
    asked = asking(filled)
    label = {"item": "r4", "name": "label", "author": "ana"}
    asked.post("/label", **label, reward="1")
    open_reward = asked.post("/selections?of=rollouts&status=succeeded", name="good")
    saved = asked.post("/selections?of=rollouts&id=r4", name="good", reward="label")
    asked.post("/selections?of=transitions&min_reward=0.5&reward=resolved", name="good")
    filled.export("sft", tmp_path / "x.jsonl", selection="good@1")
    (again,) = re.findall(
        r'href="([^"]*)">save the same', asked.get("/selections/good?version=1").text
    )
    form = asked.get(unescape(again)).text
    page = asked.get("/selections/good").words

    assert (open_reward.status, "say which one counts" in open_reward.words.lower()) == (400, True)
    assert 'value="good"' in open_reward.text  # the form is there yet
    assert "--" not in open_reward.words  # no option of the command line
    assert saved.headers["location"] == "/selections/good"
    assert ('value="good"' in form, 'value="label"' in form) == (True, True)
    assert 'action="/selections?of=rollouts&amp;id=r4"' in form
    assert "3 rollouts, 3 steps" in page
    assert "2 added, 0 gone, 0 with another reward" in page
    assert "#0 r2 seen done 0.5" in page
    assert "good 2 3 3 resolved" in asked.get("/selections?of=rollouts").words
    assert asked.get("/selections/god").status == 404
    assert "save the same filter again" in page
    asked.post("/selections?of=rollouts&q=done", name="told", reward="resolved")
    told = asked.get("/selections/told")
    assert (told.status, "q=done" in told.text, "save the same filter again" in told.words) == (
        200, False, False,
    )  # fmt: skip
    undone = asked.ask(
        "POST", "/label", "item=r4&name=label&author=ana&reward=", Accept="application/json",
        Content_Type="application/x-www-form-urlencoded", Sec_Fetch_Site="same-origin",
    )  # fmt: skip
    (note,) = json.loads(undone.body)["notes"]
    assert note.startswith("The earlier label stays in good@1, exported to")
    assert note.endswith("x.jsonl; save the selection again.")


def test_a_damaged_file_is_told_and_stops_nothing_else(asking: AskingOf, filled: Store) -> None:
    """The selection can be saved again, as it says; labels are replaced as ever."""
    assert filled.layout is not None
    emit_feedback(rating=5, name="good", author="ana", rollout_id="r4", store=filled)
    filled.save_selection("good", reward="good")
    folder = filled.layout.root / "selections"
    (folder / "other@1.json").mkdir()
    for name in ("@1", "good@0", "good@٣", "a@1@2"):  # none of ours
        (folder / f"{name}.json").touch()
    (folder / "good@1.json").write_text('{"name"')
    (folder / "exports.ndjson").write_text('{"selection": "go')
    with pytest.raises(
        StoreError, match=r"good@1.json cannot be read .*; save the selection again"
    ):
        rows(filled, "good")

    again = filled.save_selection("good", reward="good")
    asked = asking(filled)
    replaced = asked.post("/label", item="r4", name="good", author="ana", reward="0.5")

    assert str(again) == "good@2"
    assert rows(filled, "good")[-1] == ("r4", 1.0)
    assert replaced.status == 303, replaced.words

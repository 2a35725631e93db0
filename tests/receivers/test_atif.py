"""ATIF: document to store to document is equal in every field, and what cannot be kept is named."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.command import invoke
from tests.formats.atif_rules import check_document

from lightning_otel import Store, TripletAdapter
from lightning_otel.dataset import formats
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Span

RICH = Path(__file__).parent.parent / "data" / "imports" / "atif.json"
"""A document with every field of the format, and a subagent in a subagent."""


def spans_of(document: Any) -> list[Span]:
    found = list(documents.decode_spans(json.dumps(document).encode()))
    assert all(isinstance(each, Span) for each in found), found
    return [each for each in found if isinstance(each, Span)]


def exported(spans: list[Span]) -> list[dict[str, Any]]:
    """The documents that a store of these spans exports."""
    return list(formats.rows("atif", TripletAdapter().adapt(spans)))


def test_a_rich_file_comes_back_from_the_store(tmp_path: Path) -> None:
    """Every field is equal; the calls are exact transitions with rewards, and nothing doubles."""
    wanted, store = json.loads(RICH.read_text()), tmp_path / "s.duckdb"
    check_document(wanted)
    wanted["steps"][0]["metrics"] = wanted["agent"]["tool_definitions"] = None
    wanted["continued_trajectory_ref"] = None
    file = tmp_path / "atif.json"
    file.write_text(json.dumps(wanted))

    first = invoke("import", file, "--store", store)
    again = invoke("import", file, "--store", store)
    done = invoke("export", "atif", tmp_path / "out.jsonl", "--store", store)

    assert (first.returncode, again.returncode, done.returncode) == (0, 0, 0), first.stderr
    assert " 0 new" in again.stderr
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line) == wanted
    steps = Store(store).transitions().rows()
    told = [(step.agent, step.capture, step.reward) for step in steps]
    assert sorted(told, key=str) == [
        ("coder", "exact", 0.25), ("coder", "text", 1.0), ("reader", "text", None),
        ("searcher", "text", None),
    ]  # fmt: skip
    tools = [each.operation for each in Store(store).spans()].count("execute_tool")
    assert tools == 3  # none of the copied step's


def test_what_we_export_comes_back(tmp_path: Path) -> None:
    """Documents of recorded rollouts, into another store and out again."""
    first, second = tmp_path / "1.duckdb", tmp_path / "2.duckdb"
    invoke("demo", "--rollouts", "8", "--store", first)
    for store, name in ((first, "1.jsonl"), (second, "2.jsonl")):
        done = invoke("export", "atif", tmp_path / name, "--store", store)
        assert done.returncode == 0, done.stderr
        if store is first:
            assert invoke("import", tmp_path / name, "--store", second).returncode == 0
            own = invoke("import", tmp_path / name, "--store", first)
            assert "0 spans read, 0 new" in own.stderr
            assert "8 attempts not read: the store recorded them" in own.stderr

    one, two = (sorted((tmp_path / f"{n}.jsonl").read_text().splitlines()) for n in (1, 2))
    assert list(map(json.loads, one)) == list(map(json.loads, two))


def _set(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        if value is None:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(None, "agent"), "trajectory.agent is missing"),
        (_set(3, "agent", "name"), "trajectory.agent.name is no text"),
        (_set("ATIF-v2.0", "schema_version"), "schema_version is 'ATIF-v2.0', none"),
        (_set({}, "steps"), "trajectory.steps is no list"),
        (_set([], "steps", 2), "trajectory.steps[2] is no object"),
        (_set(True, "steps", 2, "step_id"), "trajectory.steps[2].step_id is no integer"),
        (_set(9, "steps", 2, "step_id"), "trajectory.steps[2].step_id is 9, not 3"),
        (_set("tool", "steps", 2, "source"), "trajectory.steps[2].source is tool"),
        (_set("{}", "steps", 2, "tool_calls", 0, "arguments"), "tool_calls.arguments is no object"),
        (_set("soon", "steps", 2, "timestamp"), "time is 'soon', not ISO 8601"),
        (_set([1, "x"], "steps", 2, "metrics", "prompt_token_ids"), "prompt_token_ids are no such"),
        (_set("x" * (8 << 20), "steps", 2, "message"), "which one span cannot hold"),
        (_set("\ud83d", "extra", "n"), "the trajectory has a value that no store holds: str"),
        (_set([], "subagent_trajectories", 0), "subagent_trajectories[0] is no object"),
        (_set([{"step_id": 1, "source": "user", "message": "hi"}], "steps"), ""),
    ],
)  # fmt: skip
def test_a_document_is_taken_whole_or_named(change: Callable[[Any], None], reason: str) -> None:
    """One field that breaks the format, and there is no span of the document but the reason."""
    document = json.loads(RICH.read_text())
    change(document)

    found = list(documents.decode_spans(json.dumps([document]).encode()))

    if reason:
        (only,) = found
        assert isinstance(only, Rejected)
        assert reason in only.reason
    else:  # its subagents alone asked models: they hold the rest
        assert exported(spans_of(document)) == [document]


texts = st.text(st.characters(codec="utf-8"), max_size=5)
values = st.recursive(st.none() | st.booleans() | st.integers(0, 9) | texts,
                      lambda inner: st.lists(inner, max_size=2)
                      | st.dictionaries(texts, inner, max_size=2), max_leaves=3)  # fmt: skip
extras = st.dictionaries(st.sampled_from(["a", "reward", "rewards"]), values, max_size=2)
sources = st.sampled_from(["image/png", "audio/wav"]).map(lambda m: (m.partition("/")[0], m))
contents = texts | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, texts)
    | st.builds(lambda kind, path: {
        "type": kind[0], "source": {"media_type": kind[1], "path": path}}, sources, texts),
    max_size=3)  # fmt: skip
times = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T01:00:00.5+01:00", "2025-12-31"])
METRICS: dict[str, Any] = {
    "prompt_tokens": st.integers(0, 9), "cost_usd": st.floats(0, 1), "cached_tokens": st.just(1),
    "completion_tokens": st.integers(0, 9), "extra": extras,
    "prompt_token_ids": st.lists(st.integers(-1, 9), max_size=3),
    "completion_token_ids": st.lists(st.integers(0, 9), max_size=3),
    "logprobs": st.lists(st.floats(-2, 0.5), max_size=3),
}  # fmt: skip
CALL: Any = {"tool_call_id": texts, "function_name": texts,
             "arguments": st.dictionaries(texts, values, max_size=2)}  # fmt: skip
RESULT: dict[str, Any] = {"source_call_id": texts, "content": contents, "extra": extras,
                          "subagent_trajectory_ref": st.just([{"trajectory_id": "s"}])}  # fmt: skip
MORE: dict[str, Any] = {
    "timestamp": times, "model_name": texts, "reasoning_effort": texts | st.floats(0, 1),
    "reasoning_content": texts, "llm_call_count": st.integers(0, 2), "extra": extras,
    "tool_calls": st.lists(st.fixed_dictionaries(CALL, optional={"extra": extras}), max_size=2),
    "observation": st.fixed_dictionaries(
        {"results": st.lists(st.fixed_dictionaries({}, optional=RESULT), max_size=3)}),
    "metrics": st.fixed_dictionaries({}, optional=METRICS), "is_copied_context": st.booleans(),
}  # fmt: skip
steps = st.fixed_dictionaries(
    {"source": st.sampled_from(["agent", "agent", "user", "system"]), "message": contents},
    optional=MORE,
)
agents = st.fixed_dictionaries(
    {"name": texts},
    optional={"version": texts, "model_name": texts, "extra": extras,
              "tool_definitions": st.lists(st.dictionaries(texts, values, max_size=2), max_size=2)},
)  # fmt: skip


def _trajectories(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"schema_version": st.just("ATIF-v1.7"), "agent": agents,
         "steps": st.lists(steps, min_size=1, max_size=5)},
        optional={"session_id": texts, "trajectory_id": texts, "notes": texts, "extra": extras,
                  "final_metrics": st.just({"total_steps": 3, "total_cost_usd": 0.5}),
                  "continued_trajectory_ref": texts, "subagent_trajectories": below},
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(_trajectories(st.lists(_trajectories(st.just([])), max_size=2)), st.booleans())
def test_every_document_comes_back(document: Any, is_printed_whole: bool) -> None:
    """Whatever fields it has, null ones too: equal, unless nothing in it asked a model."""
    document = copy.deepcopy(document)
    for each in (document, *document.get("subagent_trajectories", ())):
        for index, step in enumerate(each["steps"], 1):
            step["step_id"] = index
            if is_printed_whole:  # as pydantic prints a model
                each["agent"] = {"extra": None, **each["agent"]}
                each["steps"][index - 1] = {**dict.fromkeys(MORE), **step}
        if is_printed_whole:
            each |= {**dict.fromkeys(("notes", "extra", "final_metrics")), **each}
    found = list(documents.decode_spans(json.dumps(document).encode()))
    if isinstance(found[0], Rejected):
        assert "asked a model" in found[0].reason
        return
    assert exported(spans_of(document)) == [document]

"""Formats as a family, ATIF documents, and trajectories that come back from the disk by group."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from tests.adapter.forest import draw, said
from tests.adapter.forests import forests
from tests.formats.atif_rules import check_document
from tests.formats.consumers.recorded import recorded
from tests.formats.made import (
    AUDIO,
    IMAGE,
    LINKED,
    THOUGHT,
    TOOL,
    VIDEO,
    called,
    exact,
    parts,
    path,
    result,
    step,
    text,
)
from tests.trainer.made import record

from lightning_otel import Span, Store, TripletAdapter
from lightning_otel.dataset import formats, registry
from lightning_otel.dataset.formats import Format, LeftOut
from lightning_otel.dataset.formats.groups import by_group
from lightning_otel.errors import ConfigError
from lightning_otel.receivers.documents import decode_spans
from lightning_otel.types import Trajectory, Transition

OURS = [
    "agentlightning", "atif", "dpo", "grpo", "kto", "openai-dpo", "openai-sft",
    "prompt-completion", "sft", "tokens", "triplets", "verl",
]  # fmt: skip


def answers(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """A format as a user writes one: a plain function."""
    for trajectory in trajectories:
        for each in trajectory.transitions:
            yield {"said": each.action[0]["parts"][0]["content"]}


def picky(trajectories: Iterable[Trajectory], *, least: float = 0.0) -> Iterator[Any]:
    """One with an option, that leaves things out."""
    for trajectory in trajectories:
        for each in trajectory.transitions:
            is_kept = each.reward is not None and each.reward >= least
            yield {"reward": each.reward} if is_kept else LeftOut(each, "too little; earn more")


PICKY = Format(picky, {"reward": "DOUBLE"}, used_by="a test", needs="a reward")
NO_FORMAT = 3


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers members beside ours, as an installed distribution would."""

    def register(**members: str) -> None:
        ours = registry.entry_points(group=formats.GROUP)
        more = [EntryPoint(name, value, formats.GROUP) for name, value in members.items()]
        # Replaced because a test installs no distribution.
        monkeypatch.setattr(registry, "entry_points", lambda group: [*more, *ours])

    return register


def test_grpo_has_the_advantages_that_are_asked_for(tmp_path: Path) -> None:
    """In its own groups: those of a task, else of the rollouts with the same first prompt."""
    store = recorded(tmp_path / "traces.duckdb")

    plain, filled = list(store.rows("grpo")), list(store.rows("grpo", advantage="dr_grpo"))

    assert {row["advantage"] for row in plain} == {None}
    assert [row["advantage"] for row in filled] == [row["reward"] - 0.5 for row in filled]
    assert [row["group_id"] for row in filled] == [row["group_id"] for row in plain]


def test_ours_are_registered_as_anybodys() -> None:
    """Every member is found by its entry point and says for whom it is and what it needs."""
    assert formats.names() == OURS
    for name in OURS:
        found = formats.get(name)
        assert list(formats.rows(name, [])) == []
        assert found.used_by
        assert found.needs
        assert found.columns


def test_a_registered_function_is_a_format(registered: Callable[..., None]) -> None:
    """A plain function stands beside ours under its name, and rows come of it."""
    registered(sft=f"{__name__}:answers", picky=f"{__name__}:PICKY")
    told: list[LeftOut] = []
    given = [path(step(reward=1.0)), path(step(reward=0.25, span_id="s2"))]

    rows = list(formats.rows("picky", given, left_out=told.append, least=0.5))

    assert set(formats.names()) == {*OURS, "picky"}
    assert list(formats.rows("sft", [path(step("a"))])) == [{"said": "a"}]  # in place of ours
    assert formats.get("picky").options() == {"least": 0.0}
    assert rows == [{"reward": 1.0}]
    assert [(each.step.span_id, each.reason) for each in told] == [("s2", "too little; earn more")]


def test_wrong_names_and_members_are_explained(registered: Callable[..., None]) -> None:
    """An unknown format or option, or a member that is none, says what there is."""
    registered(broken="no_such_module:X", number=f"{__name__}:NO_FORMAT")

    with pytest.raises(ConfigError, match=r"no format 'sfd'; did you mean 'sft'\?"):
        formats.rows("sfd", [])
    with pytest.raises(ConfigError, match="no format 'zzz'; there are agentlightning, atif"):
        formats.rows("zzz", [])
    with pytest.raises(ConfigError, match=r"no option .treshold.; did you mean .threshold."):
        formats.rows("kto", [], treshold=1)
    with pytest.raises(ConfigError, match="no option 'threshold'; it has none"):
        formats.rows("triplets", [], threshold=1)
    with pytest.raises(ConfigError, match=r"format broken .*cannot be loaded"):
        formats.rows("broken", [])
    with pytest.raises(ConfigError, match="'number' is 3; register a function or a Format"):
        formats.rows("number", [])


@pytest.mark.parametrize("name", OURS)
def test_rows_are_made_one_by_one(name: str) -> None:
    """A format that compares nothing asks for no trajectory before its row is wanted."""
    asked = []

    def endless() -> Iterator[Trajectory]:
        for index in range(100):
            asked.append(index)
            action = (said("assistant", f"answer {index}"),)
            yield path(exact([1], [2], float(index % 2), action=action, rollout_id=f"r{index}"))

    next(formats.rows(name, endless()))

    is_by_attempt = name in ("atif", "tokens")  # one is over when the next one begins
    assert len(asked) == (100 if formats.get(name).is_grouped else 1 + is_by_attempt)


@settings(max_examples=25, deadline=None)
@given(forests)
def test_every_step_is_in_a_row_or_has_a_reason(spans: list[Span]) -> None:
    """Whatever was recorded: no exception, rows of the columns named, and no step is lost."""
    found = TripletAdapter().adapt(spans)
    steps = {_key(each) for trajectory in found for each in trajectory.transitions}
    for name in OURS:
        told: list[LeftOut] = []

        rows = list(formats.rows(name, found, left_out=told.append))

        assert all(set(row) <= set(formats.get(name).columns) for row in rows)
        assert all(_is_json(row) for row in rows)
        left = [_key(each.step)[-1] for each in told if not each.is_row_written]
        named = [formats.get(name).steps_of(row) for row in rows]
        counts = sum(each if isinstance(each, int) else len(each or ()) for each in named)
        assert counts + len(left) == len(steps), name
        if not any(isinstance(each, int) for each in named):
            named_ids = [each for ids in named if isinstance(ids, list) for each in ids]
            assert sorted([*named_ids, *left]) == sorted(key[-1] for key in steps), name


def _key(each: Transition) -> tuple[str, ...]:
    return each.rollout_id, each.attempt_id, each.trace_id, each.span_id


def _is_json(row: dict[str, Any]) -> bool:
    """Whether a row is made of what every reader of JSON takes."""
    return bool(json.dumps(row, allow_nan=False))


@pytest.fixture
def trajectory() -> Trajectory:
    """Two steps with a reward, tools and a mapping of each kind."""
    return TripletAdapter().adapt(draw("question !ok=1,short=.5 end").spans)[0]


@pytest.mark.parametrize("odd", [2**80, -(2**70), "half \ud83d of a pair", "\x00", "日本"])
def test_a_trajectory_comes_back_as_it_was(trajectory: Trajectory, odd: object) -> None:
    """Whatever values it holds, and of whatever kinds its sequences and mappings are."""
    said = ({"role": "user", "parts": [{"type": "text", "content": odd}]},)
    step = replace(
        trajectory.transitions[0],
        observation=said,
        prompt_ids=array("i", [1, 2]),
        rewards=MappingProxyType({"ok": 1.0}),
    )
    found = replace(trajectory, transitions=(step, *trajectory.transitions[1:]))

    (back,) = by_group([found])

    assert back == replace(
        found, transitions=(replace(step, prompt_ids=(1, 2)), *found.transitions[1:])
    )


def test_groups_come_together_in_the_order_of_their_first(trajectory: Trajectory) -> None:
    """Each trajectory once, and those of a group one after the other."""
    grouped = [
        replace(
            trajectory,
            rollout_id=str(number),
            transitions=tuple(replace(step, group_id=name) for step in trajectory.transitions),
        )
        for number, name in enumerate("abab")
    ]

    assert [found.rollout_id for found in by_group(grouped)] == ["0", "2", "1", "3"]


def test_the_uid_of_verl_is_the_tasks(store: Store) -> None:
    """Also where nobody asks for advantages, and prompts of several tasks are the same."""
    record(store, {"a": [1.0, 0.0], "b": [0.5]}, tokens=True)

    first, second, other = (row["uid"] for row in store.rows("verl"))

    assert first == second != other


ASKED = (said("system", "be brief"), parts("user", text("look"), IMAGE, LINKED, AUDIO))
CALLED = parts("assistant", THOUGHT, text("hm"), called("c1", word="a"), called("c2"))
ANSWERED = parts("tool", result("c1", "one"), result("c2", {"n": 2}))
FIRST = exact(
    [1, 2], [3], 0.5, observation=ASKED, action=(CALLED,), tools=(TOOL,), model="m",
    input_tokens=2, output_tokens=1, start_ns=1_760_000_000_123_456_789, rewards={"primary": 0.5},
    next_observation=(*ASKED, CALLED, ANSWERED), done=False,
)  # fmt: skip
LAST = exact(
    [1, 2, 3, 4], [5], 1.0, span_id="s2",
    observation=(*ASKED, CALLED, ANSWERED, said("user", "so?")),
    action=(said("assistant", "done"),), model="m", rewards={"right": 1.0, "short": 0.5},
)  # fmt: skip


def documents(*trajectories: Trajectory) -> tuple[list[dict[str, Any]], list[LeftOut]]:
    """The documents of trajectories, each valid, and what was left out."""
    told: list[LeftOut] = []
    found = list(formats.rows("atif", trajectories, left_out=told.append))
    for each in found:
        check_document(each)
    return found, told


def test_a_document_holds_what_was_recorded() -> None:
    """Messages, reasoning, tools with their answers, media, tokens, counts, times and rewards."""
    ((found,), told) = documents(path(FIRST, LAST))

    assert (found["schema_version"], found["session_id"]) == ("ATIF-v1.8", "r1")
    assert found["agent"] == {
        "name": "calc", "version": "unknown", "model_name": "m",
        "tool_definitions": [{"type": "function", "function": {
            name: value for name, value in TOOL.items() if name != "type"}}],
    }  # fmt: skip
    system, user, first, asked, last = found["steps"]
    assert (system["source"], system["message"]) == ("system", "be brief")
    assert [part["type"] for part in user["message"]] == ["text", "image", "image", "audio"]
    assert user["message"][1]["source"]["path"] == "data:image/png;base64,aW1n"
    assert first == {
        "step_id": 3, "timestamp": "2025-10-09T08:53:20.123456Z", "source": "agent",
        "model_name": "m", "message": "hm", "reasoning_content": "let me think",
        "tool_calls": [
            {"tool_call_id": "c1", "function_name": "look_up", "arguments": {"word": "a"}},
            {"tool_call_id": "c2", "function_name": "look_up", "arguments": {}},
        ],
        "observation": {"results": [
            {"source_call_id": "c1", "content": "one"},
            {"source_call_id": "c2", "content": '{"n": 2}'},
        ]},
        "metrics": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_token_ids": [1, 2],
                    "completion_token_ids": [3], "logprobs": [-0.5]},
        "llm_call_count": 1, "extra": {"reward": 0.5},
    }  # fmt: skip
    assert (asked["source"], asked["message"]) == ("user", "so?")
    assert last["extra"] == {"reward": 1.0, "rewards": {"right": 1.0, "short": 0.5}}
    assert found["final_metrics"] == {
        "total_prompt_tokens": 2, "total_completion_tokens": 1, "total_steps": 5,
    }  # fmt: skip
    assert found["extra"] == {"reward": 1.5}
    assert not told


def test_other_agents_and_branches_are_subagents_of_their_attempt() -> None:
    """A step that branches share is copied context in the later ones; attempts stand apart."""
    found, _ = documents(
        path(FIRST, LAST),
        path(FIRST, exact([1], [2], span_id="s3", observation=LAST.observation), branch=1),
        path(exact([7], [8], span_id="s4", agent="other")),
        path(exact([7], [8], span_id="s5", rollout_id="r2")),
    )

    assert [each["session_id"] for each in found] == ["r1", "r2"]
    again, other = found[0]["subagent_trajectories"]
    assert [step.get("is_copied_context") for step in again["steps"] if "metrics" in step] == [
        True, None,
    ]  # fmt: skip
    assert other["agent"]["name"] == "other"


def test_separate_and_edited_prompts_stay_separate() -> None:
    """Each is a document, and the one that it goes on from names it; copies are marked."""
    rules, asked = said("system", "be brief"), said("user", "one")
    first = step("a", span_id="s1", done=False, finish_reason="length", response_id="id-1",
                 observation=(rules, asked))  # fmt: skip
    refusal = parts("assistant", {"type": "refusal", "content": "no"}, THOUGHT | {"content": ""})
    apart = step(span_id="s2", step=1, done=False, observation=(rules, said("user", "two")),
                 action=(refusal,))  # fmt: skip
    edited = step("c", span_id="s3", step=2, reward=1.0, rewards={"primary": 1.0}, observation=(
        rules, said("user", "two"), said("assistant", "(cut)"), said("user", "go on")))  # fmt: skip

    ((found,), told) = documents(replace(path(first, apart, edited), reward=1.0))

    whole = [found, *found["subagent_trajectories"]]
    texts = [[(s["message"], s.get("is_copied_context")) for s in each["steps"]] for each in whole]
    assert texts == [
        [("be brief", None), ("one", None), ("a", None)],
        [("be brief", True), ("two", None), ("no", None)],
        [("be brief", True), ("two", True), ("(cut)", True), ("go on", None), ("c", None)],
    ]  # fmt: skip
    assert [each.get("continued_trajectory_ref") for each in whole] == [None, "r1/1/calc/0/2", None]
    assert [each["steps"][-1].get("extra") for each in whole] == [
        {"finish_reason": "length", "response_id": "id-1"}, {"refusal": "no"}, {"reward": 1.0},
    ]  # fmt: skip
    assert ["encrypted reasoning" in each.reason for each in told] == [True]
    spans = list(decode_spans(json.dumps(found).encode()))
    back = TripletAdapter().adapt(each for each in spans if isinstance(each, Span))
    steps = [each for trajectory in back for each in trajectory.transitions]
    assert [(len(each.observation), each.reward) for each in steps] == [
        (2, None), (2, None), (4, 1.0),
    ]  # fmt: skip


def test_what_has_no_place_is_named() -> None:
    """A video, a second choice, arguments that are no object, a result of no call."""
    cut = parts("assistant", called("c", "f") | {"arguments": "{cut"})
    asked = (parts("user", VIDEO), parts("tool", result("x", "late")))
    step = exact([1], [2], observation=asked, action=(cut, CALLED))

    ((found,), told) = documents(path(step))

    assert ["uri" in each.reason or "choices" in each.reason for each in told] == [True, True]
    assert all(each.is_row_written for each in told)
    assert found["steps"][1]["observation"] == {"results": [{"content": "late"}]}
    assert found["steps"][2]["tool_calls"][0]["extra"] == {"arguments": "{cut"}


@settings(max_examples=25, deadline=None)
@given(forests)
def test_every_document_is_valid(spans: list[Span]) -> None:
    """Whatever was recorded, each reader of the format takes it."""
    documents(*TripletAdapter().adapt(spans))

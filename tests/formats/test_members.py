"""What each format makes of steps: its shape, and what it leaves out."""

from typing import Any

import pytest
from tests.adapter.forest import said
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

from lightning_otel import formats
from lightning_otel.errors import ConfigError
from lightning_otel.formats import LeftOut
from lightning_otel.formats.verl import data_proto
from lightning_otel.types import Trajectory


class Made:
    """The rows of a format and what it left out."""

    def __init__(self, name: str, *trajectories: Trajectory, **options: Any) -> None:
        told: list[LeftOut] = []
        self.rows = list(formats.rows(name, trajectories, left_out=told.append, **options))
        self.left = [(each.step.span_id, each.reason) for each in told if not each.is_row_written]
        self.partial = [(each.step.span_id, each.reason) for each in told if each.is_row_written]

    @property
    def reasons(self) -> set[str]:
        """The reasons, without what to do."""
        return {reason.partition(";")[0] for _, reason in [*self.left, *self.partial]}


def turn(*found: dict[str, Any]) -> Any:
    """A step whose answer calls two tools at once, and the one that has their results."""
    asked = said("user", "look")
    answer = parts("assistant", *found, called("c1", word="a"), called("c2", word="b"))
    results = [parts("tool", result("c1", "A")), parts("tool", result("c2", {"found": 1}))]
    first = step(observation=(asked,), action=(answer,), tools=(TOOL,), span_id="s1")
    second = step(
        "done",
        reward=1.0,
        observation=(asked, answer, *results),
        tools=(TOOL,),
        span_id="s2",
    )
    return first, second


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}},
    {"id": "c2", "type": "function", "function": {"name": "look_up", "arguments": {"word": "b"}}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "A"},
    {"role": "tool", "tool_call_id": "c2", "content": '{"found": 1}'},
]
NESTED = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]


def tries(*rewards: float | None, asked: str = "is it?", **given: Any) -> list[Trajectory]:
    """One rollout a reward, each with an answer of its own."""
    return [
        path(
            step(f"{asked} {i}", asked, reward, span_id=f"s{i}", rollout_id=f"{asked}{i}", **given)
        )
        for i, reward in enumerate(rewards)
    ]


def conversation(rollout_id: str = "r1", reward: float | None = 1.0, **given: Any) -> Trajectory:
    """Two steps whose token ids go on from each other."""
    return path(
        exact([1, 2], [3, 4], rollout_id=rollout_id, span_id="s1", **given),
        exact([1, 2, 3, 4, 5], [6], reward, rollout_id=rollout_id, span_id="s2", **given),
    )


# --- what formats cannot hold --------------------------------------------------------------------

TEXTS, IDS = ("sft", "prompt-completion", "kto", "openai-sft"), ("tokens", "grpo", "verl")
STRANGE = parts("user", {"type": "hologram", "content": 1})
CHOICES = step(reward=1.0, action=(said("assistant", "a"), said("assistant", "b")))
ANSWER_OF_A_TOOL = parts("assistant", result("c", "4"), text("4"))
NO_GAP = "no answer to the same prompt whose reward differs by enough"
Case = tuple[list[str] | tuple[str, ...], list[Trajectory], dict[str, Any], int, set[str]]
LEFT_OUT: list[Case] = [
    (TEXTS, [path(step(observation=(STRANGE,), reward=1.0), step("b", reward=1.0))], {}, 1,
     {"a part of type 'hologram'"}),
    (TEXTS, [path(exact([1], [2], 1.0, observation=(), action=()))], {}, 0, {"no messages"}),
    (TEXTS, [path(CHOICES)], {}, 1, {"further choices of one call"}),
    (IDS, [path(step(reward=1.0))], {}, 0, {"no token ids"}),
    (["grpo", "verl"], [conversation(reward=None)], {}, 0, {"no reward"}),
    (["grpo"], [conversation(reward=None, advantage=1.0)], {}, 1, set()),
    (["grpo"], [path(exact([1], [2], 1.0, logprobs=()))], {}, 1, {"no logprobs"}),
    (["sft"], tries(1.0, 0.2, None), {"threshold": 0.5}, 1,
     {"reward below the threshold", "no reward"}),
    (["dpo"], [*tries(0.5, 0.5), *tries(1.0, asked="alone?"), *tries(None, asked="none?")], {}, 0,
     {NO_GAP, "no other answer to the same prompt", "no reward"}),
    (["dpo"], tries(0.4, 0.6), {"gap": 0.5}, 0, {NO_GAP}),
    (["dpo"], tries(0.0, 0.6), {"gap": 0.5}, 1, set()),
    (["dpo"], [path(step("a", reward=float(i), rollout_id=f"r{i}")) for i in range(2)], {}, 0,
     {"the same answer earned more and less"}),
    (["openai-sft"],
     [path(step(observation=(parts("user", VIDEO),), span_id="v"),
           step(tools=({"type": "web_search"},), span_id="w"),
           step(action=(ANSWER_OF_A_TOOL,), span_id="t"), step(span_id="x"))], {}, 1,
     {"a part of type 'video_url'", "a tool of type 'web_search'", "a tool's result in an answer"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "options", "count", "reasons"),
    [(name, *rest) for names, *rest in LEFT_OUT for name in names],
)
def test_what_a_format_cannot_hold_is_named(
    name: str,
    given: list[Trajectory],
    options: dict[str, Any],
    count: int,
    reasons: set[str],
) -> None:
    """No row would teach something else than what happened, nor is anything lost in silence."""
    made = Made(name, *given, **options)

    assert (len(made.rows), made.reasons) == (count, reasons)
    assert CHOICES not in given[0].transitions or "'b'" not in str(made.rows)


# --- sft -----------------------------------------------------------------------------------------


def test_sft_joins_the_steps_of_a_conversation() -> None:
    """Parallel calls, their results and ids, and tools are there; arguments are objects."""
    made = Made("sft", path(*turn(THOUGHT)))

    (row,) = made.rows
    assert row["messages"] == [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "let me think",
            "tool_calls": CALLS,
        },
        *RESULTS,
        {"role": "assistant", "content": "done"},
    ]
    assert row["tools"] == NESTED
    assert (row["steps"], row["reward"], row["span_id"], row["rollout_id"]) == (2, 1.0, "s2", "r1")


def test_sft_goes_on_where_reasoning_was_not_sent_back() -> None:
    """An agent that drops the model's reasoning from its history still goes on from it."""
    first, second = turn(THOUGHT)
    answer = parts("assistant", called("c1", word="a"), called("c2", word="b"))
    given = (second.observation[0], answer, *second.observation[2:])

    made = Made("sft", path(first, step("done", observation=given, span_id="s2")))

    assert [row["steps"] for row in made.rows] == [2]


def test_sft_begins_anew_where_the_history_was_rewritten() -> None:
    """A prompt that does not begin with what was said is another row: no answer is lost."""
    first, second = turn()
    given = (step("", "b").observation[0], *second.observation[1:])
    made = Made("sft", path(first, step("two", reward=1.0, observation=given, span_id="s2")))

    assert [row["steps"] for row in made.rows] == [1, 1]
    assert made.rows[1]["messages"][-1]["content"] == "two"


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "kto"])
def test_media_are_parts_of_the_chat_api(name: str) -> None:
    """Images and sounds, linked or whole, are where the model saw them."""
    asked = parts("user", text("what is"), IMAGE, LINKED, AUDIO)

    made = Made(name, path(step(observation=(asked,), reward=1.0)))

    (row,) = made.rows
    assert (row.get("messages") or row["prompt"])[0]["content"] == [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aW1n"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "c291bmQ=", "format": "wav"}},
    ]


def test_several_texts_are_one_for_templates_and_stay_apart_for_openai() -> None:
    """Templates of text models read texts alone, and leave a list of parts out."""
    given = step(observation=(parts("user", text("a"), text("b")),), reward=1.0)

    sft, openai = Made("sft", path(given)), Made("openai-sft", path(given))

    assert sft.rows[0]["messages"][0]["content"] == "a\nb"
    assert openai.rows[0]["messages"][0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


# --- prompt-completion, kto ----------------------------------------------------------------------


def test_prompt_completion_has_masks_where_ids_are_exact() -> None:
    """Text always; ids and what was sampled of them only where the server gave them."""
    made = Made("prompt-completion", path(exact([1, 2], [3]), step(span_id="s2")))

    one, two = made.rows
    assert (one["prompt_ids"], one["completion_ids"]) == ([1, 2], [3])
    assert one["completion_mask"] == [0, 0, 1]
    assert "prompt_ids" not in two
    assert one["prompt"] == [{"role": "user", "content": "is it?"}]
    assert one["completion"] == [{"role": "assistant", "content": "yes"}]


def test_shared_steps_are_rows_once() -> None:
    """Branches run through one step; it is trained once."""
    shared = exact([1], [2], 1.0, is_shared=True)
    branches = [
        path(shared, exact([1, 2, index], [9], 1.0, span_id=f"b{index}"), branch=index)
        for index in range(3)
    ]

    assert len(Made("prompt-completion", *branches).rows) == 4
    assert len(Made("triplets", *branches).rows) == 4
    assert len(Made("agentlightning", *branches).rows) == 4
    rows = Made("tokens", *branches).rows
    assert sum(label != -100 for row in rows for label in row["labels"]) == 4


def test_kto_labels_by_threshold_and_never_guesses() -> None:
    """A missing reward is no bad one."""
    steps = [
        step(reward=reward, span_id=f"s{index}")
        for index, reward in enumerate((0.5, 0.4, None, -1.0))
    ]

    made = Made("kto", path(*steps))

    assert [(row["span_id"], row["label"]) for row in made.rows] == [
        ("s0", True),
        ("s1", False),
        ("s3", False),
    ]
    assert [span_id for span_id, _ in made.left] == ["s2"]
    assert [row["label"] for row in Made("kto", path(*steps), threshold=0.0).rows] == [
        True,
        True,
        False,
    ]


# --- dpo -----------------------------------------------------------------------------------------


def test_dpo_pairs_the_best_with_the_worst() -> None:
    """Each answer is in one pair at most; what finds no worse one says so."""
    made = Made("dpo", *tries(0.5, 1.0, 0.0, 0.75, 0.5))

    assert [(row["reward"], row["rejected_reward"]) for row in made.rows] == [
        (1.0, 0.0),
        (0.75, 0.5),
    ]
    (row, _) = made.rows
    assert row["prompt"] == [{"role": "user", "content": "is it?"}]
    assert row["chosen"] == [{"role": "assistant", "content": "is it? 1"}]
    assert row["rejected"] == [{"role": "assistant", "content": "is it? 2"}]
    assert (row["rollout_id"], row["rejected_rollout_id"]) == ("is it?1", "is it?2")
    assert len(made.left) == 1


def test_dpo_pairs_stay_in_their_group_and_prompt() -> None:
    """Same words in another group, to another agent, with other tools or ids are another prompt."""

    def one(index: int, reward: float, **given: Any) -> Trajectory:
        return path(step(f"a{index}", reward=reward, rollout_id=f"r{index}", **given))

    apart: list[dict[str, Any]] = [{"group_id": "other"}, {"agent": "other"}, {"tools": (TOOL,)}]
    for other in apart:
        base = {"group_id": "g"} if "group_id" not in other else {"group_id": "mine"}
        assert Made("dpo", one(0, 0.0, **base), one(1, 1.0, **{**base, **other})).rows == []
    ids = [exact(prompt, [9], float(i), rollout_id=f"r{i}") for i, prompt in enumerate([[1], [2]])]
    assert Made("dpo", *map(path, ids)).rows == []
    assert len(Made("dpo", one(0, 0.0, group_id="g"), one(1, 1.0, group_id="g")).rows) == 1


def test_groups_come_together_from_anywhere() -> None:
    """Rollouts of tasks that took turns are paired within their tasks, in order of the first."""
    tasks = [tries(0.0, 1.0, asked=f"task {index}") for index in range(50)]
    mixed = [found[half] for half in range(2) for found in tasks]

    made = Made("dpo", *mixed)

    assert [row["prompt"][0]["content"] for row in made.rows] == [f"task {i}" for i in range(50)]


# --- openai --------------------------------------------------------------------------------------


def test_openai_sft_is_its_file_format() -> None:
    """Arguments are text, earlier answers weigh nothing, reasoning is left out and named."""
    made = Made("openai-sft", path(*turn(THOUGHT)))

    one, two = made.rows
    texts = [
        {**call, "function": {**call["function"], "arguments": arguments}}  # type: ignore[dict-item]  # a dict
        for call, arguments in zip(CALLS, ('{"word": "a"}', '{"word": "b"}'), strict=True)
    ]
    assert one["messages"] == [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": texts},
    ]
    assert [message.get("weight") for message in two["messages"]] == [None, 0, None, None, None]
    assert one["tools"] == NESTED
    assert set(one) == {"messages", "tools"}
    assert [reason for _, reason in made.partial] == [
        "reasoning; OpenAI's files have no place for it"
    ] * 2


def test_openai_dpo_is_its_file_format() -> None:
    """One input, a preferred and another output."""
    made = Made("openai-dpo", *tries(0.0, 1.0, tools=(TOOL,)))

    assert made.rows == [
        {
            "input": {"messages": [{"role": "user", "content": "is it?"}], "tools": NESTED},
            "preferred_output": [{"role": "assistant", "content": "is it? 1"}],
            "non_preferred_output": [{"role": "assistant", "content": "is it? 0"}],
        }
    ]


# --- token ids -----------------------------------------------------------------------------------


def test_tokens_join_what_goes_on_exactly() -> None:
    """One sequence, masked where the model was given tokens."""
    made = Made("tokens", conversation(), path(exact([1], [2]), exact([7], [8], span_id="s2")))

    assert [row["input_ids"] for row in made.rows] == [[1, 2, 3, 4, 5, 6], [1, 2], [7, 8]]
    assert made.rows[0]["labels"] == [-100, -100, 3, 4, -100, 6]


def test_grpo_has_openenvs_names() -> None:
    """The mask covers prompt and completion, logprobs the completion."""
    made = Made("grpo", conversation(advantage=0.5, weight=0.25, group_id="g", sampling={"n": 2}))

    (row,) = made.rows
    assert row["prompt_token_ids"] == [1, 2]
    assert row["completion_token_ids"] == [3, 4, 5, 6]
    assert row["per_token_logps"] == [-0.5, -0.5, 0.0, -0.5]
    assert row["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert (row["advantage"], row["reward"], row["weight"]) == (0.5, 1.0, 0.25)
    assert (row["group_id"], row["steps"], row["sampling"]) == ("g", 2, {"n": 2})
    assert row["per_token_advantages"] is None


def test_grpo_advantages_that_differ_are_by_token() -> None:
    """Steps of one sequence that did not do as well as each other keep what is theirs."""
    one, two = conversation().transitions
    given = path(_with(one, advantage=-1.0), _with(two, advantage=2.0))

    (row,) = Made("grpo", given).rows

    assert row["advantage"] is None
    assert row["per_token_advantages"] == [-1.0, -1.0, 0.0, 2.0]


def test_rollouts_of_one_prompt_are_a_group_where_none_was_computed() -> None:
    """The uid is the same for tries of one prompt, and another for another."""
    paths = [conversation(f"r{i}") for i in range(2)]
    other = path(exact([9], [3], 1.0, rollout_id="r3"))

    uids = [row["uid"] for row in Made("verl", paths[0], other, paths[1]).rows]

    assert uids[0] == uids[1] != uids[2]


def test_verl_rows_are_those_of_its_agent_loop() -> None:
    """Prompt, response, mask, logprobs and reward."""
    (row,) = Made("verl", conversation()).rows

    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert row["response_mask"] == [1, 1, 0, 1]
    assert row["rollout_log_probs"] == [-0.5, -0.5, 0.0, -0.5]
    assert row["reward"] == 1.0


def test_data_proto_needs_rows() -> None:
    """An empty batch says where to look, before verl is asked for."""
    with pytest.raises(ConfigError, match="no rows; see what is missing"):
        data_proto([], pad_token_id=0)


# --- agent lightning -----------------------------------------------------------------------------


def test_agentlightning_is_its_triplet() -> None:
    """Ids, messages of every choice, images, logprobs and metadata."""
    given = exact(
        [1],
        [2],
        0.5,
        observation=(parts("user", text("look"), LINKED),),
        action=(said("assistant", "a"), said("assistant", "b")),
        tools=(TOOL,),
        response_id="id",
    )

    (row,) = Made("agentlightning", path(given)).rows

    assert row["prompt"]["token_ids"] == [1]
    assert row["prompt"]["image_urls"] == ["https://example.org/a.png"]
    assert [each["content"] for each in row["response"]["raw_content"]] == ["a", "b"]
    assert row["response"]["logprobs"] == [{"logprob": -0.5}]
    assert row["reward"] == 0.5
    assert row["metadata"]["response_id"] == "id"
    assert row["metadata"]["agent_name"] == "calc"
    assert row["metadata"]["tools"] == NESTED


def _with(given: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(given, **changes)

"""What each format makes of steps: its shape, and what it leaves out."""

import json
from dataclasses import replace
from pathlib import Path
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

from lightning_otel.dataset import formats
from lightning_otel.dataset.formats import LeftOut
from lightning_otel.dataset.formats.verl import data_proto
from lightning_otel.errors import ConfigError
from lightning_otel.types import Trajectory, Transition


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


def said_twice(asked: str, answer: str) -> tuple[Any, ...]:
    """A question and its answer in a history."""
    return said("user", asked), said("assistant", answer)


def asking(arguments: Any, **given: Any) -> Transition:
    """A step that calls a tool with some arguments."""
    part = {**called("c1"), "arguments": arguments}
    return step(action=(parts("assistant", part),), **given)


def asked(arguments: Any) -> dict[str, Any]:
    """The same as chat."""
    function = {"name": "look_up", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def called_before(call_id: str, arguments: Any) -> tuple[Any, ...]:
    """A history in which a tool was called."""
    part = {**called(call_id), "arguments": arguments}
    return (
        said("user", "q"),
        parts("assistant", part),
        {"role": "tool", "parts": [result(call_id, "r")]},
    )


# --- what formats cannot hold --------------------------------------------------------------------

TEXTS, IDS = ("sft", "prompt-completion", "kto", "openai-sft"), ("tokens", "grpo", "verl")
STRANGE = parts("user", {"type": "hologram", "content": 1})
CHOICES = step(reward=1.0, action=(said("assistant", "a"), said("assistant", "b")))
ANSWER_OF_A_TOOL = parts("assistant", result("c", "4"), text("4"))
MEDIA_STEP = step(observation=(parts("user", text("what is"), IMAGE),), reward=1.0)
NO_OBJECT = "arguments of a tool call that are no JSON object"
TOO_LARGE = "a whole number beyond 64 bits"
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
    # Of each kind of arguments that a template or reader of rows fails on; history counts, too.
    *((TEXTS[:3], [path(asking(text, reward=1.0))], {}, 0, {NO_OBJECT})
      for text in ('{"a": 1', "[1]", '{"a": NaN}', '{"a": 1e400}', "word")),
    *((TEXTS[:3], [path(asking({"a": [number]}, reward=1.0))], {}, 0, {TOO_LARGE})
      for number in (2**63, -(2**63) - 1, 10**30)),
    (TEXTS[:3], [path(step(reward=1.0, tools=({**TOOL, "parameters": {"maximum": 2**64}},)))], {},
     0, {TOO_LARGE}),
    (TEXTS[:3], [path(asking({"a": [2**63 - 1, -(2**63)]}, reward=1.0))], {}, 1, set()),
    (TEXTS[:3], [path(step(observation=called_before("c", '{"a": 1'), reward=1.0))], {}, 0,
     {NO_OBJECT}),
    (TEXTS[:3], [path(asking('{"a": 1', reward=1.0))], {"arguments": "text"}, 1, set()),
    (TEXTS[:3], [path(MEDIA_STEP)], {"arguments": "text"}, 0, {"content that is not text"}),
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


# --- parts that chat has no word for -------------------------------------------------------------

ODD = {"type": "acme.hologram", "data": [1]}
SEALED = {"type": "reasoning", "content": "", "encrypted_content": "gAAA"}
DONE = text("done")
SAYS_A, SAYS_C, IS_ODD = said("user", "a"), said("user", "c"), parts("user", ODD)
TOLD_S, SAYS_B = said("system", "s"), said("assistant", "b")
ONE_OK = [{"type": "text", "text": "ok"}, ODD]
# What was said, the parts of the answer, and the texts of the prompt where there is a row.
PARTS: dict[str, tuple[list[Any], list[Any], list[str] | None]] = {
    "beside a text": ([parts("user", text("a"), ODD)], [DONE], ["a"]),
    "a message of its own": ([SAYS_A, IS_ODD], [DONE], ["a"]),
    "in a system prompt": ([parts("system", ODD, text("s")), SAYS_A], [DONE], ["s", "a"]),
    "all that was asked": ([IS_ODD], [DONE], None),
    "all since an answer": ([SAYS_A, SAYS_B, IS_ODD], [DONE], None),
    "all before an answer": ([IS_ODD, SAYS_B, SAYS_C], [DONE], None),
    "in an earlier answer": ([SAYS_A, parts("assistant", text("b"), ODD), SAYS_C], [DONE], None),
    "all that was asked beside instructions": ([TOLD_S, IS_ODD], [DONE], None),
    "a result of two": (
        [SAYS_A, parts("assistant", called("1"), called("2")),
         parts("tool", result("1", "ok"), result("2", [ODD]))], [DONE], None),
    "in a result": (
        [SAYS_A, parts("assistant", called("1")), parts("tool", result("1", ONE_OK))], [DONE],
        ["a", "", "ok"]),
    "in the answer": ([SAYS_A], [DONE, ODD], None),
}  # fmt: skip


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "openai-sft"])
@pytest.mark.parametrize("case", PARTS)
def test_a_part_without_a_place(case: str, name: str) -> None:
    """A row without it where the rest can be said, else none; either way it is named."""
    seen, answer, kept = PARTS[case]

    made = Made(name, path(step(observation=seen, action=(parts("assistant", *answer),))))

    assert made.reasons == {"a part of type 'acme.hologram'"}
    prompts = [row["prompt"] if "prompt" in row else row["messages"][:-1] for row in made.rows]
    found = [[turn["content"] or "" for turn in prompt] for prompt in prompts]
    assert found == ([] if kept is None else [kept])


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "openai-sft"])
def test_an_answer_of_encrypted_reasoning_says_nothing(name: str) -> None:
    """It trains nothing; beside a text it is left away."""
    answers = [parts("assistant", SEALED), parts("assistant", SEALED, DONE)]

    made = Made(name, *(path(step(action=(each,), rollout_id=f"r{i}"))
                        for i, each in enumerate(answers)))  # fmt: skip

    (row,) = made.rows
    assert (row.get("completion") or row["messages"])[-1] == {
        "role": "assistant",
        "content": "done",
    }


# --- rows ----------------------------------------------------------------------------------------

YES, ASKED = {"role": "assistant", "content": "yes"}, {"role": "user", "content": "is it?"}
LOOK = {"role": "user", "content": "look"}
THOUGHTFUL, THOUGHTLESS = turn(THOUGHT), turn()
REWRITTEN = (step("", "b").observation[0], *THOUGHTLESS[1].observation[1:])
FORGETFUL = (THOUGHTLESS[0].observation[0], THOUGHTLESS[0].action[0],
             *THOUGHTLESS[1].observation[2:])  # fmt: skip
TEXT_CALLS = [
    {**call, "function": {"name": "look_up", "arguments": arguments}}
    for call, arguments in zip(CALLS, ('{"word": "a"}', '{"word": "b"}'), strict=True)
]
CALLED = {"role": "assistant", "content": "", "reasoning_content": "let me think",
          "tool_calls": CALLS}  # fmt: skip
MEDIA = step(observation=(parts("user", text("what is"), IMAGE, LINKED, AUDIO),), reward=1.0)
SEEN = [{"role": "user", "content": [
    {"type": "text", "text": "what is"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aW1n"}},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "input_audio", "input_audio": {"data": "c291bmQ=", "format": "wav"}},
]}]  # fmt: skip
TWO_TEXTS = path(step(observation=(parts("user", text("a"), text("b")),), reward=1.0))
RATED = path(*(step(reward=r, span_id=f"s{i}") for i, r in enumerate((0.5, 0.4, None, -1.0))))
SHARED = exact([1], [2], 1.0, is_shared=True)
BRANCHES = [
    path(SHARED, exact([1, 2, index], [9], 1.0, span_id=f"b{index}"), branch=index)
    for index in range(3)
]
CHOSEN = conversation(advantage=0.5, weight=0.25, group_id="g", sampling={"n": 2})
ADVANTAGES = path(*(replace(each, advantage=value) for each, value in
                    zip(conversation().transitions, (-1.0, 2.0), strict=True)))  # fmt: skip
LINK = exact(
    [1], [2], 0.5, observation=(parts("user", text("look"), LINKED),), tools=(TOOL,),
    action=(said("assistant", "a"), said("assistant", "b")), response_id="id",
)  # fmt: skip
REWOUND = [
    path(
        step("one", "q", span_id="s1", is_shared=True),
        step(answer, observation=(*said_twice("q", "one"), said("user", "go")), reward=reward,
             span_id=span_id),
        branch=branch,
    )
    for branch, (answer, reward, span_id) in enumerate((("bad", 0.0, "s2"), ("good", 1.0, "s3")))
]  # fmt: skip
TASKS = [tries(0.0, 1.0, asked=f"task {index}") for index in range(20)]
Row = dict[str, Any]
ROWS: dict[str, tuple[str, list[Trajectory], dict[str, Any], list[Row]]] = {
    # Parallel calls, their results and ids, and tools are there; arguments are objects.
    "sft joins the steps of a conversation": ("sft", [path(*THOUGHTFUL)], {}, [{
        "prompt": [LOOK],
        "completion": [CALLED, *RESULTS, {"role": "assistant", "content": "done"}],
        "tools": NESTED, "steps": 2, "reward": 1.0, "span_id": "s2", "rollout_id": "r1",
    }]),
    "sft as messages says which answers train": (
        "sft", [path(step("two", observation=(*said_twice("q", "one"), said("user", "and?"))))],
        {"form": "messages"}, [{"prompt": None, "completion": None, "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "one", "weight": 0},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "two", "weight": 1}]}]),
    "sft begins anew after words of another": ("sft", [path(
        step("one", "q", span_id="s1"),
        step("two", observation=(*said_twice("q", "one"), *said_twice("go", "B's")), span_id="s2"),
    )], {}, [{"steps": 1}, {"steps": 1, "completion": [{"role": "assistant", "content": "two"}]}]),
    "sft begins anew with further instructions": ("sft", [path(
        step("one", "q", span_id="s1"),
        step("two", observation=(*said_twice("q", "one"), said("developer", "be brief"),
                                 said("user", "go")), span_id="s2"),
    )], {}, [{"steps": 1}, {"steps": 1, "prompt": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "one"},
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]}]),
    "sft has the tools of all its steps": ("sft", [path(
        step("one", "q", span_id="s1", tools=(TOOL,)),
        step("two", observation=(*said_twice("q", "one"), said("user", "go")), span_id="s2"),
    )], {}, [{"steps": 2, "tools": NESTED}]),
    "sft begins anew where a tool was changed": ("sft", [path(
        step("one", "q", span_id="s1", tools=(TOOL,)),
        step("two", observation=(*said_twice("q", "one"), said("user", "go")), span_id="s2",
             tools=({**TOOL, "description": "other"},)),
    )], {}, [{"steps": 1, "tools": NESTED}, {"steps": 1}]),
    # The first branch is below the threshold, and the step that both share in the other's row.
    "sft trains a shared answer once": ("sft", REWOUND, {}, [
        {"steps": 2, "span_ids": ["s1", "s2"]}, {"steps": 1, "span_ids": ["s3"]}]),
    "sft trains a shared answer with the branch that passes": (
        "sft", REWOUND, {"threshold": 0.5}, [{"steps": 2, "span_ids": ["s1", "s3"]}]),
    "a developer is part of the instructions": ("prompt-completion", [path(step(observation=(
        said("system", "a"), said("developer", "b"), said("user", "q"))))], {}, [
            {"prompt": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "q"}]}]),
    "no arguments are none": (
        "kto", [path(asking("", reward=1.0))], {}, [{"completion": [asked({})]}]),
    "arguments as text are as they were": (
        "kto", [path(asking('{"n": 1e400}', reward=1.0, tools=(TOOL,)))], {"arguments": "text"},
        [{"completion": [asked('{"n": 1e400}')], "tools": json.dumps(NESTED)}]),
    "sft goes on where reasoning was not sent back": (
        "sft", [path(THOUGHTFUL[0], step("done", observation=FORGETFUL, span_id="s2"))], {},
        [{"steps": 2}]),
    "sft begins anew where the history was rewritten": (
        "sft", [path(THOUGHTLESS[0], step("two", observation=REWRITTEN, span_id="s2"))], {},
        [{"steps": 1}, {"steps": 1}]),
    "media in sft": ("sft", [path(MEDIA)], {}, [{"prompt": SEEN, "completion": [YES]}]),
    "media in prompt-completion": ("prompt-completion", [path(MEDIA)], {}, [{"prompt": SEEN}]),
    "media in kto": ("kto", [path(MEDIA)], {}, [{"prompt": SEEN}]),
    # Templates of text models read texts alone, and leave a list of parts out.
    "texts are one for templates": (
        "sft", [TWO_TEXTS], {}, [{"prompt": [{"role": "user", "content": "a\nb"}]}]),
    "texts stay apart for openai": ("openai-sft", [TWO_TEXTS], {}, [{"messages": [
        {"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}, YES]}]),
    # TRL would pass over ids and make its own tokens.
    "text alone where text is trained": (
        "prompt-completion", [path(exact([1, 2], [3]))], {}, [
            {"prompt_ids": None, "prompt": [ASKED], "completion": [YES]}]),
    "shared steps are rows once": ("prompt-completion", BRANCHES, {}, [{}] * 4),
    "shared steps are triplets once": ("triplets", BRANCHES, {}, [{}] * 4),
    "shared steps are theirs once": ("agentlightning", BRANCHES, {}, [{}] * 4),
    "kto labels by threshold, and never guesses": ("kto", [RATED], {}, [
        {"span_id": "s0", "label": True}, {"span_id": "s1", "label": False},
        {"span_id": "s3", "label": False}]),
    "kto by another threshold": ("kto", [RATED], {"threshold": 0.0}, [
        {"label": True}, {"label": True}, {"label": False}]),
    # Each answer is in one pair at most.
    "dpo pairs the best with the worst": ("dpo", tries(0.5, 1.0, 0.0, 0.75, 0.5), {}, [
        {"reward": 1.0, "rejected_reward": 0.0, "prompt": [ASKED],
         "chosen": [{"role": "assistant", "content": "is it? 1"}],
         "rejected": [{"role": "assistant", "content": "is it? 2"}],
         "rollout_id": "is it?1", "rejected_rollout_id": "is it?2"},
        {"reward": 0.75, "rejected_reward": 0.5}]),
    # Token ids drift, ids of calls are random, and arguments may be printed in any way.
    "dpo pairs by what is said": ("dpo", [
        path(exact([i], [2], float(i), observation=called_before(f"random{i}", args),
                   action=(said("assistant", f"no. {i}"),), rollout_id=f"r{i}"))
        for i, args in enumerate(({"a": 1, "b": []}, '{"b":[], "a": 1}'))
    ], {}, [{"reward": 1.0, "rejected_reward": 0.0}]),
    "groups come together from anywhere, in order of the first": (
        "dpo", [found[half] for half in range(2) for found in TASKS], {},
        [{"prompt": [{"role": "user", "content": f"task {i}"}]} for i in range(20)]),
    "openai-sft is its file format": ("openai-sft", [path(*THOUGHTFUL)], {}, [
        {"messages": [LOOK, {"role": "assistant", "content": None, "tool_calls": TEXT_CALLS}],
         "tools": NESTED},
        {"messages": [
            LOOK, {"role": "assistant", "content": None, "tool_calls": TEXT_CALLS, "weight": 0},
            *RESULTS, {"role": "assistant", "content": "done"}]}]),
    "openai-dpo is its file format": ("openai-dpo", tries(0.0, 1.0, tools=(TOOL,)), {}, [
        {"input": {"messages": [ASKED], "tools": NESTED},
         "preferred_output": [{"role": "assistant", "content": "is it? 1"}],
         "non_preferred_output": [{"role": "assistant", "content": "is it? 0"}]}]),
    "tokens join what goes on exactly": (
        "tokens", [conversation(), path(exact([1], [2]), exact([7], [8], span_id="s2"))], {}, [
            {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, 3, 4, -100, 6]},
            {"input_ids": [1, 2]}, {"input_ids": [7, 8]}]),
    # Branches run through one step; its tokens have a label in one row alone.
    "shared tokens are trained once": ("tokens", BRANCHES, {}, [
        {"labels": [-100, 2, -100, 9]}, *[{"labels": [-100, -100, -100, 9]}] * 2]),
    "grpo has OpenEnv's names": ("grpo", [CHOSEN], {}, [{
        "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4, 5, 6],
        "per_token_logps": [-0.5, -0.5, 0.0, -0.5], "loss_mask": [0, 0, 1, 1, 0, 1],
        "advantage": 0.5, "reward": 1.0, "weight": 0.25, "group_id": "g", "steps": 2,
        "sampling": {"n": 2}, "per_token_advantages": None}]),
    "advantages that differ are by token": ("grpo", [ADVANTAGES], {}, [
        {"advantage": None, "per_token_advantages": [-1.0, -1.0, 0.0, 2.0]}]),
    "verl has the names of its agent loop": ("verl", [conversation()], {}, [{
        "prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6], "response_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-0.5, -0.5, 0.0, -0.5], "reward": 1.0}]),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_rows_hold_what_was_recorded(case: str) -> None:
    """Each row has the values of the columns that its case names."""
    name, given, options, expected = ROWS[case]

    made = Made(name, *given, **options)

    assert len(made.rows) == len(expected)
    for row, wanted in zip(made.rows, expected, strict=True):
        assert {column: row.get(column) for column in wanted} == wanted
    if name == "openai-sft" and given[0].transitions == THOUGHTFUL:
        assert made.reasons == {"reasoning"}
        assert set(made.rows[0]) == {"messages", "tools"}


def test_pairs_stay_in_their_group_and_prompt() -> None:
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
    other = exact([9], [3], 1.0, rollout_id="r3", observation=(said("user", "why?"),))
    paths = [conversation("r0"), path(other), conversation("r1")]
    uids = [row["uid"] for row in Made("verl", *paths).rows]
    assert uids[0] == uids[1] != uids[2]


def test_agentlightning_is_its_triplet() -> None:
    """Ids, messages of every choice, images, logprobs and metadata."""
    (row,) = Made("agentlightning", path(LINK)).rows

    assert (row["reward"], row["prompt"]["token_ids"]) == (0.5, [1])
    assert row["prompt"]["image_urls"] == ["https://example.org/a.png"]
    assert [each["content"] for each in row["response"]["raw_content"]] == ["a", "b"]
    assert row["response"]["logprobs"] == [{"logprob": -0.5}]
    found = {name: row["metadata"][name] for name in ("response_id", "agent_name", "tools")}
    assert found == {"response_id": "id", "agent_name": "calc", "tools": NESTED}


def test_data_proto_needs_rows() -> None:
    """An empty batch says where to look, before verl is asked for."""
    with pytest.raises(ConfigError, match="no rows; see what is missing"):
        data_proto([], pad_token_id=0)


# --- chat templates ------------------------------------------------------------------------------

ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TEMPLATES = [
    (ECHO, ""),
    ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
     "the chat template leaves instructions out"),
    ("{{ raise_exception('no system; sorry') if messages[0].role == 'system' }}",
     "the chat template refuses it: no system, sorry"),
    ("{{ messages[0].content + 1 }}", "the chat template refuses it: can only concatenate str"),
    # One of a vision model: TRL makes parts of texts for it.
    ("{% for m in messages %}{% for p in m.content %}{{ p['text'] + '' }}{% endfor %}{% endfor %}",
     ""),
    # Only the prompt alone, as it is asked for an answer, fails.
    (ECHO + "{% if add_generation_prompt %}{{ raise_exception('not here') }}{% endif %}",
     "the chat template refuses it: not here"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "kto"])
@pytest.mark.parametrize(("template", "reason"), TEMPLATES)
def test_what_a_chat_template_cannot_write_is_left_out(
    tmp_path: Path, name: str, template: str, reason: str
) -> None:
    """A step is in a row that the template writes whole, or left out with what it says."""
    place = tmp_path / "some.jinja"
    place.write_text(template)
    ruled = step(observation=(said("system", "be kind"), said("user", "hi")), reward=1.0)

    made = Made(name, path(ruled), template=str(place))

    assert (len(made.rows), len(made.left)) == ((0, 1) if reason else (1, 0))
    assert all(each.startswith(reason) for each in made.reasons)


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=r"cannot read the template .*none\.jinja.*name a file"):
        Made("sft", template=str(tmp_path / "none.jinja"))

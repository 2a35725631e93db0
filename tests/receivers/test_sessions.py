"""Session files of coding agents: what the model was told and said is what the records say."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.command import invoke
from tests.receivers.sessions import (
    DRAWN,
    SESSION,
    Conversation,
    Turn,
    iter_texts,
    write_session,
)

from lightning_otel import Store


def read_turn(message: Any) -> Turn:
    return message["role"], *iter_texts(message)


def check_store(path: Path, drawn: list[Conversation]) -> None:
    """Compare all answers of a store with those that were drawn."""
    calls = {name: call for each in drawn for name, call in each.calls.items()}
    store = Store(path)
    steps = {
        str(step.response_id): (
            [read_turn(message) for message in step.observation],
            [read_turn(message) for message in step.action],
        )
        for step in store.transitions()
    }
    assert steps == {name: (call.told, [call.said]) for name, call in calls.items()}
    query = "SELECT response_id, model, output_tokens, agent FROM calls WHERE status = 'OK'"
    known = {row.pop("response_id"): tuple(row.values()) for row in store.sql(query).dicts()}
    assert known == {name: (call.model, call.tokens, call.agent) for name, call in calls.items()}


@pytest.mark.parametrize("agent", DRAWN)
def test_each_answer_has_what_it_was_told(tmp_path: Path, agent: str) -> None:
    """Sixty sessions of all that the files hold; imported twice they add nothing."""
    drawn = [DRAWN[agent](seed) for seed in range(60)]
    for seed, conversation in enumerate(drawn):
        write_session(tmp_path / "files" / f"{SESSION.format(seed)}.jsonl", conversation.records)
    store = tmp_path / "s.duckdb"

    first = invoke("import", tmp_path / "files", "--store", store)
    files = sorted(tmp_path.rglob("*.ndjson"))
    again = invoke("import", tmp_path / "files", "--store", store)

    assert (first.returncode, again.returncode) == (1, 1)
    bad_times = sum(each.bad_times for each in drawn)
    assert first.stderr.count("no time; that of the record before counts") >= min(5, bad_times)
    assert " 0 new" in again.stderr
    assert sorted(tmp_path.rglob("*.ndjson")) == files
    assert "still being written" not in first.stderr
    check_store(store, drawn)


@pytest.mark.parametrize("agent", DRAWN)
def test_a_session_that_is_read_half_written_is_completed(tmp_path: Path, agent: str) -> None:
    """Each is cut at some record, between the blocks of an answer, too."""
    rng = random.Random(agent)
    drawn = [DRAWN[agent](seed) for seed in range(100, 160)]
    store, files = tmp_path / "s.duckdb", tmp_path / "files"
    for share in (0.3, 0.6, 1.0):
        for seed, conversation in enumerate(drawn):
            length = len(conversation.records)
            cut = length if share == 1.0 else round(length * share) + rng.randint(0, 5)
            write_session(files / f"{SESSION.format(seed)}.jsonl", conversation.records[:cut])
        invoke("import", files, "--store", store)

    check_store(store, drawn)


def list_texts(row: dict[str, Any]) -> list[str]:
    """Return what a row of chat says: reasoning, texts, calls and results."""
    texts: list[str] = []
    for each in (*row["prompt"], *row["completion"]):
        calls = [call["function"] for call in each.get("tool_calls") or ()]
        texts += filter(None, (each.get("reasoning_content"), each["content"]))
        texts += [f"{call['name']} {call['arguments']['command']}" for call in calls]
    return texts


@pytest.mark.parametrize("agent", DRAWN)
def test_training_data_say_what_a_session_said(tmp_path: Path, agent: str) -> None:
    """Each row of a chat ends in an answer, and says before it what the model was told."""
    made = DRAWN[agent](7)
    write_session(tmp_path / "s.jsonl", made.records)
    invoke("import", tmp_path / "s.jsonl", "--store", tmp_path / "s.duckdb")

    done = invoke("export", "sft", tmp_path / "out.jsonl", "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = [list_texts(json.loads(line)) for line in lines]
    calls = [(call.told, call.said) for call in made.calls.values()]
    drawn = [[text for _, *texts in (*told, said) for text in texts] for told, said in calls]
    assert rows
    assert all(row in drawn for row in rows)
    assert all(any(row[: len(call)] == call for row in rows) for call in drawn)


CLAUDE = {"sessionId": "s1", "isSidechain": False, "timestamp": "2026-11-20T00:01:00Z"}
META = {"type": "session_meta", "payload": {"id": "t1", "cwd": "/work"}}


def claude_user(uuid: str, below: str | None, content: Any, **fields: Any) -> dict[str, Any]:
    """Return a record of Claude Code: what a user or a tool says."""
    message = {"role": "user", "content": content}
    return {**CLAUDE, "type": "user", "uuid": uuid, "parentUuid": below, "message": message,
            **fields}  # fmt: skip


def claude_answer(uuid: str, below: str, part: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a record of Claude Code: an answer of one block."""
    reason = "tool_use" if part["type"] == "tool_use" else "end_turn"
    message_id = f"msg_{uuid.removesuffix('b')}"
    message = {"id": message_id, "role": "assistant", "model": "claude-haiku-5",
               "content": [part], "stop_reason": reason}  # fmt: skip
    return {**CLAUDE, "type": "assistant", "uuid": uuid, "parentUuid": below, "message": message,
            **fields}  # fmt: skip


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask_task(tool_id: str, prompt: str) -> dict[str, Any]:
    """Return a block that asks for a subagent."""
    asked = {"prompt": prompt, "subagent_type": "guide"}
    return {"type": "tool_use", "id": tool_id, "name": "Task", "input": asked}


def codex_item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response_item", "payload": {"type": kind, **fields}}


def codex_message(role: str, content: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return codex_item("message", role=role, content=[{"type": kind, "text": content}])


def read_calls(store: Path) -> dict[str, tuple[list[Turn], list[Turn]]]:
    """Return what was said before and in each answer, by its last text."""
    steps = Store(store).transitions()
    calls = [
        ([read_turn(each) for each in step.observation], [read_turn(each) for each in step.action])
        for step in steps
    ]
    return {said[-1][-1]: (told, said) for told, said in calls}


def read_parents(store: Path) -> set[tuple[str, str]]:
    """Return each subagent with the span that it stands below."""
    query = (
        "SELECT agent.agent, above.attributes->>'$.\"gen_ai.tool.call.id\"' FROM spans AS agent "
        "JOIN spans AS above ON above.span_id = agent.parent_span_id "
        "WHERE agent.operation = 'invoke_agent'"
    )
    return {tuple(row.values()) for row in Store(store).sql(query).dicts()}


MAIN = [
    claude_user("u1", None, "Look"),
    claude_answer("u2", "u1", ask_task("toolu_1", "Go left")),
    claude_answer("u2b", "u2", ask_task("toolu_2", "Go right")),
    claude_user(
        "u4", "u2", [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Left."}],
        toolUseResult={"agentId": "a1"},
    ),
    claude_user(
        "u5", "u2b", [{"type": "tool_result", "tool_use_id": "toolu_2", "content": "Right."}],
    ),
    claude_answer("u6", "u5", text("Seen.")),
]  # fmt: skip


def draw_subagent(agent_id: str, prompt: str) -> list[dict[str, Any]]:
    side = {"isSidechain": True, "agentId": agent_id}
    return [
        claude_user(f"{agent_id}u", None, prompt, **side),
        claude_answer(f"{agent_id}v", f"{agent_id}u", text(f"{prompt}: done"), **side),
    ]


def test_a_subagent_stands_below_the_tool_that_began_it(tmp_path: Path) -> None:
    """Files of their own: one with what is about it, one that a result names, one by its task."""
    write_session(tmp_path / "s1.jsonl", MAIN)
    folder = tmp_path / "s1" / "subagents"
    for agent_id, prompt in (("a0", "Go up"), ("a1", "Go somewhere"), ("a2", "Go right")):
        write_session(folder / f"agent-{agent_id}.jsonl", draw_subagent(agent_id, prompt))
    about = {"agentType": "Explore", "toolUseId": "toolu_1"}
    (folder / "agent-a0.meta.json").write_text(json.dumps(about))

    done = invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    below = {("Explore", "toolu_1"), ("guide", "toolu_1"), ("guide", "toolu_2")}
    assert read_parents(tmp_path / "s.duckdb") == below
    agents = {step.agent for step in Store(tmp_path / "s.duckdb").transitions()}
    assert agents == {"claude-code", "Explore", "guide"}


@pytest.mark.parametrize(("root", "task"), [(None, "Go left"), ("u2b", "Go left"), ("u2", "Go")])
def test_a_subagent_in_the_same_file_is_told_its_task_alone(
    tmp_path: Path, root: str | None, task: str
) -> None:
    """Its first record may name one of the main conversation before it."""
    side = {"isSidechain": True}
    records = [
        *MAIN[:3],
        claude_user("x1", root, task, **side),
        claude_answer("x2", "x1", text("I went."), **side),
        *MAIN[3:],
    ]
    write_session(tmp_path / "s1.jsonl", records)

    done = invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["I went."][0] == [("user", task)]
    assert calls["Seen."][0][2:] == [("user", "Left."), ("user", "Right.")]
    assert read_parents(tmp_path / "s.duckdb") == {("guide", "toolu_1")}


@pytest.mark.parametrize("parent", ["s1", "u6"])
@pytest.mark.parametrize("anchor", ["s1", "b1"])
def test_a_compaction_tells_what_it_keeps(tmp_path: Path, parent: str, anchor: str) -> None:
    """The kept segment stands behind its anchor; what comes goes on below its tail or anchor."""
    kept = {"headUuid": "u2", "anchorUuid": anchor, "tailUuid": "u6"}
    if anchor == "b1":  # what comes first is kept, and the summary follows it
        parent = "s1"
    records = [
        *MAIN,
        {**CLAUDE, "type": "system", "subtype": "compact_boundary", "uuid": "b1",
         "parentUuid": None, "compactMetadata": {"preservedSegment": kept}},
        claude_user("s1", "b1", "In short.", isCompactSummary=True),
        claude_user("v1", parent, "Next"),
        claude_answer("v2", "v1", text("Done.")),
    ]  # fmt: skip
    write_session(tmp_path / "s1.jsonl", records)

    done = invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    calls = read_calls(tmp_path / "s.duckdb")
    segment = [*calls["Seen."][0][1:], ("assistant", "Seen.")]
    summary = [("user", "In short.")]
    told = [*segment, *summary] if anchor == "b1" else [*summary, *segment]
    assert calls["Done."][0] == [*told, ("user", "Next")]


def test_a_compaction_that_keeps_what_is_not_there_is_named(tmp_path: Path) -> None:
    """The rest is read."""
    kept = {"headUuid": "gone", "anchorUuid": "s1", "tailUuid": "u6"}
    boundary = {**CLAUDE, "type": "system", "subtype": "compact_boundary", "uuid": "b1",
                "parentUuid": None, "compactMetadata": {"preservedSegment": kept}}  # fmt: skip
    summary = claude_user("s1", "b1", "In short.")
    records = [*MAIN, boundary, summary, claude_answer("v2", "s1", text("Done."))]
    write_session(tmp_path / "s1.jsonl", records)

    done = invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 1
    assert "line 8: a compaction keeps what is not there" in done.stderr
    assert read_calls(tmp_path / "s.duckdb")["Done."][0] == [("user", "In short.")]


def test_what_a_model_was_shown_is_told(tmp_path: Path) -> None:
    """Local commands, and a preview in place of a result; what was cleared stands in full."""
    changes = [{"kind": "tool-result", "toolUseId": "toolu_2", "replacement": "Rig…"}]
    local = {**CLAUDE, "type": "system", "subtype": "local_command", "uuid": "l1",
             "parentUuid": "u6", "content": "<command-name>/cost</command-name>"}  # fmt: skip
    cleared = {**CLAUDE, "type": "system", "subtype": "microcompact_boundary", "uuid": "m1",
               "parentUuid": "l1", "microcompactMetadata": {}}  # fmt: skip
    write_session(tmp_path / "s1.jsonl", [
        *MAIN[:-1], {"type": "content-replacement", "sessionId": "s1", "replacements": changes},
        MAIN[-1], local, cleared, claude_user("v1", "m1", "Next"),
        claude_answer("v2", "v1", text("Done.")),
    ])  # fmt: skip

    done = invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    assert "s1.jsonl: results of tools that were cleared stand in full" in done.stderr
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Seen."][0][-2:] == [("user", "Left."), ("user", "Rig…")]
    assert calls["Done."][0][-2:] == [("user", local["content"]), ("user", "Next")]

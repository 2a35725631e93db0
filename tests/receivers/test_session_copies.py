"""Sessions that repeat others: forks, resumed ones, side conversations, compactions."""

from pathlib import Path
from typing import Any

import pytest
from tests.receivers.sessions import write_session
from tests.receivers.test_session_files import import_files
from tests.receivers.test_sessions import (
    MAIN,
    META,
    claude_answer,
    claude_user,
    codex_item,
    codex_message,
    read_calls,
    read_turn,
    text,
)

from lightning_otel import Store


def test_ids_of_answers_may_repeat(tmp_path: Path) -> None:
    """An endpoint gives each answer the same one; a side conversation has a copy of them all."""
    message = {"id": "msg_1", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    records: list[dict[str, Any]] = []
    for number, word in enumerate(("One.", "Two.", "Three.")):
        below = records[-1]["uuid"] if records else None
        body = {**message, "content": [text(word)]}
        at = {"timestamp": f"2026-11-20T00:0{number}:00Z"}
        records.append(claude_user(f"q{number}", below, f"Ask {number}", **at))
        records.append(claude_answer(f"r{number}", f"q{number}", text(""), message=body, **at))
    other = [
        {**each, "uuid": f"o{each['uuid']}", "sessionId": "s2", "timestamp": "2026-11-21T00:00:00Z"}
        for each in records[:2]
    ]
    side = {"isSidechain": True, "agentId": "acompact-1"}
    body = {**message, "content": [text("In short.")]}
    write_session(tmp_path / "s1.jsonl", records)
    write_session(tmp_path / "s2.jsonl", [other[0], {**other[1], "parentUuid": "oq0"}])
    write_session(tmp_path / "s1" / "subagents" / "agent-acompact-1.jsonl", [
        *({**each, **side} for each in records),
        claude_user("c1", "r2", "Summarize", **side),
        claude_answer("c2", "c1", text(""), message=body, **side),
    ])  # fmt: skip

    for _ in range(2):
        assert import_files(tmp_path, tmp_path)[0] == 0

    store = Store(tmp_path / "s.duckdb")
    steps = [(step.rollout_id, step.agent, read_turn(step.action[0])[1])
             for step in store.transitions()]  # fmt: skip
    assert sorted(steps) == [
        ("s1", "claude-code", "One."), ("s1", "claude-code", "Three."),
        ("s1", "claude-code", "Two."), ("s1", "subagent", "In short."),
        ("s2", "claude-code", "One."),
    ]  # fmt: skip
    told = [(role, text) for n, word in enumerate(("One.", "Two.", "Three."))
            for role, text in (("user", f"Ask {n}"), ("assistant", word))]  # fmt: skip
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Three."][0] == told[:-1]
    assert calls["In short."][0] == [*told, ("user", "Summarize")]


@pytest.mark.parametrize("head", [{}, {"isSidechain": True, "agentId": "acompact-1"}])
@pytest.mark.parametrize("uuid", ["", "n"])
def test_a_copy_that_is_imported_later_makes_no_call_anew(
    tmp_path: Path, head: dict[str, Any], uuid: str
) -> None:
    """A resumed session, whose records may have ids of their own, and a side conversation."""
    session = "s1" if head else "r1"
    copied = [
        {**each, **head, "sessionId": session, "uuid": f"{uuid}{each['uuid']}",
         "parentUuid": each["parentUuid"] and f"{uuid}{each['parentUuid']}"}
        for each in MAIN
    ]  # fmt: skip
    own = {**head, "sessionId": session}
    write_session(tmp_path / "a" / "s1.jsonl", MAIN)
    write_session(tmp_path / "b" / "r1.jsonl", [
        *copied, claude_user("v1", f"{uuid}u6", "And?", **own),
        claude_answer("v2", "v1", text("Resumed."), **own),
    ])  # fmt: skip

    for name in "ab":
        assert import_files(tmp_path, tmp_path / name)[0] == 0

    counts = "SELECT agent, rollout_id, count(*) FROM calls GROUP BY ALL"
    rows = {tuple(row.values()) for row in Store(tmp_path / "s.duckdb").sql(counts).dicts()}
    assert rows == {("claude-code", "s1", 2), ("subagent" if head else "claude-code", session, 1)}
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Resumed."][0] == [*calls["Seen."][0], ("assistant", "Seen."), ("user", "And?")]


def test_a_copied_answer_is_one_call(tmp_path: Path) -> None:
    """Forks of both programs: their own answers go on from what was copied."""
    source = {"forkedFrom": {"sessionId": "s1"}, "sessionId": "s2"}
    fork = [{**record, **source} for record in MAIN]
    own = {"sessionId": "s2"}
    write_session(tmp_path / "s2.jsonl", [
        *fork, claude_user("f1", "u6", "And?", **own),
        claude_answer("f2", "f1", text("Forked."), **own),
    ])  # fmt: skip
    write_session(tmp_path / "s1.jsonl", MAIN)
    thread = [META, codex_message("user", "Look"), codex_message("assistant", "Old."),
              codex_message("user", "Again"), codex_message("assistant", "Older.")]  # fmt: skip
    head = {"type": "session_meta", "payload": {"id": "t2", "forked_from_id": "t1"}}
    write_session(tmp_path / "t1.jsonl", thread)
    write_session(tmp_path / "a2.jsonl", [  # read after what it copied
        head, *thread[:3], codex_message("user", "New"), codex_message("assistant", "New."),
    ])  # fmt: skip

    assert import_files(tmp_path, tmp_path)[0] == 0

    query = "SELECT rollout_id, count(*) AS calls FROM calls GROUP BY ALL"
    counts = {
        row["rollout_id"]: row["calls"] for row in Store(tmp_path / "s.duckdb").sql(query).dicts()
    }
    assert counts == {"s1": 2, "s2": 1, "t1": 2, "t2": 1}
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Forked."][0] == [*calls["Seen."][0], *calls["Seen."][1], ("user", "And?")]
    assert calls["New."][0] == [("user", "Look"), ("assistant", "Old."), ("user", "New")]


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("origin", ["t1", ""])
def test_a_fork_of_codex_makes_no_call_anew(tmp_path: Path, origin: str, is_apart: bool) -> None:
    """Imported with what it copied or after it; old ones state that by its head alone."""
    thread = [
        META, codex_message("user", "Look"), codex_message("assistant", "Old."),
        {"type": "compacted", "payload": {"message": "In short."}}, codex_message("user", "Again"),
        codex_item("function_call", name="Bash", call_id="c1", arguments='{"command":"x"}'),
        codex_item("function_call_output", call_id="c1", output="y"),
        codex_message("assistant", "Done."),
    ]  # fmt: skip
    head = {"id": "t2", **({"forked_from_id": origin} if origin else {})}
    write_session(tmp_path / "b" / "t1.jsonl", thread)
    write_session(tmp_path / "a" / "t2.jsonl", [
        {"type": "session_meta", "payload": head}, *thread, codex_message("user", "New"),
        codex_message("assistant", "Done."), codex_message("user", "Newer"),
        codex_message("assistant", "Newest."),
    ])  # fmt: skip

    for names in ("b", "a", "b") if is_apart else ("ab", "ab"):
        assert import_files(tmp_path, *(tmp_path / name for name in names))[0] == 0

    query = "SELECT rollout_id, count(*) FROM calls GROUP BY ALL"
    rows = {tuple(row.values()) for row in Store(tmp_path / "s.duckdb").sql(query).dicts()}
    assert rows == {("t1", 3), ("t2", 2)}
    assert read_calls(tmp_path / "s.duckdb")["Newest."][0] == [
        ("user", "Look"), ("user", "In short."), ("user", "Again"), ("assistant", "Bash x"),
        ("tool", "y"), ("assistant", "Done."), ("user", "New"), ("assistant", "Done."),
        ("user", "Newer"),
    ]  # fmt: skip


def test_a_compaction_of_codex_keeps_what_users_said(tmp_path: Path) -> None:
    """Where it states no history: what stood before the first prompt, and the latest prompts."""
    head = {"id": "t1", "instructions": "Use tabs."}  # what its user wrote, and no system prompt
    context = "<user_instructions>Use tabs.</user_instructions>"
    compacted = {"type": "compacted", "payload": {"message": "In short."}}
    write_session(tmp_path / "t1.jsonl", [
        {"type": "session_meta", "payload": head}, codex_message("user", context),
        codex_message("user", "Look"), codex_message("assistant", "Seen."), compacted,
        codex_message("user", "Gone"), codex_message("assistant", "Went."),
        {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}},
        codex_message("user", "x" * 80_000), codex_message("assistant", "Long."), compacted,
        codex_message("user", "Next"), codex_message("assistant", "Done."),
    ])  # fmt: skip

    assert import_files(tmp_path, tmp_path)[0] == 0

    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Seen."][0] == [("user", context), ("user", "Look")]
    assert calls["Went."][0] == [*calls["Seen."][0], ("user", "In short."), ("user", "Gone")]
    assert calls["Done."][0] == [
        ("user", context), ("user", "x" * 80_000), ("user", "In short."), ("user", "Next"),
    ]  # fmt: skip


def test_what_a_subagent_was_told_of_the_main_conversation_is_no_answer_of_its(
    tmp_path: Path,
) -> None:
    """Its file begins with a copy of that conversation."""
    side = {"isSidechain": True, "agentId": "a5"}
    copied = [{**record, **side} for record in MAIN]
    own = [claude_user("x1", "u6", "Title?", **side), claude_answer("x2", "x1", text("T"), **side)]
    write_session(tmp_path / "s1.jsonl", MAIN)
    write_session(tmp_path / "agent-a5.jsonl", [*copied, *own])

    assert import_files(tmp_path, tmp_path)[0] == 0

    store = Store(tmp_path / "s.duckdb")
    agents = [step.agent for step in store.transitions()]
    assert sorted(agents) == ["claude-code", "claude-code", "subagent"]
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["T"][0] == [*calls["Seen."][0], ("assistant", "Seen."), ("user", "Title?")]

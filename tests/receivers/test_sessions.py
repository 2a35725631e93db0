"""Session files of coding agents: what the model was told and said is what the records say."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.cli.conftest import _invoke

from lightning_otel import Store

Turn = tuple[str, ...]
"""The role of a message, and what it says: texts, calls, results."""
SESSION = "3b0c1f52-0000-4000-8000-{:012d}"


@dataclass
class Conversation:
    """A drawn session: its records, and what the model was told before each answer."""

    records: list[dict[str, Any]] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    calls: dict[str, tuple[list[Turn], Turn]] = field(default_factory=dict)

    def say(self, role: str, *texts: str) -> None:
        """Add a message."""
        self.history.append((role, *texts))

    def answer(self, name: str, *texts: str) -> None:
        """Add an answer to all that was said."""
        self.calls[name] = [*self.history], ("assistant", *texts)
        self.history.append(("assistant", *texts))


def draw_claude(seed: int) -> Conversation:
    """Return a session of Claude Code with parallel tools, rewinds, failures and compactions."""
    rng, made, clock = random.Random(seed), Conversation(), iter(range(1, 10_000))
    session, parent = SESSION.format(seed), None

    def record(kind: str, below: str | None, **fields: Any) -> str:
        at = next(clock)
        made.records.append(
            {"parentUuid": below, "isSidechain": False, "sessionId": session, "type": kind,
             "uuid": f"u{at}", "timestamp": f"2026-11-20T{at // 3600:02d}:{at // 60 % 60:02d}:"
             f"{at % 60:02d}.000Z", "cwd": "/work", "version": "2.1.332", **fields}
        )  # fmt: skip
        return f"u{at}"

    def block(below: str | None, name: str, part: dict[str, Any], reason: str | None) -> str:
        body = {"id": name, "role": "assistant", "model": "claude-opus-5", "content": [part]}
        usage = {"input_tokens": 2, "cache_read_input_tokens": 40, "output_tokens": 9}
        return record("assistant", below, message={**body, "stop_reason": reason, "usage": usage})

    made.records.append({"type": "file-history-snapshot", "messageId": "m", "snapshot": {}})
    before: list[tuple[str | None, list[Turn]]] = []
    for turn in range(rng.randint(2, 5)):
        if before and rng.random() < 0.2:  # a rewind
            parent, made.history = before[-1][0], [*before[-1][1]]
        elif before and rng.random() < 0.2:
            parent = record("system", None, subtype="compact_boundary", logicalParentUuid=parent)
            made.history = []
        before.append((parent, [*made.history]))
        parent = record("user", parent, message={"role": "user", "content": f"task {turn}"})
        made.say("user", f"task {turn}")
        for step in range(rng.randint(0, 3)):
            name = f"msg_{seed}_{turn}_{step}"
            below = parent
            parent = block(
                parent, name, {"type": "thinking", "thinking": "so", "signature": "S"}, None
            )
            texts, results = ["so"], []
            count = rng.randint(1, 3)
            for tool in range(count):
                use = f"tool_{seed}_{turn}_{step}_{tool}"
                part = {"type": "tool_use", "id": use, "name": "Bash", "input": {"command": use}}
                parent = block(parent, name, part, "tool_use" if tool + 1 == count else None)
                texts.append(f"Bash {use}")
                results.append((use, parent))
            made.answer(name, *texts)
            last = parent
            for use, asker in results:  # each stands below the block that asked
                content = [{"type": "tool_result", "tool_use_id": use, "content": f"of {use}"}]
                last = record("user", asker, message={"role": "user", "content": content})
                made.say("user", f"of {use}")
            parent = record("progress", last)
            assert below != parent
        if rng.random() < 0.3:
            failed = {"role": "assistant", "model": "<synthetic>", "id": "f", "content": [
                {"type": "text", "text": "API Error: 529"}]}  # fmt: skip
            parent = record("assistant", parent, isApiErrorMessage=True, message=failed)
        name = f"msg_{seed}_{turn}"
        parent = block(parent, name, {"type": "text", "text": f"done {turn}"}, "end_turn")
        made.answer(name, f"done {turn}")
    return made


def draw_codex(seed: int) -> Conversation:
    """Return a session of Codex with parallel tools, rollbacks and compactions."""
    rng, made, clock = random.Random(seed), Conversation(), iter(range(1, 10_000))
    session, answers = SESSION.format(seed), iter(range(1, 1000))

    def record(kind: str, **payload: Any) -> None:
        at = next(clock)
        time_text = f"2026-11-21T{at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}.000Z"
        made.records.append({"timestamp": time_text, "type": kind, "payload": payload})

    def count() -> None:
        usage = {"input_tokens": 42, "output_tokens": 9, "cached_input_tokens": 40}
        total = {"input_tokens": next(clock)}
        info = {"last_token_usage": usage, "total_token_usage": total}
        record("event_msg", type="token_count", info=info)
        record("event_msg", type="token_count", info=info)

    head = {"id": session, "cwd": "/work", "base_instructions": {"text": "You are Codex."}}
    record("session_meta", **head)
    record("turn_context", model="gpt-5.4")
    made.say("system", "You are Codex.")
    before: list[list[Turn]] = []
    for turn in range(rng.randint(2, 5)):
        if before and rng.random() < 0.2:
            record("event_msg", type="thread_rolled_back", num_turns=1)
            made.history = before.pop()
        elif before and rng.random() < 0.2:
            content = [{"type": "input_text", "text": "in short"}]
            history = [{"type": "message", "role": "user", "content": content}]
            record("compacted", message="", replacement_history=history)
            made.history, before = [("system", "You are Codex."), ("user", "in short")], []
        before.append([*made.history])
        text = [{"type": "input_text", "text": f"task {turn}"}]
        record("response_item", type="message", role="user", content=text)
        record("event_msg", type="user_message", message=f"task {turn}")
        made.say("user", f"task {turn}")
        for step in range(rng.randint(0, 3)):
            uses = [f"call_{turn}_{step}_{tool}" for tool in range(rng.randint(1, 3))]
            for use in uses:
                record("response_item", type="function_call", name="Bash", call_id=use,
                       arguments=f'{{"command":"{use}"}}')  # fmt: skip
            made.answer(f"{session}/{next(answers)}", *[f"Bash {use}" for use in uses])
            counted_late = rng.random() < 0.5
            if not counted_late:
                count()
            for use in uses:
                record(
                    "response_item", type="function_call_output", call_id=use, output=f"of {use}"
                )
                made.say("tool", f"of {use}")
            if counted_late:
                count()
        said = [{"type": "output_text", "text": f"done {turn}"}]
        record("response_item", type="message", role="assistant", content=said)
        made.answer(f"{session}/{next(answers)}", f"done {turn}")
        count()
    return made


DRAWN = {"claude-code": draw_claude, "codex": draw_codex}


def write_session(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a session file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))


def read_turn(message: Any) -> Turn:
    """Return what a message says, however its parts are called."""
    return (
        message["role"],
        *(
            f"{part['name']} {part['arguments']['command']}"
            if part["type"] == "tool_call"
            else part.get("content", part.get("response"))
            for part in message["parts"]
        ),
    )


def read_steps(store: Path) -> Iterator[tuple[str, list[Turn], list[Turn]]]:
    """Yield the id of each answer, what was said before it, and what it says."""
    for step in Store(store).transitions():
        yield (
            str(step.response_id),
            [read_turn(message) for message in step.observation],
            [read_turn(message) for message in step.action],
        )


@pytest.mark.parametrize("agent", DRAWN)
def test_each_answer_has_what_it_was_told(tmp_path: Path, agent: str) -> None:
    """Sixty sessions: parallel tools, rewinds, failed requests, compactions."""
    drawn = [DRAWN[agent](seed) for seed in range(60)]
    for seed, conversation in enumerate(drawn):
        write_session(tmp_path / "files" / f"{SESSION.format(seed)}.jsonl", conversation.records)
    store = tmp_path / "s.duckdb"

    first = _invoke("import", tmp_path / "files", "--store", store)
    again = _invoke("import", tmp_path / "files", "--store", store)

    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    assert " 0 new" in again.stderr
    calls = {name: call for each in drawn for name, call in each.calls.items()}
    steps = {name: (told, said) for name, told, said in read_steps(store)}
    assert steps == {name: (told, [said]) for name, (told, said) in calls.items()}
    query = "SELECT DISTINCT input_tokens, output_tokens, model FROM calls WHERE status = 'OK'"
    assert len(Store(store).sql(query).rows()) == 1


def test_a_subagent_stands_below_the_tool_that_began_it(tmp_path: Path) -> None:
    """Its records are a file of their own, of the same session."""
    made = draw_claude(3)
    tool = next(iter(made.calls.values()))
    write_session(tmp_path / "s.jsonl", made.records)
    side = {"isSidechain": True, "agentId": "a7", "sessionId": SESSION.format(3), "uuid": "x1",
            "timestamp": "2026-11-20T00:01:00Z"}  # fmt: skip
    said = {"id": "msg_side", "role": "assistant", "model": "claude-haiku-5", "content": "Found."}
    folder = tmp_path / "s" / "subagents"
    write_session(folder / "agent-a7.jsonl", [
        {**side, "type": "user", "parentUuid": None, "message": {"role": "user", "content": "Go"}},
        {**side, "type": "assistant", "parentUuid": "x1", "uuid": "x2", "message": said},
    ])  # fmt: skip
    about = {"agentType": "Explore", "toolUseId": "tool_3_0_0_0"}
    (folder / "agent-a7.meta.json").write_bytes(orjson.dumps(about))

    done = _invoke("import", tmp_path, "--store", tmp_path / "s.duckdb")

    assert done.returncode == 0, done.stderr
    assert tool
    store = Store(tmp_path / "s.duckdb")
    (row,) = store.sql(
        "SELECT above.name, agent.agent FROM spans AS agent JOIN spans AS above "
        "ON above.span_id = agent.parent_span_id WHERE agent.name = 'invoke_agent Explore'"
    ).dicts()
    assert row == {"name": "execute_tool Bash", "agent": "Explore"}
    assert {each.agent for each in store.transitions()} == {"claude-code", "Explore"}


@pytest.mark.parametrize("agent", DRAWN)
def test_a_session_is_followed_as_it_grows(tmp_path: Path, agent: str) -> None:
    """Written line by line, with lines cut in the middle; a new file is found, too."""
    made = DRAWN[agent](5)
    text = b"".join(orjson.dumps(record) + b"\n" for record in made.records)
    file, store = tmp_path / "files" / "s.jsonl", tmp_path / "s.duckdb"
    file.parent.mkdir()
    command = [sys.executable, "-m", "lightning_otel", "import", "--follow", str(file.parent)]
    process = subprocess.Popen([*command, "--store", str(store)], stderr=subprocess.PIPE, text=True)
    try:
        with file.open("wb") as growing:
            for start in range(0, len(text), 700):
                growing.write(text[start : start + 700])
                growing.flush()
                time.sleep(0.05)
        deadline = time.monotonic() + 60
        while not (store.exists() and _count_calls(store) == len(made.calls)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)

    assert process.returncode == 0, told
    steps = {name: (seen, said) for name, seen, said in read_steps(store)}
    assert steps == {name: (seen, [said]) for name, (seen, said) in made.calls.items()}


def _count_calls(store: Path) -> int:
    ((count,),) = (
        row.values()
        for row in Store(store).sql("SELECT count(*) FROM calls WHERE status = 'OK'").dicts()
    )
    return int(count)

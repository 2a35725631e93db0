"""Drawn sessions of coding agents: their records, and what the model was told, by construction."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson

Turn = tuple[str, ...]
"""The role of a message, and what it says: texts, calls, results."""
SESSION = "3b0c1f52-0000-4000-8000-{:012d}"


@dataclass
class Answer:
    """An answer: what the model was told before it, and what else is known of it."""

    told: list[Turn]
    said: Turn
    model: str
    tokens: int
    agent: str


@dataclass
class Conversation:
    """A drawn session: its records, and its answers."""

    records: list[dict[str, Any]] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    calls: dict[str, Answer] = field(default_factory=dict)
    bad_times: int = 0

    def say(self, role: str, *texts: str) -> None:
        self.history.append((role, *texts))


def _write_time(day: int, at: int) -> str:
    return f"2026-11-{day}T{at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}.000Z"


class _Claude:
    """Draws a session of Claude Code."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock, self.made = random.Random(seed), count(1), Conversation()
        self.seed, self.side = seed, ""
        self.parent: str | None = None
        self.between: list[Turn] = []

    def record(self, kind: str, below: str | None, **fields: Any) -> str:
        """Write a record, one of twenty without a time or with none that can be read."""
        at = next(self.clock)
        time: Any = _write_time(20, at)
        if self.rng.random() < 0.05:
            time = self.rng.choice([None, "", "soon", {"at": 1}])
            self.made.bad_times += bool(time)
        self.made.records.append(
            {"parentUuid": below, "isSidechain": bool(self.side), "type": kind, "uuid": f"u{at}",
             "sessionId": SESSION.format(self.seed), "timestamp": time, "cwd": "/work", **fields}
        )  # fmt: skip
        return f"u{at}"

    def write_user(self, below: str | None, content: Any, **fields: Any) -> str:
        return self.record("user", below, message={"role": "user", "content": content}, **fields)

    def answer(self, name: str, parts: list[dict[str, Any]], reason: str, agent: str) -> list[str]:
        """Write an answer block by block, other records between them; return the blocks' ids."""
        rng, told = self.rng, [*self.made.history]
        is_early = rng.random() < 0.5  # newer versions know it as they write the first block
        blocks: list[str] = []
        between: list[Turn] = []
        for number, part in enumerate(parts):
            if number and rng.random() < 0.3:
                beside = rng.choice(["progress", "system", "queue-operation"])
                self.parent = self.record(beside, self.parent, subtype="informational")
            if number and rng.random() < 0.2:
                between.append(("user", f"between {name} {number}"))
                self.parent = self.write_user(self.parent, between[-1][1])
            is_last = number + 1 == len(parts)
            body = {
                "id": name, "role": "assistant", "model": f"claude-{agent}", "content": [part],
                "stop_reason": reason if is_early or is_last else None,
                "usage": {"input_tokens": 2, "output_tokens": len(name) if is_last else 1},
            }  # fmt: skip
            self.parent = self.record("assistant", self.parent, message=body)
            blocks.append(self.parent)
        said = [
            part.get("thinking") or part.get("text") or f"Bash {part['input']['command']}"
            for part in parts
        ]
        answer = Answer(told, ("assistant", *said), f"claude-{agent}", len(name), agent)
        self.made.calls[name] = answer
        self.made.history.append(answer.said)
        if reason == "end_turn":
            self.made.history += between
        self.between = between
        return blocks

    def use_tools(self, name: str, agent: str) -> None:
        """Ask for tools in parallel, each result below the block that asked; run one again."""
        rng = self.rng
        uses = [f"{name}_{number}" for number in range(rng.randint(1, 3))]
        thought = {"type": "thinking", "thinking": "so", "signature": "S"}
        calls = [
            {"type": "tool_use", "id": use, "name": "Bash", "input": {"command": use}}
            for use in uses
        ]
        askers = self.answer(name, [thought, *calls], "tool_use", agent)[1:]
        branch, between = [*self.made.history], self.between
        if rng.random() < 0.3:  # another branch, whose results are not told in this one
            self.write_results(uses, askers, "old ")
            self.answer(f"{name}_lost", [{"type": "text", "text": "lost"}], "end_turn", agent)
            self.made.history, self.between = branch, between
        self.write_results(uses, askers, "")

    def write_results(self, uses: list[str], askers: list[str], prefix: str) -> None:
        """Write results in the order in which the tools were done."""
        pairs = list(zip(uses, askers, strict=True))
        self.rng.shuffle(pairs)
        for use, asker in pairs:
            text = f"{prefix}of {use}"
            result = [{"type": "tool_result", "tool_use_id": use, "content": text}]
            self.parent = self.write_user(asker, result)
            self.made.say("user", text)
        self.made.history += self.between  # results are sent first

    def fail(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            body = {"role": "assistant", "model": "<synthetic>", "id": "f",
                    "content": [{"type": "text", "text": "API Error: 529"}]}  # fmt: skip
            self.parent = self.record(
                "assistant", self.parent, isApiErrorMessage=True, message=body
            )

    def delegate(self, name: str) -> None:
        """Start a subagent whose records stand in the same file."""
        asked = {"command": "x", "prompt": f"look {name}", "subagent_type": "Explore"}
        task = {"type": "tool_use", "id": f"{name}_task", "name": "Bash", "input": asked}
        (asker,) = self.answer(name, [task], "tool_use", "opus")
        before, main, between = self.made.history, self.parent, self.between
        self.made.history = []
        self.parent = asker if self.rng.random() < 0.5 else None
        self.side = "side"
        self.parent = self.write_user(self.parent, f"look {name}")
        self.made.say("user", f"look {name}")
        self.use_tools(f"{name}_side", "Explore")
        self.answer(f"{name}_end", [{"type": "text", "text": "seen"}], "end_turn", "Explore")
        self.side, self.parent, self.made.history, self.between = "", main, before, between
        self.write_results([f"{name}_task"], [asker], "")

    def draw(self) -> Conversation:
        rng, made = self.rng, self.made
        made.records += [{"type": "summary", "summary": "x", "leafUuid": "y"}] * rng.choice([1, 80])
        before: list[tuple[str | None, list[Turn]]] = []
        for turn in range(rng.randint(2, 5)):
            if before and rng.random() < 0.2:  # a rewind
                self.parent, made.history = before[-1][0], [*before[-1][1]]
            elif before and rng.random() < 0.2:
                self.parent = self.record("system", None, subtype="compact_boundary")
                made.history = []
            before.append((self.parent, [*made.history]))
            self.parent = self.write_user(self.parent, f"task {turn}")
            made.say("user", f"task {turn}")
            for step in range(rng.randint(0, 3)):
                self.use_tools(f"msg_{self.seed}_{turn}_{step}", "opus")
                if rng.random() < 0.3:
                    self.fail()
            if rng.random() < 0.3:
                self.delegate(f"msg_{self.seed}_{turn}_d")
            name, text = f"msg_{self.seed}_{turn}", {"type": "text", "text": f"done {turn}"}
            thought = {"type": "thinking", "thinking": "hm", "signature": "S"}
            self.answer(name, [thought, text] if rng.random() < 0.5 else [text], "end_turn", "opus")
        for answer in made.calls.values():
            answer.agent = {"opus": "claude-code"}.get(answer.agent, answer.agent)
        return made


def draw_claude(seed: int) -> Conversation:
    return _Claude(seed).draw()


class _Codex:
    """Draws a session of Codex."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock, self.made = random.Random(seed), count(1), Conversation()
        self.session, self.numbers = SESSION.format(seed), count(1)
        self.tokens, self.model = count(100), "gpt-5.4"
        self.before: list[list[Turn]] = []

    def record(self, kind: str, **payload: Any) -> None:
        at = next(self.clock)
        time = "soon" if self.rng.random() < 0.03 else _write_time(21, at)
        self.made.bad_times += time == "soon"
        self.made.records.append({"timestamp": time, "type": kind, "payload": payload})

    def write_user(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.record("response_item", type="message", role="user", content=content)
        self.made.say("user", text)

    def count(self, tokens: int) -> None:
        """Count tokens, twice as Codex does, with other models between."""
        usage = {"input_tokens": 42, "output_tokens": tokens, "cached_input_tokens": 40}
        info = {"last_token_usage": usage, "total_token_usage": {"input_tokens": next(self.clock)}}
        self.record("event_msg", type="token_count", info=info)
        self.record("event_msg", type="token_count", info=info)

    def answer(self, texts: list[str]) -> int:
        """Note an answer; return the tokens that are its own."""
        name, tokens = f"{self.session}/{next(self.numbers)}", next(self.tokens)
        told, said = [*self.made.history], ("assistant", *texts)
        self.made.calls[name] = Answer(told, said, self.model, tokens, "codex")
        self.made.history.append(said)
        return tokens

    def use_tools(self, name: str) -> None:
        """Ask for tools, with words before them or not, and count before or after the results."""
        rng = self.rng
        texts = []
        if rng.random() < 0.4:
            said = [{"type": "output_text", "text": f"I try {name}"}]
            self.record("response_item", type="message", role="assistant", content=said)
            texts.append(f"I try {name}")
        uses = [f"call_{name}_{number}" for number in range(rng.randint(1, 3))]
        for use in uses:
            if rng.random() < 0.3:
                self.record("event_msg", type="model_reroute", model="gpt-0")
            if rng.random() < 0.3:
                self.record("response_item", type="ghost_snapshot", ghost_commit={"id": "c"})
            if rng.random() < 0.3:
                action = {"type": "exec", "command": use}
                self.record("response_item", type="local_shell_call", call_id=use, action=action,
                            status="completed")  # fmt: skip
                texts.append(f"local_shell {use}")
            else:
                arguments = orjson.dumps({"command": use}).decode()
                self.record("response_item", type="function_call", name="Bash", call_id=use,
                            arguments=arguments)  # fmt: skip
                texts.append(f"Bash {use}")
        tokens, is_late = self.answer(texts), rng.random() < 0.5
        if not is_late:
            self.count(tokens)
        for use in uses:
            self.record(
                "response_item", type="function_call_output", call_id=use, output=f"of {use}"
            )
            self.made.say("tool", f"of {use}")
        if is_late:
            self.count(tokens)

    def change_history(self) -> None:
        """Roll back, maybe more turns than there are since the compaction, or compact."""
        rng, made = self.rng, self.made
        if self.before and rng.random() < 0.4:
            number = rng.randint(1, len(self.before) + 1)
            self.record("event_msg", type="thread_rolled_back", num_turns=number)
            made.history = [*self.before[-min(number, len(self.before))]]
            del self.before[-number:]
        elif rng.random() < 0.4:
            self.count(7)  # the compaction's own
            content = [{"type": "input_text", "text": "in short"}]
            history = [{"type": "message", "role": "user", "content": content}]
            self.record("compacted", message="", replacement_history=history)
            made.history, self.before = [("system", "You are Codex."), ("user", "in short")], []

    def draw(self) -> Conversation:
        rng, made = self.rng, self.made
        head = {"id": self.session, "cwd": "/work", "base_instructions": {"text": "You are Codex."}}
        self.record("session_meta", **head)
        made.say("system", "You are Codex.")
        for turn in range(rng.randint(2, 6)):
            if turn:
                self.change_history()
            self.record("event_msg", type="task_started", turn_id=str(turn))
            self.model = rng.choice(["gpt-5.4", "gpt-5.4-mini"])
            self.record("turn_context", model=self.model)
            if rng.random() < 0.5:
                self.write_user(f"<environment_context>{turn}</environment_context>")
            self.before.append([*made.history])
            self.write_user(f"task {turn}")
            self.record("event_msg", type="user_message", message=f"task {turn}")
            for step in range(rng.randint(0, 3)):
                self.use_tools(f"{turn}_{step}")
            if turn and rng.random() < 0.2:
                self.record("event_msg", type="turn_aborted", reason="interrupted")
                self.write_user("<turn_aborted>by the user</turn_aborted>")
                continue
            said = [{"type": "output_text", "text": f"done {turn}"}]
            self.record("response_item", type="message", role="assistant", content=said)
            self.count(self.answer([f"done {turn}"]))
            self.record("event_msg", type="task_complete", turn_id=str(turn))
        return made


def draw_codex(seed: int) -> Conversation:
    return _Codex(seed).draw()


DRAWN: dict[str, Callable[[int], Conversation]] = {
    "claude-code": draw_claude, "codex": draw_codex,
}  # fmt: skip


def dump_session(records: list[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def write_session(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_session(records))


def iter_texts(message: Any) -> Iterator[str]:
    for part in message["parts"]:
        if part["type"] == "tool_call":
            arguments = part["arguments"]
            yield f"{part['name']} {arguments.get('command', arguments.get('prompt'))}"
        else:
            yield part.get("content", part.get("response"))

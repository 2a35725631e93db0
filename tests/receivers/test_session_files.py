"""Session files that are damaged, of other versions, packed, followed, or copied from others."""

import gzip
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.command import invoke
from tests.receivers.sessions import DRAWN, dump_session, write_session
from tests.receivers.test_sessions import (
    MAIN,
    META,
    check_store,
    claude_answer,
    claude_user,
    codex_item,
    codex_message,
    draw_subagent,
    read_calls,
    read_parents,
    text,
)
from tests.waiting import wait_until

from lightning_otel import Store


def import_files(tmp_path: Path, *files: Path) -> tuple[int, str]:
    """Import files; return the exit code and what was told."""
    done = invoke("import", *files, "--store", tmp_path / "s.duckdb")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_an_answer_that_nobody_writes_any_more_is_read(tmp_path: Path) -> None:
    """What is half written waits, which a line says, until nothing is written for long."""
    file, store = tmp_path / "s1.jsonl", tmp_path / "s.duckdb"
    write_session(file, MAIN[:3])

    code, told = import_files(tmp_path, file)
    waiting = read_calls(store)
    os.utime(file, (time.time() - 3600,) * 2)
    later = import_files(tmp_path, file)

    assert (code, later[0]) == (0, 0)
    assert "1 answer not read: still being written" in told
    assert "still being written" not in later[1]
    assert not waiting
    assert read_calls(store).keys() == {"Task Go right"}


def test_items_of_codex_are_what_they_are(tmp_path: Path) -> None:
    """Snapshots say nothing, summaries are no answers, and the shell is a tool with its result."""
    action = {"type": "exec", "command": "ls"}
    output = {"call_id": "c2", "tools": [{"name": "maps"}]}
    write_session(tmp_path / "s.jsonl", [
        META,
        codex_message("user", "Look"),
        codex_item("ghost_snapshot", ghost_commit={"id": "x"}),
        codex_item("compaction", encrypted_content="S"),
        codex_item("local_shell_call", call_id="c1", status="completed", action=action),
        codex_item("function_call_output", call_id="c1", output="a.txt"),
        codex_item("tool_search_call", call_id="c2", arguments={"command": "map"}),
        codex_item("tool_search_output", **output),
        codex_message("assistant", "Seen."),
    ])  # fmt: skip

    assert import_files(tmp_path, tmp_path / "s.jsonl")[0] == 0

    store = Store(tmp_path / "s.duckdb")
    first, second, last = store.transitions()
    assert [part["type"] for each in first.observation for part in each["parts"]] == [
        "text", "openai.compaction",
    ]  # fmt: skip
    assert [part["name"] for part in (*first.action[0]["parts"], *second.action[0]["parts"])] == [
        "local_shell", "tool_search",
    ]  # fmt: skip
    assert last.observation[-1]["parts"][0]["response"] == [{"name": "maps"}]
    names = {row["name"] for row in store.sql("SELECT name FROM spans").dicts()}
    assert {"execute_tool local_shell", "execute_tool tool_search"} < names
    (row,) = store.sql(
        "SELECT attributes->>'$.\"codex.other_records\"' AS others FROM spans "
        "WHERE operation = 'invoke_agent'"
    ).dicts()
    assert orjson.loads(row["others"]) == {"session_meta": 1, "ghost_snapshot": 1}


def test_a_session_of_codex_without_envelopes_is_read(tmp_path: Path) -> None:
    """As its first versions wrote them."""
    write_session(tmp_path / "s.jsonl", [
        {"id": "t1", "timestamp": "2025-07-01T10:00:00.000Z", "instructions": "Be brief."},
        codex_message("user", "Look")["payload"],
        codex_item("function_call", name="Bash", call_id="c1", arguments='{"command":"ls"}')[
            "payload"
        ],
        {"record_type": "state", "previous_response_id": "r1"},
        codex_item("function_call_output", call_id="c1", output="a.txt")["payload"],
        codex_message("assistant", "Seen.")["payload"],
    ])  # fmt: skip

    assert import_files(tmp_path, tmp_path / "s.jsonl")[0] == 0

    told = [("system", "Be brief."), ("user", "Look")]
    calls = read_calls(tmp_path / "s.duckdb")
    assert calls["Bash ls"][0] == told
    assert calls["Seen."][0] == [*told, ("assistant", "Bash ls"), ("tool", "a.txt")]


ODD: list[Callable[[dict[str, Any]], Any]] = [
    lambda record: [record],
    lambda record: {**record, "uuid": ["u"]},
    lambda record: {**record, "parentUuid": {"u": 1}},
    lambda record: {**record, "message": "Hello"},
    lambda record: {**record, "timestamp": ["2026"]},
    lambda record: {**record, "timestamp": 2**63},
    lambda record: {**record, "timestamp": "0001-01-01T00:00:00+14:00"},
    lambda record: {**record, "message": {"role": ["user"], "content": {"a": 1}}},
    lambda record: {**record, "message": {"id": [1], "content": [1, None, {"type": {}}]}},
    lambda record: {**record, "message": {"content": [{"type": "tool_use", "id": ["x"]}]}},
    lambda record: {**record, "message": {**record["message"], "stop_reason": [1], "usage": 3}},
    lambda record: {**record, "message": {**record["message"], "model": {"a": 1}}},
    lambda record: {**record, "toolUseResult": {"agentId": 3}, "agentId": 7, "isSidechain": 3},
    lambda record: {**record, "type": ["user"]},
    lambda record: {**record, "type": "attachment", "attachment": [1]},
    lambda record: {**record, "cwd": {"a": [1]}, "version": 3},
]


@pytest.mark.parametrize("change", ODD)
@pytest.mark.parametrize("kind", ["user", "assistant"])
def test_an_odd_value_takes_its_line_alone(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    """What comes after it is read, and nothing is raised."""
    record = claude_user("o1", None, [text("odd")])
    if kind == "assistant":
        record = claude_answer("o1", "u6", text("odd"))
    records = [*MAIN, change(record), claude_user("v1", "u6", "More"),
               claude_answer("v2", "v1", text("Said."))]  # fmt: skip
    write_session(tmp_path / "s.jsonl", records)

    code, told = import_files(tmp_path, tmp_path / "s.jsonl")

    calls = read_calls(tmp_path / "s.duckdb")
    assert {"Seen.", "Said."} <= calls.keys()
    assert len(calls["Said."][0]) == 6
    assert code == (", line 7: " in told)


ODD_CODEX: list[tuple[str, Any]] = [
    ("response_item", [1]),
    ("response_item", {"type": ["message"], "role": {}, "content": 3}),
    ("response_item", {"type": "function_call", "call_id": [1]}),
    ("event_msg", {"type": ["x"]}),
    ("event_msg", {"type": "token_count", "info": [1]}),
    ("event_msg", {"type": "thread_rolled_back", "num_turns": []}),
    ("compacted", {"replacement_history": 3}),
    ("turn_context", {"model": {"a": 1}}),
]


@pytest.mark.parametrize(("kind", "payload"), ODD_CODEX)
def test_an_odd_value_of_codex_takes_its_line_alone(
    tmp_path: Path, kind: str, payload: Any
) -> None:
    """What comes after it is read, and nothing is raised."""
    write_session(tmp_path / "s.jsonl", [
        META, codex_message("user", "Look"), codex_message("assistant", "Seen."),
        {"type": kind, "payload": payload}, codex_message("user", "More"),
        codex_message("assistant", "Said."),
    ])  # fmt: skip

    code, told = import_files(tmp_path, tmp_path / "s.jsonl")

    assert {"Seen.", "Said."} <= read_calls(tmp_path / "s.duckdb").keys()
    assert code == (", line 4: " in told)


def test_a_file_of_summaries_is_a_session_without_anything_to_take(tmp_path: Path) -> None:
    """It is no error; and it says so."""
    write_session(tmp_path / "s.jsonl", [{"type": "summary", "summary": "x", "leafUuid": "y"}] * 60)

    code, told = import_files(tmp_path, tmp_path / "s.jsonl")

    assert code == 0
    assert "s.jsonl: nothing to take" in told


def test_a_file_that_cannot_be_opened_takes_no_other_with_it(tmp_path: Path) -> None:
    """A link that leads nowhere is named."""
    write_session(tmp_path / "p" / "s1.jsonl", MAIN)
    (tmp_path / "p" / "a.jsonl").symlink_to(tmp_path / "nowhere")

    code, told = import_files(tmp_path, tmp_path / "p")

    assert code == 1
    assert "a.jsonl: it cannot be read: No such file" in told
    assert "Seen." in read_calls(tmp_path / "s.duckdb")


def test_a_folder_of_compressed_sessions_is_read(tmp_path: Path) -> None:
    """One that holds no lines at all is named."""
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    empty = import_files(tmp_path, folder)
    (folder / "s1.jsonl.gz").write_bytes(gzip.compress(dump_session(MAIN)))

    packed = import_files(tmp_path, folder)

    assert f"{folder}: no .jsonl below it; name other files one by one" in empty[1]
    assert (packed[0], "no .jsonl" in packed[1]) == (0, False)
    assert "Seen." in read_calls(tmp_path / "s.duckdb")


def test_a_zip_of_sessions_is_read_as_their_folder_is(tmp_path: Path) -> None:
    """What stands beside them is no session; a zip that cannot be read is named, and no other."""
    good, damaged, locked, cut = (tmp_path / f"{name}.zip" for name in "gdlc")
    with zipfile.ZipFile(good, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("p/s1.jsonl", dump_session(MAIN))
        made.writestr("p/s1/subagents/agent-a9.jsonl", dump_session(draw_subagent("a9", "Go")))
        made.writestr("p/s1/subagents/agent-a9.meta.json", b'{"toolUseId":"toolu_2"}')
        made.writestr("p/s1/tool-results/r.txt", b"long\n")
    packed = good.read_bytes()
    damaged.write_bytes(packed[:40] + b"\xff" * 30 + packed[70:])
    locked.write_bytes(packed.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00",
                                      b"PK\x01\x02\x14\x03\x14\x00\x01\x00"))  # fmt: skip
    cut.write_bytes(packed[: len(packed) // 2])

    code, told = import_files(tmp_path, damaged, locked, cut, good)

    assert code == 1
    for each in (damaged, locked, cut):
        assert f"{each}: " in told
    assert f"{good}" not in told
    assert read_calls(tmp_path / "s.duckdb").keys() == {"Task Go right", "Seen.", "Go: done"}
    assert read_parents(tmp_path / "s.duckdb") == {("guide", "toolu_2")}


def test_an_answer_that_was_read_half_is_told(tmp_path: Path) -> None:
    """A copy of a file that grows has an old time: thoughts wait, and words are told of later."""
    file, store = tmp_path / "s1.jsonl", tmp_path / "s.duckdb"
    thought = {"type": "thinking", "thinking": "Hm", "signature": "S"}
    first, said = (claude_answer(uuid, below, part) for uuid, below, part in (
        ("u2b", "u1", thought), ("u2bb", "u2b", text("I look.")),
    ))  # fmt: skip
    said["message"]["id"] = "msg_u2"
    first["message"]["stop_reason"] = said["message"]["stop_reason"] = None
    records = [MAIN[0], first, said]
    grown = [*records, {**MAIN[1], "parentUuid": "u2bb"}, *MAIN[3:]]
    told = []
    for part in (records[:2], records, grown, grown):
        write_session(file, part)
        os.utime(file, (time.time() - 3600,) * 2)
        told.append(import_files(tmp_path, file)[1])

    assert ["1 answer not read: still being written" in each for each in told] == [
        True, False, False, False,
    ]  # fmt: skip
    assert ["1 answer half in the store" in each for each in told] == [False, False, True, True]
    assert read_calls(store)["I look."][1] == [("assistant", "Hm", "I look.")]


def test_an_answer_of_codex_is_whole_when_its_tokens_are_counted(tmp_path: Path) -> None:
    """However old the file is, in a version that counts them."""
    file, store = tmp_path / "t1.jsonl", tmp_path / "s.duckdb"
    usage = {"last_token_usage": {"input_tokens": 2, "output_tokens": 3}, "total_token_usage": {}}
    records = [
        META, {"type": "event_msg", "payload": {"type": "task_started"}},
        codex_message("user", "Look"), codex_message("assistant", "I look."),
        codex_item("function_call", name="Bash", call_id="c1", arguments='{"command":"ls"}'),
        {"type": "event_msg", "payload": {"type": "token_count", "info": usage}},
    ]  # fmt: skip
    told = []
    for part in (records[:4], records):
        write_session(file, part)
        os.utime(file, (time.time() - 3600,) * 2)
        told.append(import_files(tmp_path, file)[1])

    assert ["not read: still being written" in each for each in told] == [True, False]
    assert [said for _, said in read_calls(store).values()] == [
        [("assistant", "I look.", "Bash ls")],
    ]  # fmt: skip


@pytest.mark.parametrize("output", ['{"agent_id":"t0"}', "started"])
def test_a_subagent_of_codex_stands_below_the_tool_that_began_it(
    tmp_path: Path, output: str
) -> None:
    """It is an agent of the rollout that began it; of a result without its id by its task."""
    arguments = orjson.dumps({"command": "go", "message": "go" if output == "started" else ""})
    call = codex_item("function_call", name="spawn_agent", call_id="c1",
                      arguments=arguments.decode())  # fmt: skip
    result = codex_item("function_call_output", call_id="c1", output=output)
    write_session(tmp_path / "t1.jsonl", [
        META, codex_message("user", "Look"), call, result, codex_message("assistant", "Seen."),
    ])  # fmt: skip
    spawn = {"parent_thread_id": "t1", "depth": 1, "agent_role": "explorer"}
    head = {"id": "t0", "source": {"subagent": {"thread_spawn": spawn}}}
    write_session(tmp_path / "t0.jsonl", [
        {"type": "session_meta", "payload": head}, codex_message("user", "go"),
        codex_message("assistant", "Went."),
    ])  # fmt: skip

    assert import_files(tmp_path, tmp_path)[0] == 0

    store = Store(tmp_path / "s.duckdb")
    assert read_parents(tmp_path / "s.duckdb") == {("explorer", "c1")}
    assert {step.rollout_id for step in store.transitions()} == {"t1"}
    assert {step.agent for step in store.transitions()} == {"codex", "explorer"}


def test_many_failures_and_long_answers_take_no_longer_than_they_are(tmp_path: Path) -> None:
    """1,500 requests that failed in a row, and an answer of 4,000 items."""
    failed = {"role": "assistant", "model": "<synthetic>", "content": [text("API Error: 529")]}
    records = [claude_user("u0", None, "x" * 100_000)]
    for number in range(1500):
        below = f"u{number}"
        records.append(claude_answer(f"f{number}", below, text("x"), isApiErrorMessage=True,
                                     message=failed))  # fmt: skip
        records.append(claude_user(f"u{number + 1}", f"f{number}", "go on"))
    records.append(claude_answer("end", "u1500", text("At last.")))
    write_session(tmp_path / "s1.jsonl", records)
    calls = [
        codex_item("function_call", name="Bash", call_id=f"c{number}", arguments='{"command":"x"}')
        for number in range(4000)
    ]
    last = codex_message("assistant", "Done.")
    write_session(tmp_path / "t1.jsonl", [META, codex_message("user", "Look"), *calls, last])
    started = time.process_time()

    assert import_files(tmp_path, tmp_path)[0] == 0

    assert time.process_time() - started < 20
    assert len(read_calls(tmp_path / "s.duckdb")["At last."][0]) == 1501
    size = "SELECT sum(length(input_messages::VARCHAR)) AS size FROM calls"
    assert next(iter(Store(tmp_path / "s.duckdb").sql(size).dicts()))["size"] < 1_000_000


@contextmanager
def follow(folder: Path, store: Path) -> Iterator[list[str]]:
    """Follow a folder; what was told is there at the end."""
    command = [sys.executable, "-m", "lightning_otel", "import", "--follow", str(folder)]
    process = subprocess.Popen([*command, "--store", str(store)], stderr=subprocess.PIPE, text=True)
    told: list[str] = []
    try:
        yield told
    finally:
        process.send_signal(signal.SIGINT)
        told.append(process.communicate(timeout=60)[1])
        told.append(str(process.returncode))


def await_calls(store: Path, number: int) -> None:
    query = "SELECT count(*) AS n FROM calls WHERE status = 'OK'"
    wait_until(
        lambda: store.exists() and next(iter(Store(store).sql(query).dicts()))["n"] >= number, 60
    )


@pytest.mark.parametrize("agent", DRAWN)
def test_a_session_is_followed_as_it_grows(tmp_path: Path, agent: str) -> None:
    """Written piece by piece, with pauses and lines cut in the middle."""
    made = next(each for each in map(DRAWN[agent], range(5, 200)) if not each.bad_times)
    lines = dump_session(made.records)
    file, store = tmp_path / "files" / "s.jsonl", tmp_path / "s.duckdb"
    file.parent.mkdir()
    with follow(file.parent, store) as told, file.open("wb") as growing:
        for start in range(0, len(lines), 1500):
            growing.write(lines[start : start + 1500])
            growing.flush()
            time.sleep(2.2 if start % 4500 == 0 and start < 20_000 else 0.05)
        await_calls(store, len(made.calls))

    assert told[1] == "0", told
    check_store(store, [made])


def test_following_goes_on_past_files_that_are_damaged_rewritten_or_gone(tmp_path: Path) -> None:
    """Each is named; a new one is read."""
    files, store = tmp_path / "files", tmp_path / "s.duckdb"
    write_session(files / "gone.jsonl", draw_subagent("a1", "Gone"))
    write_session(files / "new.jsonl", draw_subagent("a2", "First"))
    (files / "cut.jsonl").write_bytes(gzip.compress(dump_session(MAIN * 50))[:-20])
    with follow(files, store) as told:
        await_calls(store, 4)
        (files / "gone.jsonl").unlink()
        (files / "new.jsonl").unlink()
        write_session(files / "new.jsonl", draw_subagent("a3", "Second: a longer one"))
        await_calls(store, 5)
        time.sleep(2)
        write_session(files / "late.jsonl", draw_subagent("a4", "Late"))
        await_calls(store, 6)

    assert told[1] == "1"
    assert "gzip is damaged" in told[0]
    assert "new.jsonl was rewritten" in told[0]
    assert "gone.jsonl cannot be read any more" in told[0]
    assert {"Gone: done", "First: done", "Second: a longer one: done", "Late: done"} <= (
        read_calls(store).keys()
    )

"""Real harnesses, bare and by the proxy, before one scripted server: are their requests equal?

``python -m tests.harnesses.compare [NAME …]`` installs each from npm at the version named here,
runs it twice with its own shell tool, and prints a table. It ends with 1 where requests differ
otherwise than documented or a call is not on record. Without npm it says so. For a schedule.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.proxy.conftest import calls_of
from tests.proxy.origin import Origin, Peer, chunked


class Harness(NamedTuple):
    """A harness: its package, how it is asked, its variable, and a file of settings."""

    package: str
    command: tuple[str, ...]
    variable: str
    end: str = ""
    settings: tuple[str, str] = ("none", "")


HARNESSES = {
    "claude": Harness(
        "@anthropic-ai/claude-code@2.1.332",
        ("claude", "-p", "say one", "--allowedTools", "Bash"), "ANTHROPIC_BASE_URL",
    ),
    "codex": Harness(
        "@openai/codex@0.171.0",
        (
            "codex", "exec", "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox", "hi",
        ),
        "OPENAI_BASE_URL", "/v1", (".codex/auth.json", '{"OPENAI_API_KEY": "k"}'),
    ),
    "gemini": Harness(
        "@google/gemini-cli@0.61.0",
        ("gemini", "-p", "say one", "--yolo", "-m", "gemini-2.5-pro", "--skip-trust"),
        "GOOGLE_GEMINI_BASE_URL", "",
        (".gemini/settings.json", '{"security": {"auth": {"selectedType": "gemini-api-key"}}}'),
    ),
    "opencode": Harness(
        "opencode-ai@1.18.33", ("opencode", "run", "-m", "anthropic/claude-sonnet-4-5", "say one"),
        "ANTHROPIC_BASE_URL", "/v1",
    ),
}  # fmt: skip
KEYS = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"), "k")
QUIET = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "CI", "NO_COLOR"), "1")
DRAWN = re.compile(
    rb"[0-9a-f]{8}-[0-9a-f-]{27}|ses_\w+|\b[0-9a-f]{16,}\b|\d{13}|cch=\w+|home-(?:bare|proxy)"
    rb"|\d\d:\d\d:\d\d[.\d]*|\d{10}\.\d+|PGID: \d+"
    rb"|chunk_id\W+\w+|(?i:wall.time)\w*\W+[\d.e-]+"
)
"""Ids and times that a harness draws anew in each run, and the folder of the run."""
DOCUMENTED = {"host", "accept-encoding"}
UNSTABLE = {"content-length", "authorization", "x-codex-turn-metadata"}


def events(*items: dict[str, Any]) -> bytes:
    names = (f"event: {item['type']}\n" if "type" in item else "" for item in items)
    return b"".join(
        f"{name}data: {json.dumps(item)}\n\n".encode()
        for name, item in zip(names, items, strict=True)
    )


def anthropic(body: dict[str, Any]) -> bytes:
    names = [tool.get("name") for tool in body.get("tools") or ()]
    shell = next((name for name in names if name in ("Bash", "bash")), None)
    is_first = all(item["role"] != "assistant" for item in body["messages"])
    if shell and is_first:
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": shell, "input": {}}
        text = json.dumps({"command": "echo one", "description": "say"})
        delta, reason = {"type": "input_json_delta", "partial_json": text}, "tool_use"
    else:
        block, reason = {"type": "text", "text": ""}, "end_turn"
        delta = {"type": "text_delta", "text": "All done."}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"],
               "content": [], "usage": {"input_tokens": 9, "output_tokens": 1}}  # fmt: skip
    return events(
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    )


def responses(body: dict[str, Any]) -> bytes:
    is_first = not any(str(item.get("type")).endswith("_output") for item in body["input"])
    item: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant",
                            "content": [{"type": "output_text", "text": "All done."}]}  # fmt: skip
    if is_first:
        code = "const r = await tools.exec_command({cmd: 'echo one'}); text(r);"
        item = {"id": "c1", "type": "custom_tool_call", "call_id": "call_1", "name": "exec",
                "input": code}  # fmt: skip
    item["status"] = "completed"
    usage = {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    head = {"id": "resp_1", "object": "response", "model": body["model"]}
    return events(
        {"type": "response.created", "response": {**head, "status": "in_progress", "output": []}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed",
         "response": {**head, "status": "completed", "output": [item], "usage": usage}},
    )  # fmt: skip


def gemini(body: dict[str, Any]) -> bytes:
    is_first = all(item.get("role") != "model" for item in body["contents"])
    call = {"functionCall": {"name": "run_shell_command", "args": {"command": "echo one"}}}
    part = call if is_first else {"text": "All done."}
    usage = {"promptTokenCount": 9, "candidatesTokenCount": 3, "totalTokenCount": 12}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
    return events({"candidates": [candidate], "usageMetadata": usage, "responseId": "r"})


def serve(origin: Origin, peer: Peer) -> bool:
    if not (head := peer.read_head()):
        return False
    body = peer.read_body(head)
    path = head.split(b" ", 2)[1].partition(b"?")[0]
    makers = {b"messages": anthropic, b"responses": responses, b"GenerateContent": gemini}
    make = next((maker for end, maker in makers.items() if path.endswith(end)), None)
    if b"upgrade: websocket" in head.lower() or make is None or not body:
        peer.write(b"HTTP/1.1 426 Upgrade Required\r\ncontent-length: 0\r\n\r\n")
        return True
    origin.asked.append((head, body))
    peer.write(chunked(make(json.loads(body))))
    return True


def ask(
    name: str, way: str, folder: Path, programs: Path
) -> tuple[list[tuple[bytes, bytes]], Path]:
    harness, origin, home = HARNESSES[name], Origin(), folder / f"{name}-home-{way}"
    origin.script = serve
    (home / "work").mkdir(parents=True)
    file, text = harness.settings
    (home / file).parent.mkdir(exist_ok=True)
    (home / file).write_text(text)
    url = origin.url + harness.end
    command = [str(programs / harness.command[0]), *harness.command[1:]]
    if way == "proxy":
        store = str(home / "t.duckdb")
        ours = [sys.executable, "-m", "lightning_otel", "run", "--proxy", "--require-spans"]
        command = [*ours, "--store", store, "--", *command]
    elif name == "codex":
        command[1:1] = ["-c", f'openai_base_url="{url}"']
    variables = {harness.variable: url, "HOME": str(home), "CODEX_HOME": str(home / ".codex")}
    done = subprocess.run(
        command, cwd=home / "work", env={**os.environ, **KEYS, **QUIET, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    origin.close()
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-2000:], file=sys.stderr)
    return origin.asked, home


def parse(asked: tuple[bytes, bytes]) -> tuple[bytes, dict[str, bytes], bytes]:
    first, *lines = DRAWN.sub(b"*", asked[0]).rstrip().split(b"\r\n")
    pairs = (line.split(b": ", 1) for line in lines)
    # Codex writes the keys of its metadata in any order.
    body = json.dumps(json.loads(asked[1]), sort_keys=True).encode()
    return first, {key.decode().lower(): text for key, text in pairs}, DRAWN.sub(b"*", body)


def compare(name: str, folder: Path, programs: Path) -> tuple[str, bool]:
    (bare, _), (passed, home) = (ask(name, way, folder, programs) for way in ("bare", "proxy"))
    differences = set[str]()
    for one, other in zip(map(parse, bare), map(parse, passed), strict=False):
        headers = {key for key in one[1] | other[1] if one[1].get(key) != other[1].get(key)}
        differences |= headers - UNSTABLE
        differences |= {"line"} if one[0] != other[0] else set()
        differences |= {"body"} if one[2] != other[2] else set()
    count = len(calls_of(home)) if (home / "t.duckdb.d").exists() else 0
    cells = (name, HARNESSES[name].package, len(bare), len(passed), count,
             ", ".join(sorted(differences)) or "none")  # fmt: skip
    is_right = len(bare) == len(passed) == count > 1 and differences <= DOCUMENTED
    return f"| {' | '.join(map(str, cells))} |", is_right


def main(names: list[str]) -> int:
    npm = shutil.which("npm")
    if npm is None:
        print("skipped: there is no npm here")
        return 0
    cache = Path(os.environ.get("HARNESSES", Path(tempfile.gettempdir()) / "harnesses"))
    print("| harness | package | requests bare | by the proxy | on record | differences |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    rights = []
    for name in names or HARNESSES:
        place = cache / name
        place.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(place)]
        subprocess.run([*install, HARNESSES[name].package], check=True, capture_output=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            row, is_right = compare(name, Path(folder), place / "node_modules" / ".bin")
        print(row, flush=True)
        rights.append(is_right)
    return 0 if all(rights) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The recording proxy: CPU of a call and delay of the first byte, beside other ways.

A client asks a model server on loopback directly, through a bare pass-through of aiohttp, through
LiteLLM's proxy and through ours, in turns. CPU is that of the process between the two.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import spread

MODEL_S = 0.03
CASES = {"1 kB": 1, "50 kB": 50}
PIECES = 40
PASS_THROUGH = """
import sys, aiohttp
from aiohttp import web
async def handle(request):
    body = await request.read()
    own = ("host", "content-length")
    headers = {k: v for k, v in request.headers.items() if k.lower() not in own}
    url, kind = sys.argv[2] + request.path, "Content-Type"
    async with request.app["client"].post(url, data=body, headers=headers) as got:
        out = web.StreamResponse(status=got.status, headers={kind: got.headers[kind]})
        out.content_length = got.content_length
        await out.prepare(request)
        async for piece in got.content.iter_any():
            await out.write(piece)
        await out.write_eof()
        return out
async def client(app):
    app["client"] = aiohttp.ClientSession(auto_decompress=False)
    yield
    await app["client"].close()
app = web.Application(client_max_size=1 << 26)
app.cleanup_ctx.append(client)
app.router.add_post("/{path:.*}", handle)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""


def answer(*, is_stream: bool) -> bytes:
    head = {"id": "chatcmpl-1", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}
    if not is_stream:
        text = {"role": "assistant", "content": harness.text(400)}
        choice = {"index": 0, "message": text, "finish_reason": "stop"}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        body = json.dumps(whole).encode()
        return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    head["object"] = "chat.completion.chunk"
    pieces = []
    for index in range(PIECES):
        choice = {"index": 0, "delta": {"content": harness.text(8, index)}, "finish_reason": None}
        pieces.append(b"data: %s\n\n" % json.dumps({**head, "choices": [choice]}).encode())
    pieces.append(b"data: [DONE]\n\n")
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return (
        b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%s0\r\n\r\n" % body
    )


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(size or 0))  # none of what asks if the server is there


def serve(port: int) -> None:
    answers = {flag: b"HTTP/1.1 200 OK\r\n" + answer(is_stream=flag) for flag in (False, True)}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                body = await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            if b'"slow"' in body[:200]:
                await asyncio.sleep(MODEL_S)
            writer.write(answers[b'"stream": true' in body or b'"stream":true' in body])

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 24)
        await server.serve_forever()

    asyncio.run(run())


def request(size_kb: int, name: str, *, is_stream: bool, number: int) -> bytes:
    turns = [{"role": "user", "content": harness.text(1000, k)} for k in range(size_kb - 1)]
    last = {"role": "user", "content": f"{number} {harness.text(300)}"}
    body = json.dumps({"model": name, "stream": is_stream, "messages": [*turns, last]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return b"%sauthorization: Bearer sk-bench\r\ncontent-length: %d\r\n\r\n%s" % (
        head,
        len(body),
        body,
    )


def ask(sock: socket.socket, sent: bytes, end: bytes) -> float:
    began = time.perf_counter()
    sock.sendall(sent)
    got = sock.recv(1 << 20)
    first_s = time.perf_counter() - began
    while not got.endswith(end):
        piece = sock.recv(1 << 20)
        assert piece, got
        got += piece
    return first_s


def measure(server: harness.Server, size_kb: int, calls: int, *, is_stream: bool) -> Any:
    end = b"0\r\n\r\n" if is_stream else b"}"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = [request(size_kb, "fast", is_stream=is_stream, number=k) for k in range(calls + 20)]
        for each in sent[:20]:
            ask(sock, each, end)
        used = server.cpu_s()
        for each in sent[20:]:
            ask(sock, each, end)
        cpu_ms = (server.cpu_s() - used) * 1000 / calls
        slow = [request(size_kb, "slow", is_stream=is_stream, number=k) for k in range(40)]
        return cpu_ms, median(ask(sock, each, end) for each in slow) * 1000


def main(options: argparse.Namespace) -> None:
    calls, rounds = (200, 1) if options.quick else (400, 3)
    folder, base = Path(tempfile.mkdtemp()), 18_600 + os.getpid() % 100 * 10
    upstream = f"http://127.0.0.1:{base}"
    (folder / "pass.py").write_text(PASS_THROUGH)
    models = [{"model_name": name, "litellm_params": {
        "model": f"openai/{name}", "api_base": f"{upstream}/v1", "api_key": "k"}}
        for name in ("fast", "slow")]  # fmt: skip
    (folder / "litellm.json").write_text(
        json.dumps({"model_list": models, "general_settings": {"master_key": "sk-bench"}})
    )
    ways: dict[str, Any] = {"direct": "", "ours": ""}
    ours = [sys.executable, "-m", "lightning_otel", "proxy", "--upstream", upstream, "--listen"]
    for name, packages in (("aiohttp", ["aiohttp"]), ("LiteLLM", ["litellm[proxy]"])):
        if not options.only or name in options.only:
            ways[name] = harness.environment(options.env, f"proxy-{name}", packages)
    commands = {
        "direct": lambda port: [sys.executable, __file__, "--worker", json.dumps({"port": port})],
        "ours": lambda port: [*ours, f"127.0.0.1:{port}"],
        "aiohttp": lambda port: [ways["aiohttp"], folder / "pass.py", str(port), upstream],
        "LiteLLM": lambda port: [
            Path(ways["LiteLLM"]).parent / "litellm", "--config", folder / "litellm.json",
            "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1",
        ],
    }  # fmt: skip
    figures: dict[str, Any] = {}
    with harness.Server([*map(str, commands["direct"](base))], base):
        for number in range(rounds):
            for at, way in enumerate(ways):
                port = base + 1 + at
                command = [*map(str, commands[way](port))]
                with harness.Server(command, port) as server:
                    for case, size_kb in CASES.items():
                        for is_stream in (False, True):
                            name = f"{case} {'stream' if is_stream else 'whole'}"
                            pair = measure(server, size_kb, calls, is_stream=is_stream)
                            figures.setdefault(name, {}).setdefault(way, []).append(pair)
            harness.say(f"round {number + 1} of {rounds}")
    for title, index in (("CPU ms a call", 0), ("first byte, ms (p50 of 40)", 1)):
        rows = [
            [name, *(spread([pair[index] for pair in own[way]], 2) for way in ways)]
            for name, own in figures.items()
        ]
        harness.table(title, ["case", *ways], rows)
    harness.finish(options, figures, "lightning-otel", "h11")


if __name__ == "__main__":
    harness.run(main, serve)

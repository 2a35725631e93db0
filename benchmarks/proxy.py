"""The recording proxy: CPU of a call and delay of the first byte, beside aiohttp and LiteLLM's."""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import capture
import harness
from harness import spread

MODEL_S, PIECES, KEY = 0.03, 40, "sk-bench"
START_S = 7.0
"""By then the first look after the store is over, which imports DuckDB: no cost of a call."""
TITLES = ("CPU ms a call", "first byte, ms (p50 of 40)")
PEERS = {"aiohttp": "aiohttp", "LiteLLM": "litellm[proxy]"}
PASS_THROUGH = """
import sys, aiohttp
from aiohttp import web
async def handle(request):
    own = ("host", "content-length")
    headers = {k: v for k, v in request.headers.items() if k.lower() not in own}
    url, kind = sys.argv[2] + request.path, "Content-Type"
    async with request.app["client"].post(url, data=await request.read(), headers=headers) as got:
        out = web.StreamResponse(status=got.status, headers={kind: got.headers[kind]})
        out.content_length = got.content_length
        await out.prepare(request)
        async for piece in got.content.iter_any():
            await out.write(piece)
        await out.write_eof()
        return out
async def start(app):
    app["client"] = aiohttp.ClientSession(auto_decompress=False)
app = web.Application(client_max_size=1 << 26)
app.on_startup.append(start)
app.router.add_post("/{path:.*}", handle)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""


def answers() -> list[bytes]:
    usage = {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}
    whole = capture.answer("chat.completion", "message", harness.text(400), "stop", usage=usage)
    kind, texts = "chat.completion.chunk", [harness.text(8, index) for index in range(PIECES)]
    events = [*(capture.answer(kind, "delta", text, None) for text in texts), "[DONE]"]
    pieces = [f"data: {event}\n\n" for event in events]
    stream = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces) + "0\r\n\r\n"
    heads = (
        f"content-type: application/json\r\ncontent-length: {len(whole)}",
        "content-type: text/event-stream\r\ntransfer-encoding: chunked",
    )
    pairs = zip(heads, (whole, stream), strict=True)
    return [f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}".encode() for head, body in pairs]


def serve(port: int) -> None:
    whole, stream = answers()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(size or 0))  # none: is the server there?
                if b'"slow"' in body[:200]:
                    await asyncio.sleep(MODEL_S)
                is_stream = b'"stream": true' in body or b'"stream":true' in body
                writer.write(stream if is_stream else whole)

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 24)
        await server.serve_forever()

    asyncio.run(run())


def request(size_kb: int, name: str, *, is_stream: bool, number: int) -> bytes:
    turns = [{"role": "user", "content": harness.text(1000, k)} for k in range(size_kb - 1)]
    last = {"role": "user", "content": f"{number} {harness.text(300)}"}
    body = json.dumps({"model": name, "stream": is_stream, "messages": [*turns, last]})
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\nx-session-id: bench\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()


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
    settings = {"model_list": models, "general_settings": {"master_key": KEY}}
    (folder / "litellm.json").write_text(json.dumps(settings))
    peers = {
        name: harness.environment(options.env, f"proxy-{name}", [package])
        for name, package in PEERS.items() if not options.only or name in options.only
    }  # fmt: skip

    def start(way: str, port: int) -> harness.Server:
        command: list[Any] = [sys.executable, __file__, "--worker", json.dumps({"port": port})]
        if way == "ours":
            command = [sys.executable, "-m", "lightning_otel", "proxy", "--upstream", upstream]
            command += ["--listen", f"127.0.0.1:{port}"]
        elif way == "aiohttp":
            command = [peers[way], folder / "pass.py", port, upstream]
        elif way == "LiteLLM":
            command = [peers[way].with_name("litellm"), "--config", folder / "litellm.json"]
            command += ["--host", "127.0.0.1", "--port", port, "--num_workers", "1"]
        return harness.Server([*map(str, command)], port)

    ways = ("direct", "ours", *peers)
    figures: dict[str, Any] = {}
    with start("direct", base):
        for number, (at, way) in itertools.product(range(rounds), enumerate(ways)):
            harness.say(f"round {number + 1} of {rounds}: {way}")
            with start(way, base + 1 + at) as server:
                time.sleep(START_S)
                for size_kb, is_stream in itertools.product((1, 50), (False, True)):
                    name = f"{size_kb} kB {'stream' if is_stream else 'whole'}"
                    pair = measure(server, size_kb, calls, is_stream=is_stream)
                    for title, value in zip(TITLES, pair, strict=True):
                        cases = figures.setdefault(title, {}).setdefault(name, {})
                        cases.setdefault(way, []).append(value)
    for title, cases in figures.items():
        rows = [[name, *(spread(own[way], 2) for way in ways)] for name, own in cases.items()]
        harness.table(title, ["case", *ways], rows)
    harness.finish(options, figures, "lightning-otel", "h11")


if __name__ == "__main__":
    harness.run(main, serve)

"""``run --proxy`` and ``proxy``: what a program is given, what is recorded and refused."""

import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.proxy.conftest import calls_of
from tests.proxy.origin import (
    BODY,
    CHAT,
    JSON,
    WHOLE,
    Origin,
    Peer,
    answer,
    chunked,
    chunks,
    play,
    post,
    proxying,
    talk,
    whole,
)  # fmt: skip

from lightning_otel import Resources, Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.state import State
from lightning_otel.types import conventions as c

ASK = """\
import http.client, json, os, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ[sys.argv[1]])
connection = http.client.HTTPConnection(url.netloc)
said = {"role": "user", "content": "hi", "parts": [{"text": "hi"}]}
body = json.dumps({"model": "m", "messages": [said], "contents": [said]})
headers = {"content-type": "application/json", **json.loads(sys.argv[3])}
connection.request("POST", url.path + sys.argv[2], body, headers)
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
OPENAI = """\
import openai
with openai.OpenAI(api_key="k") as client:
    reply = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "What is 17*23?"}]
    )
print(reply.choices[0].message.content, flush=True)
"""
WITHOUT_END = """\
import os, sys, threading, http.client, json, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "What is 17*23?"}]})
path = os.path.join(sys.argv[1], str(os.getpid()))
log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def work():
    connection = http.client.HTTPConnection(url.netloc)
    while True:
        connection.request("POST", url.path + "/chat/completions", body)
        os.write(log, json.loads(connection.getresponse().read())["id"].encode() + b"\\n")
threading.Thread(target=work, daemon=True).start()
work()
"""


def run(
    folder: Path, *command: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lightning_otel", "run", "--proxy", *options,
         "--store", str(folder / "t.duckdb"), "--", *command],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("options", [(), ("--only",), ("--children", "none")], ids=str)
def test_request_is_one_call_beside_our_own_wrapper(
    options: tuple[str, ...], tmp_path: Path, server: DemoServer
) -> None:
    env = {"OPENAI_BASE_URL": server.base_url}
    done = run(tmp_path, sys.executable, "-c", OPENAI, options=options, env=env)
    assert done.returncode == 0, done.stderr
    (span,) = calls_of(tmp_path)
    address = f"http://{span.attributes[c.SERVER_ADDRESS]}:{span.attributes[c.SERVER_PORT]}/"
    assert server.base_url.startswith(address)
    rows = Store(tmp_path / "t.duckdb").spans().rows()
    assert span.parent_span_id in {row.span_id for row in rows}
    assert "1 call" in done.stderr
    assert "no request came" not in done.stderr
    assert not any("recorded" in name for name in server.log[-1].headers)


def test_program_is_given_addresses_and_nothing_else_with_only(
    tmp_path: Path, origin: Origin
) -> None:
    codex = tmp_path / "codex"
    codex.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv, {{**os.environ}}]))"
    )
    codex.chmod(0o755)
    env = {"ANTHROPIC_BASE_URL": f"{origin.url}/gate?x=1", "NO_PROXY": "a.b"}
    done = run(tmp_path, str(codex), "exec", options=("--only",), env=env)
    arguments, variables = json.loads(done.stdout)
    assert arguments[1:] == ["-c", f'openai_base_url="{variables["OPENAI_BASE_URL"]}"', "exec"]
    assert variables["ANTHROPIC_BASE_URL"].endswith("/gate?x=1")
    assert variables["OPENAI_BASE_URL"].endswith("/v1")
    assert variables["NO_PROXY"] == "a.b,127.0.0.1,localhost"
    assert not any(name.startswith("LIGHTNING_OTEL_R") for name in variables)
    assert "startup" not in variables.get("PYTHONPATH", "")
    assert "no request came to the proxy" in done.stderr
    assert "~/.codex/config.toml" in done.stderr


@pytest.mark.parametrize(
    ("variable", "path", "expected"),
    [
        ("ANTHROPIC_BASE_URL", "/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("ANTHROPIC_BASE_URL", "/messages", None),
        ("GOOGLE_GEMINI_BASE_URL", "/v1beta/models/g:generateContent", {"error": {"code": 502}}),
        ("OPENAI_BASE_URL", "/chat/completions", {"error": {"type": "api_error"}}),
    ],
)
def test_server_that_is_down_is_an_error_in_the_dialect(
    variable: str, path: str, expected: Any, tmp_path: Path
) -> None:
    env = {variable if expected else "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = run(tmp_path, sys.executable, "-I", "-c", ASK, variable, path, "{}", env=env)
    status, _, text = done.stdout.partition(" ")
    value = json.loads(text)
    assert status == "502"
    error = value["error"]
    assert "cannot reach" in error["message"]
    for key, own in (expected or {}).items():
        assert value[key] == own if isinstance(own, str) else own.items() <= error.items()
    (span,) = calls_of(tmp_path)
    assert span.attributes[c.ERROR_TYPE] == "ConnectionRefusedError"
    assert "hi" in span.attributes[c.INPUT_MESSAGES]


KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "4"))
"""After 50 of them more than 2,000 answers were seen to their end."""


@pytest.mark.timeout(60 + 30 * KILLS)
def test_kill_loses_no_answer_that_was_seen(tmp_path: Path, server: DemoServer) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for number in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_otel", "run", "--proxy", "--only",
             "--store", str(tmp_path / "t.duckdb"), "--",
             sys.executable, "-c", WITHOUT_END, str(log)],
            env={**os.environ, "OPENAI_BASE_URL": server.base_url}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline_s = time.monotonic() + 30
        before = {*log.iterdir()}
        while not (new := {*log.iterdir()} - before) or next(iter(new)).stat().st_size < 2_000:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        child = int(next(iter(new)).name)
        os.kill(child if number % 2 else process.pid, signal.SIGKILL)
        process.wait(30)
        if not number % 2:
            os.kill(child, signal.SIGKILL)
    seen = [line for file in log.iterdir() for line in file.read_text().split()]
    stored = {span.attributes.get(c.RESPONSE_ID) for span in calls_of(tmp_path)}
    assert len(seen) > 40 * KILLS
    assert set(seen) <= stored


def test_service_divides_by_session_and_ends_what_is_idle(tmp_path: Path, origin: Origin) -> None:
    origin.script = play(whole())
    with proxying(tmp_path, origin.url, "--idle", "0.4", "--agent", "coder") as (address, _):
        for headers in (["X-Session-ID: a"], ["X-Claude-Code-Session-Id: b"], []):
            talk(address, post(BODY, CHAT, *headers), len(whole()))
        health = urllib.request.urlopen(f"{address}/healthz", timeout=20).read()
        told = urllib.request.Request(f"{address}/end", b"", {"X-Session-ID": "a"})
        assert json.loads(urllib.request.urlopen(told, timeout=20).read()) == {"status": "ended"}
        time.sleep(1.5)
        rollouts = Store(tmp_path / "t.duckdb").sql("SELECT * FROM rollouts ORDER BY start_ns")
        assert [row["rollout_id"] for row in rollouts][:2] == ["a", "b"]
        roots = [s for s in Store(tmp_path / "t.duckdb").spans().rows() if not s.parent_span_id]
        assert all(span.end_ns for span in roots)
    assert json.loads(health) == {"status": "ok"}
    assert len(calls_of(tmp_path)) == 3
    assert {span.attributes[c.AGENT_NAME] for span in calls_of(tmp_path)} == {"coder"}
    assert "3 calls, 3 rollouts" in (tmp_path / "notes.txt").read_text()


def turn(address: str, origin: Origin, said: list[str], reply: str, status: str = "200 OK") -> None:
    """Ask with a history, in which every other message is an answer's; a reply comes."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    sent = answer(WHOLE.replace(b'"ok"', json.dumps(reply).encode()), JSON, status=status)
    if status != "200 OK":
        sent = answer(b'{"error": {"message": "later"}}', JSON, status=status)
    origin.script = play(sent)
    assert talk(address, post(body), len(sent)) == sent


def test_service_divides_by_history_where_no_header_names_a_session(
    tmp_path: Path, origin: Origin
) -> None:
    with proxying(tmp_path, origin.url) as (address, _):
        turn(address, origin, ["hi"], "one")
        turn(address, origin, ["hi"], "two")
        turn(address, origin, ["hi", "one", "on"], "", status="503 Busy")
        turn(address, origin, ["hi", "one", "on"], "three")
        turn(address, origin, ["hi", "two", "on"], "four")
        turn(address, origin, ["hi", "never said", "on"], "five")
        urllib.request.urlopen(urllib.request.Request(f"{address}/end", b""), timeout=20).close()
        turn(address, origin, ["hi", "one", "on", "three", "so"], "six")
    by_rollout: dict[str, int] = Counter(span.rollout_id for span in calls_of(tmp_path))
    assert sorted(by_rollout.values()) == [1, 1, 2, 3]
    assert "7 calls, 4 rollouts" in (tmp_path / "notes.txt").read_text()


def test_service_wants_its_key(tmp_path: Path, origin: Origin) -> None:
    origin.script = play(whole())
    file = tmp_path / "key"
    with proxying(tmp_path, origin.url, "--key-file", str(file)) as (address, _):
        base = address.replace("/KEY", f"/{file.read_text().strip()}")
        asked = urllib.request.Request(f"{base}{CHAT}", BODY)
        assert urllib.request.urlopen(asked, timeout=20).read() == WHOLE
        for wrong in (f"{address}/end", f"{address}{CHAT}", base.replace("/", "/x", 3)):
            with pytest.raises((urllib.error.HTTPError, OSError)):
                urllib.request.urlopen(urllib.request.Request(wrong, BODY), timeout=20)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(calls_of(tmp_path)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "--allow-remote and --key-file"),
        (["--listen", "0.0.0.0:0", "--allow-remote"], "--allow-remote and --key-file"),
        (["--listen", "4319"], "is no HOST:PORT"),
        (["--upstream", "ftp://x"], "is no address of a server"),
    ],
)
def test_service_refuses_what_is_unsafe(options: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_otel", "proxy", "--upstream", "http://127.0.0.1:9",
         *options], capture_output=True, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr


def test_upgrade_and_rubbish_are_refused(tmp_path: Path, origin: Origin) -> None:
    origin.asked.clear()
    with proxying(tmp_path, origin.url) as (address, _):
        upgrade = post(b"", "/v1/responses", "connection: Upgrade", "upgrade: websocket")
        for sent, status in ((upgrade, b"426"), (b"\0what\r\n\r\n", b"400")):
            assert talk(address, sent).split(b" ")[1] == status
        origin.script = play(whole(), closes=True)
        assert talk(address, post(BODY, "/model/m/invoke-with-response-stream")) == whole()
    assert len(origin.asked) == 1
    notes = (tmp_path / "notes.txt").read_text()
    assert "refused, so that it asks by HTTP: 1 WebSocket" in notes
    assert "not recorded: " in notes
    assert not calls_of(tmp_path)


@pytest.mark.parametrize("is_closed", [False, True])
def test_requests_are_changed_where_that_is_asked(
    is_closed: bool, tmp_path: Path, origin: Origin
) -> None:
    Resources(State(str(tmp_path / "t.duckdb"))).publish("system_prompt", "Be kind.")
    message = b'{"error": {"message": "what is return_token_ids?"}}'
    refusal = answer(message, JSON, status="400 Bad")
    if is_closed:
        refusal = b"HTTP/1.1 400 Bad\r\n\r\n" + message
    options = ("--apply", "--enable-retokenization-fix")
    with proxying(tmp_path, origin.url, *options) as (address, _):
        origin.asked.clear()
        origin.script = lambda server, peer: play(
            whole() if len(server.asked) else refusal, closes=True
        )(server, peer)
        sent = chunks(BODY) + b"0\r\n\r\n"
        headers = "transfer-encoding: chunked", "authorization: Bearer k"
        assert talk(address, post(sent, CHAT, *headers)) == whole()
    bodies = [json.loads(body) for _, body in origin.asked]
    assert ["return_token_ids" in body for body in bodies] == [True, False]
    assert all(body["messages"][0]["content"] == "Be kind." for body in bodies)
    assert all(b"authorization: Bearer k" in head for head, _ in origin.asked)
    (span,) = calls_of(tmp_path)
    assert "Be kind." in span.attributes[c.INPUT_MESSAGES]
    assert json.loads(span.attributes[c.RESOURCES])


def test_place_is_told_by_headers(tmp_path: Path, origin: Origin) -> None:
    origin.script = play(chunked(b"data: [DONE]\n\n"))
    parent = 'os.environ["TRACEPARENT"][:36] + "00000000000000ab-01"'
    script = ASK.replace("**json", f'"traceparent": {parent}, **json')
    headers, env = '{"x-claude-code-agent-id": "sub-1"}', {"OPENAI_BASE_URL": f"{origin.url}/v1"}
    path = "/chat/completions"
    run(tmp_path, sys.executable, "-S", "-c", script, "OPENAI_BASE_URL", path, headers, env=env)
    (span,) = calls_of(tmp_path)
    assert span.parent_span_id == "00000000000000ab"
    assert span.attributes[c.AGENT_ID] == "sub-1"


@pytest.fixture
def certified(tmp_path: Path) -> tuple[ssl.SSLContext, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(7).not_valid_before(now).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, private = Encoding.PEM, PrivateFormat.PKCS8
    (tmp_path / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, private, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context, tmp_path / "cert.pem"


def tunnel(origin: Origin, peer: Peer) -> bool:
    head = peer.read_head()
    origin.asked.append((head, b""))
    host, port = head.split(b" ")[1].decode().split(":")
    with socket.create_connection((host, int(port))) as other:
        peer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        while ready := select.select([peer.sock, other], [], [], 20)[0]:
            data = ready[0].recv(65536)
            (other if ready[0] is peer.sock else peer.sock).sendall(data)
            if not data:
                break
    return False


@pytest.mark.parametrize("way", ["direct", "tunnel", "untrusted"])
def test_server_speaks_tls(
    way: str, tmp_path: Path, certified: tuple[ssl.SSLContext, Path], origin: Origin
) -> None:
    context, file = certified
    secure = Origin(context)
    secure.script = play(whole())
    origin.script, upstream = tunnel, secure.url.replace("http://127.0.0.1", "https://localhost")
    env = {"SSL_CERT_FILE": str(file)} if way != "untrusted" else {}
    if way == "tunnel":
        env |= {"HTTPS_PROXY": origin.url.replace("//", "//me:pw@"), "NO_PROXY": ""}
    origin.asked.clear()
    with proxying(tmp_path, upstream, **env) as (address, _):
        status = talk(address, post(BODY), len(whole())).split(b" ")[1]
    secure.close()
    assert status == (b"502" if way == "untrusted" else b"200")
    assert len(secure.asked) == (way != "untrusted")
    assert [b"Basic bWU6cHc=" in head for head, _ in origin.asked] == [True] * (way == "tunnel")
    (span,) = calls_of(tmp_path)
    error = "ssl.SSLCertVerificationError" if way == "untrusted" else None
    assert span.attributes.get(c.ERROR_TYPE) == error

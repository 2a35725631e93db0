"""Who may come in: raw requests to a real server, as a browser or an attacker would send them."""

import ctypes
import os
import pty
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.serving import JSON, PROTOBUF, Serving, body_of

from lightning_otel import Span, Store
from lightning_otel.types import conventions as c


def status_of(running: Serving, request: bytes) -> int:
    """The status of the answer to raw bytes; 0 where the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        while b"\r\n" not in found and (part := connection.recv(4096)):
            found += part
    return int(found.split()[1]) if found else 0


def get(target: str, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"GET {target} HTTP/{version}", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


OWN_HOSTS = ("localhost", "127.0.0.1", "LOCALHOST:9", "127.0.0.1:4318")
FOREIGN_HOSTS = (
    "evil.example", "127.0.0.1.evil.com", "localhost.evil.com", "localhost.", "[::1]",
    "127.0.0.2", "2130706433", "0x7f000001", "127.1", "0.0.0.0", "", "localhost:", "a@b",
    "localhost@evil.com", "localhost:80:80", "localhost evil.com", "xn--lcalhost-y9a",
)  # fmt: skip
DOUBTFUL = (
    get("/"),
    get("/", version="1.0"),
    get("/", "Host: localhost", "Host: localhost"),
    get("/", "Host: localhost", "Host: evil.example"),
    get("http://evil.example/", "Host: localhost"),
    get("http://localhost/", "Host: evil.example"),
    b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{ }\r\n0\r\n\r\n",
    b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n"
    b"Content-Type: application/json\r\n\r\n{  }",
    get("/" + "x" * 100_000, "Host: localhost"),
    get("/", "Host: localhost", "X: " + "x" * 100_000),
    b"\0\1\2\3\r\n\r\n",
)
WEBSOCKET = get(
    "/", "Host: localhost", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
).replace(b"Connection: close", b"Connection: upgrade")  # fmt: skip


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        # Loopback's names, with any port: it may be forwarded.
        *((get("/static/viewer.css", f"Host: {host}"), {200}) for host in OWN_HOSTS),
        # A name that was rebound to this machine is not ours.
        *((get("/", f"Host: {host}"), {400, 421}) for host in FOREIGN_HOSTS),
        # No host, two hosts, a whole address, two lengths, a header without end.
        *((each, {400, 414, 421, 431}) for each in DOUBTFUL),
        # No WebSocket, no HTTP/2 in the clear.
        (WEBSOCKET, {403}),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_guard_takes_what_is_clearly_meant_for_it(
    shared: Serving, request_bytes: bytes, statuses: set[int]
) -> None:
    """One host of its own, one length, one protocol."""
    assert status_of(shared, request_bytes) in statuses


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:4318"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "file://localhost"}, 403),
        ({"Origin": "http://[localhost"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
def test_guard_refuses_other_sites(shared: Serving, headers: dict[str, str], status: int) -> None:
    """What a browser says of the page that asks counts; no preflight is answered."""
    answer = shared.post(b"{}", JSON, **headers)
    preflight = shared.ask("OPTIONS", "/v1/traces", access_control_request_method="POST", **headers)

    assert answer.status == status
    assert preflight.status in ({401, 405} if status == 200 else {403})
    assert "access-control-allow-origin" not in {name.lower() for name in answer.headers}


LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/traces?q=a&b=%22%3E", LINK, 200),
        ("GET", "/traces", {**LINK, "Sec-Fetch-Site": "same-site"}, 200),
        ("GET", "/traces", {**LINK, "Sec-Fetch-Dest": "iframe"}, 403),
        ("GET", "/traces", {**LINK, "Sec-Fetch-Dest": "empty"}, 403),
        ("GET", "/traces", {**LINK, "Sec-Fetch-Mode": "no-cors"}, 403),
        ("GET", "/traces", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", "/v1/transitions", LINK, 403),
        ("HEAD", "/traces", LINK, 403),
        ("POST", "/resources/prompt@change", LINK, 403),
        ("POST", "/v1/traces", LINK, 403),
        ("GET", "/traces", {**LINK, "Origin": "http://evil.example"}, 403),
        ("GET", "/traces", {**LINK, "Host": "evil.example"}, 421),
    ],
)
def test_guard_leads_links_on(
    shared: Serving, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """A link that is followed from another site is told its own address, whoever follows it."""
    given = {"host": "localhost", **{name.lower(): text for name, text in headers.items()}}
    answers = [
        shared.ask(method, path, **given, **more)
        for more in ({}, {"authorization": f"Bearer {shared.key}"})
    ]

    assert [each.status for each in answers] == [status] * 2
    assert len({each.body for each in answers}) == 1
    if status == 200:
        told = answers[0].body.decode()
        assert "url=/traces" in told
        assert '">' not in told.partition("url=")[2].partition('">')[0]
        assert answers[0].headers["cross-origin-opener-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in answers[0].headers["content-security-policy"]


def test_key_in_an_address_only_reads(shared: Serving) -> None:
    """An address is logged and handed on: nothing is changed by who has one with the key."""
    headers = {"content-type": "application/json"}
    for path in ("/v1/resources", "/training/trigger", "/optimize"):
        answer = shared.ask("POST", f"{path}?key={shared.key}", b"{}", **headers)

        assert answer.status == 401, path


@pytest.mark.parametrize(
    "path", ["/healthz", "/static/viewer.css", "/static/none", "/", "/v1/status", "/traces"]
)
@pytest.mark.parametrize("headers", [{}, LINK])
def test_key_is_given_to_nobody_who_does_not_know_it(
    shared: Serving, path: str, headers: dict[str, str]
) -> None:
    """What is open to everybody, and any other key in an address, sets no cookie."""
    for key in ("", "x", shared.key[:-1]):
        answer = shared.ask("GET", f"{path}?key={key}", **headers)

        assert "set-cookie" not in {name.lower() for name in answer.headers}
        assert shared.key.encode() not in answer.body


def test_guard_adds_its_headers(shared: Serving) -> None:
    """No sniffing, no caching, no page may show it; on refusals too."""
    for answer in (shared.ask("GET", "/"), shared.post(b"x", "text/plain")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_token_is_asked_of_everybody(tmp_path: Path) -> None:
    """Without it, or with another, nothing is served; a span says so; it is never logged."""
    token_file = tmp_path / "token"
    with Serving(tmp_path / "s.duckdb", "--port", "0", "--token-file", str(token_file)) as running:
        token = token_file.read_text().strip()
        right = running.post(body_of(1), authorization=f"Bearer {token}")
        wrong = [
            running.post(body_of(1), authorization=given).status
            for given in (
                "", token, f"Basic {token}", f"Bearer {token}x", f"Bearer {token[:-1]}", "Bearer é",
            )
        ]  # fmt: skip
        in_url = running.ask("GET", f"/?token={token}")
        _, said = running.end()

    assert right.status == 200
    assert set(wrong) == {401}
    assert in_url.status == 401
    assert in_url.headers["www-authenticate"] == "Bearer"
    assert token not in said
    (span,) = Store(tmp_path / "s.duckdb").spans()
    assert span.attributes[c.RECEIVED] == "otlp+token:127.0.0.1"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert len(token) >= 32


@pytest.mark.parametrize(
    ("mode", "text", "reason"),
    [
        (0o644, "a" * 40, "others can read"),
        (0o600, "short", "holds no token"),
        (0o600, "", "holds no token"),
        (0o600, "two words that are long enough", "holds no token"),
    ],
)
def test_token_file_must_be_a_secret(tmp_path: Path, mode: int, text: str, reason: str) -> None:
    """A file that others can read, or without a real token, is refused with exit code 2."""
    token_file = tmp_path / "token"
    token_file.write_text(text)
    token_file.chmod(mode)

    with Serving(tmp_path / "s.duckdb", "--port", "0", "--token-file", str(token_file)) as running:
        _, said = running.process.communicate(timeout=20)

    assert running.process.returncode == 2
    assert reason in said
    assert not text or text not in said


def test_open_server_is_called_by_any_address_but_by_no_foreign_name(tmp_path: Path) -> None:
    """With a token it may listen beyond the machine: an address cannot be rebound, a name can."""
    token_file = tmp_path / "token"
    options = ("--host", "0.0.0.0", "--port", "0", "--token-file", str(token_file))
    with Serving(tmp_path / "s.duckdb", *options, "--allow-host", "traces.lan") as running:
        bearer = f"Authorization: Bearer {token_file.read_text().strip()}"
        found = {
            host: status_of(running, get("/v1/status", f"Host: {host}", bearer))
            for host in ("10.1.2.3:4318", "[fe80::1]", "traces.lan", "evil.example")
        }
        bare = status_of(running, get("/v1/status", "Host: traces.lan"))

    assert found == {"10.1.2.3:4318": 200, "[fe80::1]": 200, "traces.lan": 200, "evil.example": 421}
    assert bare == 401


def test_body_without_length_is_limited_and_one_cut_off_is_dropped(shared: Serving) -> None:
    """A chunked body is counted as it comes; a sender that goes away costs nobody anything."""
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n"
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 21 + b"0\r\n\r\n"

    assert status_of(shared, chunked) == 413
    assert shared.post(body_of(1)).status == 200


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that asks programs of this machine for no key."""
    path = tmp_path_factory.mktemp("keyless") / "traces.duckdb"
    with Serving(path, "--port", "0", "--open-loopback") as running:
        yield running


_EMPTY = "Content-Length: 0"


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("GET /v1/rollouts", ("Host: localhost",), 200),
        ("GET /", ("Host: 127.0.0.1:4318", "Sec-Fetch-Site: none"), 200),
        ("POST /training/trigger", ("Host: localhost", _EMPTY), 202),
        ("GET /v1/rollouts", ("Host: evil.example",), 421),
        ("GET /v1/rollouts", ("Host: [::1]",), 421),
        ("GET /v1/rollouts", ("Host: localhost", "X-Forwarded-For: 10.0.0.1"), 401),
        ("GET /v1/rollouts", ("Host: localhost", "Forwarded: for=10.0.0.1"), 401),
        ("GET /v1/rollouts", ("Host: localhost", "Origin: http://evil.example"), 403),
        ("GET /v1/rollouts", ("Host: localhost", "Sec-Fetch-Site: cross-site"), 403),
        ("GET /v1/rollouts", ("Host: localhost", "Sec-Fetch-Site: same-site"), 403),
        ("POST /training/trigger", ("Host: localhost", _EMPTY, "Origin: null"), 403),
        ("POST /training/trigger", ("Host: localhost", _EMPTY, "Origin: http://localhost"), 415),
        (
            "POST /optimize",
            ("Host: localhost", "Content-Type: text/plain", "Content-Length: 2"),
            415,
        ),
    ],
)
def test_open_loopback_is_for_programs_of_this_machine(
    keyless: Serving, target: str, headers: tuple[str, ...], status: int
) -> None:
    """Without a key; what a page elsewhere sends, or a proxy hands on, is refused as ever."""
    method, path = target.split()
    request = get(path, *headers).replace(b"GET", method.encode(), 1)

    assert status_of(keyless, request + (b"{}" if b"Length: 2" in request else b"")) == status


@pytest.mark.parametrize("more", [("--token-file", "token"), ("--host", "0.0.0.0")])
def test_open_loopback_and_a_token_exclude_each_other(
    tmp_path: Path, spawn: Callable[..., Any], more: tuple[str, ...]
) -> None:
    """Who is to be asked for a token cannot be let in without one."""
    where = ("--store", tmp_path / "t.duckdb", "--port", "0")
    done = spawn("serve", "--open-loopback", *where, *more)

    assert done.returncode == 2, done.stderr
    assert "token" in done.stderr


def test_a_terminal_is_given_the_link_with_the_key(tmp_path: Path) -> None:
    """First of all, for a person to follow; what is no terminal may be a log."""
    ours, theirs = pty.openpty()
    store = tmp_path / "s.duckdb"
    command = [sys.executable, "-m", "lightning_otel", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--store", str(store)], stdout=theirs, stderr=subprocess.DEVNULL
    ) as running:
        os.close(theirs)
        said = b""
        while not said.endswith(b"\n"):
            said += os.read(ours, 4096)
        running.terminate()
    os.close(ours)

    assert f"/?key={(tmp_path / 's.duckdb.d' / 'viewer.key').read_text().strip()}" in said.decode()


def test_a_store_that_may_only_be_read_is_served(tmp_path: Path) -> None:
    """With a key that is kept nowhere; who sends is told to come again."""
    store = tmp_path / "s.duckdb"
    Store(store).add([Span("a" * 32, "b" * 16, None, "work", 1, 2)])
    Store(store).writer().seal()
    folders = [path for path in (tmp_path, *tmp_path.rglob("*")) if path.is_dir()]

    def obey_modes() -> None:
        for capability in (1, 2, 3) if os.geteuid() == 0 else ():  # root may write anywhere
            assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0

    for folder in folders:
        folder.chmod(0o500)
    try:
        with Serving(store, "--port", "0", "--open-loopback", preexec_fn=obey_modes) as running:
            answers = running.ask("GET", "/v1/rollouts"), running.post(body_of(1))
            code, said = running.end()
    finally:
        for folder in folders:
            folder.chmod(0o700)

    assert ([each.status for each in answers], code) == ([200, 503], 0)
    assert "the store may only be read: spans are refused" in said
    assert "?key=KEY, with a key of your own: --token-file FILE" in said
    assert not (tmp_path / "s.duckdb.d" / "viewer.key").exists()

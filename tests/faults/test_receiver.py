"""Rows S1, S2 and S6 of the fault suite, where they concern the receiver.

Each runs against a real server process; what it must do within a time it is given that time for.
"""

import gzip
import socket
import stat
import time
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.serve.serving import JSON, PROTOBUF, Serving, body_of, deep_value, field

from lightning_otel import Store

pytest.importorskip("hypercorn", reason="needs the extra serve")

MEMORY_MB = 150
ANSWER_S = 1.0
END_S = 4.0  # what it is told, 3, and the end of a process under load
SLOW = 800


def deep(levels: int) -> bytes:
    """A request of one span with an attribute of so many lists within each other."""
    return field(1, field(2, field(2, field(9, field(1, b"k") + field(2, deep_value(levels))))))


def zeros(size: int) -> bytes:
    """The beginning of a gzip of so many zeros: one block, which may stand there many times."""
    made = zlib.compressobj(9, wbits=31)
    head = made.flush(zlib.Z_FULL_FLUSH)
    block = made.compress(bytes(1 << 20)) + made.flush(zlib.Z_FULL_FLUSH)
    return head + block * (size >> 20)


BOMBS = {
    "message bomb": lambda: (gzip.compress(field(1, field(2, b"\x12\0" * 5_000_000))), PROTOBUF),
    "attribute bomb": lambda: (
        gzip.compress(field(1, field(2, field(2, b"\x4a\0" * 5_000_000)))), PROTOBUF,
    ),
    "object bomb": lambda: (
        gzip.compress(b'{"resourceSpans":[' + b"{}," * 6_000_000 + b"0]}", 6), JSON,
    ),
    "1 GB gzip": lambda: (zeros(1 << 30), PROTOBUF),
    "300k gzip members": lambda: (gzip.compress(b"") * 300_000, PROTOBUF),
    "10k lists": lambda: (gzip.compress(b"[" * 10_000 + b"]" * 10_000), JSON),
    "10k objects": lambda: (gzip.compress(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), JSON),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_s1_bomb_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """4xx within a second, at most 150 MB more memory, and the next sender is served."""
    body, kind = BOMBS[name]()
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        running.post(body_of(100))
        before_mb, started = running.memory_mb(), time.monotonic()
        answer = running.post(body, kind, content_encoding="gzip")
        took_s = time.monotonic() - started
        grown_mb = running.memory_mb() - before_mb
        after = running.post(body_of(1))

    assert answer.status in (400, 413)
    assert took_s < ANSWER_S
    assert grown_mb < MEMORY_MB
    assert after.status == 200


@pytest.mark.parametrize("levels", [47, 10_000])
def test_s1_depth_costs_one_span_at_most(tmp_path: Path, levels: int) -> None:
    """Lists within lists are taken or rejected; the spans beside them can be read."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        started = time.monotonic()
        answer = running.post(deep(levels) + body_of(3))
        took_s = time.monotonic() - started
        running.end()

    assert answer.status == 200
    assert took_s < ANSWER_S
    assert len(Store(tmp_path / "s.duckdb").spans().rows()) == 3  # the deep one has no ids


def test_s2_foreign_host_and_origin_are_refused(tmp_path: Path) -> None:
    """A rebound name and another site's page get 400, 403 or 421, and nothing of their request."""
    canary = "canary-7391"
    foreign = [
        {"host": host}
        for host in ("127.0.0.1.evil.com", "localhost.", "[::1]", f"{canary}.example", "")
    ]
    foreign += [{"origin": f"http://{canary}.example"}, {"sec_fetch_site": "cross-site"}]
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        answers = [
            running.post(body_of(1, canary), PROTOBUF, x_canary=canary, **headers)
            for headers in foreign
        ]
        form = running.post(body_of(1, canary), "text/plain")
        running.end()

    assert {answer.status for answer in answers} <= {400, 403, 421}
    assert form.status == 415
    for answer in (*answers, form):
        assert canary.encode() not in answer.body
        assert canary not in str(answer.headers)
    assert Store(tmp_path / "s.duckdb").spans().rows() == []


def test_s6_slow_sockets_keep_nobody_out(tmp_path: Path) -> None:
    """800 connections that stall in header or body: others are served, and the 800 are closed."""
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n"
    starts = [b"", b"P", head.encode(), f"{head}Content-Length: 100\r\n\r\nabc".encode()]
    feedback = f"POST /feedback HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    starts += [f"{feedback}Content-Length: 100\r\n\r\n{{".encode()]
    starts += [f"{feedback}Transfer-Encoding: chunked\r\n\r\n5\r\n".encode()]
    given = b'{"rollout_id": "r", "reward": 1, "feedback_id": "f"}'
    stalled: list[socket.socket] = []
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        running.post(body_of(1))
        try:
            for index in range(SLOW):
                stalled.append(socket.create_connection(("127.0.0.1", running.port), timeout=20))
                stalled[-1].sendall(starts[index % len(starts)])
            opened = time.monotonic()
            took_s = []
            for _ in range(5):
                started = time.monotonic()
                assert running.post(body_of(10)).status == 200
                took_s.append(time.monotonic() - started)
            answer = running.ask("POST", "/v1/feedback", given, content_type=JSON)
            key = f"Bearer {running.key}"
            status = running.ask("GET", "/v1/status", authorization=key).status
            memory_mb = running.memory_mb()
            for connection in stalled:
                while connection.recv(4096):
                    pass
            closed_s = time.monotonic() - opened
        finally:
            for connection in stalled:
                connection.close()
        code, _ = running.end()

    assert max(took_s) < ANSWER_S
    assert (answer.status, status, code) == (202, 200, 0)
    assert memory_mb < 400
    assert closed_s < 15


def test_s6_stalled_sockets_do_not_delay_the_end(tmp_path: Path) -> None:
    """Told to end, the server waits 2 s for those under way and no longer."""
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n"
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        running.post(body_of(5))
        connections = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for connection in connections:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\nabc".encode())
        time.sleep(0.2)
        started = time.monotonic()
        code, said = running.end()
        took_s = time.monotonic() - started
        for connection in connections:
            connection.close()

    assert code == 0, said
    assert took_s < END_S
    assert len(Store(tmp_path / "s.duckdb").spans().rows()) == 5


SLOW_SQL = "/sql?q=SELECT+count(*)+FROM+range(1000000000)+a,+range(1000000000)+b,+spans"


@pytest.mark.parametrize("has_gone", [False, True])
def test_s6_statements_that_wait_do_not_delay_the_end(tmp_path: Path, has_gone: bool) -> None:
    """Of thirty statements without end nothing is left soon after, whether anybody waits or not."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running, ExitStack() as held:
        running.post(body_of(5))
        head = f"Host: localhost\r\nAuthorization: Bearer {running.key}\r\n\r\n"
        for _ in range(30):
            asked = socket.create_connection(("127.0.0.1", running.port))
            held.enter_context(asked).sendall(f"GET {SLOW_SQL} HTTP/1.1\r\n{head}".encode())
        time.sleep(1)
        if has_gone:
            held.close()
            page = running.ask("GET", "/", authorization=f"Bearer {running.key}").status
            assert page == 200
        started = time.monotonic()
        code, said = running.end()
        took_s = time.monotonic() - started

    assert code == 0, said
    assert "5 spans taken" in said
    assert not (has_gone and "refused" in said), "who leaves is not refused"
    assert took_s < END_S


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_s6_no_token_no_open_door(tmp_path: Path, host: str) -> None:
    """To listen beyond this machine without a token is refused with exit code 2."""
    with Serving(tmp_path / "s.duckdb", "--host", host, "--port", "0") as running:
        _, said = running.process.communicate(timeout=20)

    assert running.process.returncode == 2
    assert "--token-file" in said


def test_s6_no_door_where_there_is_none(tmp_path: Path) -> None:
    """An address that is not this machine's, or no address at all, ends with exit code 2."""
    options = ("--port", "0", "--token-file", str(tmp_path / "token"))
    for host in ("192.0.2.1", "nowhere.invalid"):
        with Serving(tmp_path / "s.duckdb", "--host", host, *options) as running:
            _, said = running.process.communicate(timeout=20)

        assert running.process.returncode == 2
        assert f"cannot listen at {host}" in said.replace("'", "")


def test_s6_files_are_private_under_any_umask(tmp_path: Path) -> None:
    """Under umask 000 all that the server makes is 0600, and its folders 0700."""
    token = tmp_path / "secret" / "token"
    token.parent.mkdir()
    options = ("--port", "0", "--token-file", str(token))
    with Serving(tmp_path / "new" / "s.duckdb", *options, umask=0) as running:
        running.post(body_of(5), authorization=f"Bearer {token.read_text().strip()}")
        running.end()

    made = [token, *(tmp_path / "new").rglob("*"), tmp_path / "new"]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert len(made) > 5
    assert {path for path, mode in modes.items() if mode & 0o077} == set()

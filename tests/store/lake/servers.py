"""A PostgreSQL and an S3 of the tests' own, on free loopback ports, ended by their process ids."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest

START_LIMIT_S = 30.0
PASSWORD = "canary-of-postgres"
KEYS = {
    "AWS_ACCESS_KEY_ID": "canary-key-id",
    "AWS_SECRET_ACCESS_KEY": "canary-of-storage",
    "AWS_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True)
class Postgres:
    """A cluster that runs."""

    port: int
    psql: str

    def run(self, statement: str, database: str = "postgres") -> str:
        done = subprocess.run(
            [self.psql, "-h", "127.0.0.1", "-p", str(self.port), "-U", "lake", "-d", database,
             "-qAtX", "-v", "ON_ERROR_STOP=1", "-c", statement],
            env={**os.environ, "PGPASSWORD": PASSWORD},
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def url(self, database: str, data: object, local: object = "") -> str:
        """The lake whose catalogue a database is."""
        own = f"&local={local}" if local else ""
        return (
            f"ducklake:postgres://lake:{PASSWORD}@127.0.0.1:{self.port}/{database}?data={data}{own}"
        )


def binaries() -> Path | None:
    """Where the newest PostgreSQL server's programs are."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    known = shutil.which("initdb")
    path = found[-1] if found else Path(known) if known else None
    return path.parent if path else None


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A new cluster, gone after the block; it skips the test where no server is installed."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed here: apt-get install postgresql")
    # initdb refuses root, and nobody else may look into root's temporary folders.
    names = {each.pw_name for each in pwd.getpwall()}
    user = None if os.getuid() else pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    folder = Path(tempfile.mkdtemp(prefix="lightning-pg-"))
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    try:
        secret = folder / "password"
        secret.write_text(PASSWORD)
        if user:
            for path in (folder, secret):
                os.chown(path, user.pw_uid, user.pw_gid)
        subprocess.run(
            [programs / "initdb", "-D", folder / "data", "-U", "lake", "-A", "scram-sha-256",
             "--pwfile", secret, "-E", "UTF8", "--locale=C", "-N"],
            check=True, capture_output=True, timeout=START_LIMIT_S, cwd=folder, **identity,
        )  # type: ignore[call-overload]  # fmt: skip  # user and group come together or not at all
        port = free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", "-p", str(port),
                 "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
                 # What is killed in the tests are clients; the cluster itself never dies.
                 "-c", "fsync=off"],
                stdout=log, stderr=log, cwd=folder, **identity,
            )  # type: ignore[call-overload]  # fmt: skip  # as above
        try:
            server = Postgres(port, str(programs / "psql"))
            _await(lambda: server.run("SELECT 1") == "1", process, folder / "log")
            yield server
        finally:
            _end(process, signal.SIGINT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def storage() -> Iterator[str]:
    """An S3 by moto, gone after the block; gives its URL."""
    pytest.importorskip("moto.server")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            _await(lambda: _answers(url), process)
            yield url
        finally:
            _end(process, signal.SIGTERM)


def make_bucket(url: str, name: str) -> None:
    request = urllib.request.Request(f"{url}/{name}", method="PUT", data=b"")
    urllib.request.urlopen(request, timeout=20).close()


def _answers(url: str) -> bool:
    urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
    return True


def _await(is_up: object, process: "subprocess.Popen[bytes]", log: Path | None = None) -> None:
    assert callable(is_up)
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with contextlib.suppress(subprocess.CalledProcessError, URLError, OSError):
            if is_up():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(errors="replace") if log else ""
            raise RuntimeError(f"a server of the tests did not start: {text[-2000:]}")
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    process.send_signal(number)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

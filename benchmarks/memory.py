"""The server's memory, page by page: at rest, while a page is made, and after it.

    python benchmarks/memory.py [--store FOLDER] [--rounds N] [--python PYTHON]

A server of its own is sent the spans of ``viewer.py`` (2,000 conversations of an agent and one
trace of 30,000 spans), which are settled, and is started anew; or a store that is there is copied
and served. Every page is then asked for by HTTP, with the parts it loads later, in rounds. Printed
are the time of each, what is resident in the server and its children after it, and the most there
was meanwhile: the kernel's own mark for the server, looks every few milliseconds for its children.
"""

import json
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers

import viewer
from lightning_otel import Store

PAGES = (
    "/",
    "/home/curve",
    "/home/funnel",
    "/traces",
    "/traces?text=needle",
    "/traces/{small}",
    "/traces/{small}?tab=chat",
    "/traces/{big}",
    "/traces/{big}?tab=waterfall",
    "/traces/{big}?tab=chat",
    "/traces/{big}/rows?first=15000",
    "/conversations",
    "/conversations/{small}",
    "/transitions",
    "/transitions/export",
    "/rollouts",
    "/rollouts/{small}",
    "/resources",
    "/runs",
    "/sql/columns",
    "/sql?q=SELECT+name,+count(*)+FROM+spans+GROUP+BY+1+LIMIT+5",
    "/settings",
)
LOOK_S = 0.004


class Served:
    """A server over a store, and what it holds."""

    def __init__(self, python: str, folder: Path, port: int) -> None:
        self.peer = viewer.ours()
        self.peer.command = [python, *self.peer.command[1:]]
        self.server = viewer.Server(self.peer, folder, port)
        self.key = viewer.link(self.server).partition("key=")[2]

    def get(self, path: str) -> bytes:
        """A page, as a browser asks for it."""
        headers = {"Authorization": f"Bearer {self.key}", "Accept": "text/html"}
        request = urllib.request.Request(self.server.url + path, None, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def status_mb(self) -> dict[str, float]:
        """What the kernel says of the server alone."""
        text = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return {name: int(kb) / 1024 for name, kb in re.findall(r"(\w+):\s+(\d+) kB", text)}

    @contextmanager
    def peak(self, found: list[float]) -> Iterator[None]:
        """Appends the most that was resident in the block, in the server and its children."""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")
        done, most = threading.Event(), [0.0]

        def look() -> None:
            while not done.wait(LOOK_S):
                most[0] = max(most[0], self.server.memory_mb())

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            found.append(max(most[0], self.status_mb()["VmHWM"]))


def filled(python: str, folder: Path, port: int, traces: int, big: int) -> None:
    """Fill a store through a server, until all of it lies in files."""
    spans = [each for _, own in viewer.conversations(traces) for each in own]
    _, long = viewer.long_trace(big)
    served = Served(python, folder, port)
    try:
        served.server.send([*viewer.encoded(long), *viewer.encoded(spans)])
    finally:
        served.server.end()
    Store(folder).settle()


def measure(
    served: Served, pages: Sequence[str], ids: dict[str, str], rounds: int
) -> dict[str, Any]:
    """Each page in each round: seconds, resident after it, most meanwhile."""
    time.sleep(1)
    found: dict[str, Any] = {"at rest": served.server.memory_mb(), "pages": {}}
    for _ in range(rounds):
        for page in pages:
            peaks: list[float] = []
            begin = time.perf_counter()
            with served.peak(peaks):
                served.get(page.format(**ids))
                seconds = time.perf_counter() - begin
            found["pages"].setdefault(page, []).append(
                [seconds, served.server.memory_mb(), peaks[0]]
            )
    time.sleep(3)
    found["at the end"] = served.server.memory_mb()
    found["of it anonymous"] = served.status_mb()["RssAnon"]
    return found


def show(found: dict[str, Any]) -> None:
    """The table."""

    def told(looks: Sequence[Sequence[float]], at: int, digits: int) -> str:
        return peers.with_spread([each[at] for each in looks], digits)

    peers.table(
        "Each page: seconds, MB resident after it, most MB meanwhile; median (lowest to highest)",
        ["page", "s", "MB after", "MB most"],
        [
            [page, told(looks, 0, 2), told(looks, 1, 0), told(looks, 2, 0)]
            for page, looks in found["pages"].items()
        ],
    )
    whole_s = sum(statistics.median(each[0] for each in one) for one in found["pages"].values())
    every = [look for looks in found["pages"].values() for look in looks]
    rows = [
        ["at rest", f"{found['at rest']:.0f}"],
        ["after a page, most", f"{max(each[1] for each in every):.0f}"],
        ["while a page is made, most", f"{max(each[2] for each in every):.0f}"],
        ["at the end", f"{found['at the end']:.0f}"],
        ["of it anonymous", f"{found['of it anonymous']:.0f}"],
        ["all pages, s", f"{whole_s:.2f}"],
    ]
    peers.table("The server, MB", ["", ""], rows)


def main() -> None:
    """Measure and print."""
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--big", type=int, default=30_000, help="spans of the one long trace")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--port", type=int, default=18_190)
    parser.add_argument("--store", type=Path, help="serve a copy of this folder instead")
    parser.add_argument("--keep", type=Path, help="fill this folder, and measure nothing")
    parser.add_argument("--page", action="append", metavar="PATH", help="these alone")
    parser.add_argument("--python", default=sys.executable, help="that serves")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        filled(options.python, options.keep, options.port, options.traces, options.big)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder) / "store"
        if options.store:
            shutil.copytree(options.store, home)
        else:
            home.mkdir()
            filled(options.python, home, options.port, options.traces, options.big)
        ids = {"small": f"{options.traces - 1:032x}", "big": f"{0xB16:032x}"}
        served = Served(options.python, home, options.port)
        try:
            found = measure(served, options.page or PAGES, ids, options.rounds)
        finally:
            served.server.end()
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

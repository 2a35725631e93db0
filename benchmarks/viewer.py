"""The viewer beside Phoenix and MLflow: each page in time and weight, the same spans, one run.

    python benchmarks/viewer.py [--traces N] [--big N] [--rounds N]

Each server is started in its own process with an empty store and is sent the same spans by
OTLP/HTTP: conversations of an agent with a tool, and one trace of very many spans. A headless
Chromium then opens its pages. Printed are the time from the command to the first answer, the time
from asking for a page until the text looked for is on the screen (a new browser context each time,
so nothing is cached; the server is warm), the bytes that went over the wire, requests to hosts that
are not this machine (they are refused, and counted), and the memory of all the server's processes.
The text looked for is one that only the spans hold. A page that does not show it in a minute is
`> 60`.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import peers
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PHOENIX = ("arize-phoenix==20.26.1",)
MLFLOW = ("mlflow==3.17.2",)
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PER_REQUEST = 500
LIMIT_S = 60.0
START_S = 180.0
SENT_S = 300.0
STORED_S = 240.0
NEEDLE = "needle-in-one-trace"
"""Said in one small trace only."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and what shows that it is there.

    Attributes:
        name: In the table.
        path: Of the URL.
        text: On the screen when the page can be used.
    """

    name: str
    path: str
    text: str


@dataclass(slots=True)
class Peer:
    """A server with a viewer.

    Attributes:
        command: Starts it in a folder, at a port.
        settings: Of its environment.
        headers: Of spans that are sent to it.
        pages: Of the ids of a small trace and the big one; asked when the spans are there.
    """

    name: str
    command: Sequence[str]
    pages: Callable[["Server", str, str], list[Page]]
    settings: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class Server:
    """A peer's server, running in a folder of its own."""

    def __init__(self, peer: Peer, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self.peer = peer
        begin = time.perf_counter()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [part.format(port=port, folder=folder) for part in peer.command],
                cwd=folder,
                env={
                    **os.environ,  # noqa: TID251  # the rule is the package's own
                    "HOME": str(folder),
                    **{name: text.format(port=port) for name, text in peer.settings.items()},
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.first_answer_s = self._wait(begin)

    def _wait(self, begin: float) -> float:
        while time.perf_counter() - begin < START_S:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url, timeout=5):
                    return time.perf_counter() - begin
            except urllib.error.HTTPError:
                return time.perf_counter() - begin  # it asks who is there: it answers
            except OSError:
                time.sleep(0.05)
        self.end()
        raise SystemExit(f"{self.peer.name} did not start: {self.log()[-2000:]}")

    def log(self) -> str:
        """What it said."""
        return (self.folder / "log").read_text(errors="replace")

    def ask(self, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """The answer to a request."""
        headers = {"Content-Type": kind, **self.peer.headers}
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def send(self, requests: Sequence[bytes]) -> float:
        """Send spans; gives the seconds it took."""
        begin = time.perf_counter()
        for each in requests:
            while True:  # as a sender of OTLP does that is told to come again
                try:
                    self.ask("/v1/traces", each, "application/x-protobuf")
                    break
                except OSError:
                    if time.perf_counter() - begin > SENT_S:
                        raise
                    time.sleep(1)
        return time.perf_counter() - begin

    def memory_mb(self) -> float:
        """Resident memory of the process and all its descendants."""
        parents: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                text = status.read_text()
            except OSError:
                continue
            pid = int(status.parent.name)
            parents[pid] = int(text.partition("\nPPid:")[2].split()[0])
            sizes[pid] = int((text.partition("\nVmRSS:")[2].split() or ["0"])[0])
        own = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sum(sizes.get(pid, 0) for pid in own) / 1024

    def end(self) -> None:
        """Stop it and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


# What is sent


def conversations(count: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Traces of an agent that asks a model, uses a tool, and asks again: id and spans."""
    for number in range(count):
        trace_id = f"{number + 1:032x}"
        topic = NEEDLE if number == count - 2 else f"question {number}"
        asked = [{"role": "user", "parts": [{"type": "text", "content": f"{topic} " + "x " * 700}]}]
        said = [{"role": "assistant", "parts": [{"type": "text", "content": f"answer {number}"}]}]
        agent = f"{number + 1:08x}00000001"
        start = time.time_ns() - (count - number) * 1_000_000_000
        chat = {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "toy", "gen_ai.response.model": "toy",
            "gen_ai.usage.input_tokens": 700, "gen_ai.usage.output_tokens": 3,
            "gen_ai.input.messages": json.dumps(asked),
            "gen_ai.output.messages": json.dumps(said),
        }  # fmt: skip
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look_up"}
        yield trace_id, [
            span(trace_id, agent, "", f"invoke_agent {topic}", start, 900,
                 {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}),
            span(trace_id, agent[:-1] + "2", agent, "chat toy", start, 300, chat),
            span(trace_id, agent[:-1] + "3", agent, "execute_tool look_up", start + 300, 200, tool),
            span(trace_id, agent[:-1] + "4", agent, "chat toy", start + 500, 300, chat),
        ]  # fmt: skip


def long_trace(count: int) -> tuple[str, list[dict[str, Any]]]:
    """One trace of many spans: steps of a workflow with four tools each."""
    trace_id, root = f"{0xB16:032x}", "b000000000000000"
    start = time.time_ns() - 3_600_000_000_000
    found = [span(trace_id, root, "", "invoke_workflow big-root", start, 600_000, {})]
    for number in range(1, count):
        step = (number - 1) // 5 * 5 + 1
        parent = root if number == step else f"b{step:015x}"
        name = f"step-{step}" if number == step else f"execute_tool tool-{number}"
        own = {} if number == step else {"gen_ai.operation.name": "execute_tool"}
        begin = start + number * 1_000_000
        found.append(span(trace_id, f"b{number:015x}", parent, name, begin, 5, own))
    return trace_id, found


def span(
    trace_id: str, span_id: str, parent: str, name: str, start_ns: int, ms: int,
    attributes: Mapping[str, str | int],
) -> dict[str, Any]:  # fmt: skip
    """One span."""
    return {
        "trace_id": trace_id, "span_id": span_id, "parent": parent, "name": name,
        "start_ns": start_ns, "end_ns": start_ns + ms * 1_000_000, "attributes": attributes,
    }  # fmt: skip


def encoded(spans: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """OTLP requests of some hundred spans each."""
    requests = []
    for first in range(0, len(spans), PER_REQUEST):
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "bench"
        scope = resource.scope_spans.add()
        scope.scope.name = "bench"
        for each in spans[first : first + PER_REQUEST]:
            made = scope.spans.add(
                trace_id=bytes.fromhex(each["trace_id"]), span_id=bytes.fromhex(each["span_id"]),
                parent_span_id=bytes.fromhex(each["parent"]), name=each["name"], kind=1,
                start_time_unix_nano=each["start_ns"], end_time_unix_nano=each["end_ns"],
            )  # fmt: skip
            for key, value in each["attributes"].items():
                kept = made.attributes.add(key=key).value
                if isinstance(value, int):
                    kept.int_value = value
                else:
                    kept.string_value = value
        requests.append(request.SerializeToString())
    return requests


# Peers


def our_pages(server: Server, small: str, big: str) -> list[Page]:
    """The home page is opened by the printed link, which leaves a cookie."""
    return [
        Page("home", link(server), "planner"),
        Page("traces", "/traces", NEEDLE),
        Page("one trace", f"/traces/{small}", NEEDLE),
        Page("big trace", f"/traces/{big}", "big-root"),
    ]


def link(server: Server) -> str:
    """The path of the printed link, with its key."""
    words = [word for word in server.log().split() if "?key=" in word]
    parts = urlsplit(words[0])
    return f"{parts.path}?{parts.query}"


def phoenix_pages(server: Server, small: str, big: str) -> list[Page]:
    """Its traces are in a project, which has an id of its own."""
    found = json.loads(server.ask("/v1/projects"))["data"]
    project = next(each["id"] for each in found if each["name"] == "default")
    home = f"/projects/{project}"
    return [
        Page("home", "/projects", "default"),
        Page("traces", f"{home}/traces", NEEDLE),
        Page("one trace", f"{home}/traces/{small}", NEEDLE),
        Page("big trace", f"{home}/traces/{big}", "big-root"),
    ]


def mlflow_pages(server: Server, small: str, big: str) -> list[Page]:
    """A trace is opened over the list of its experiment, which shows no name of a span."""
    traces = "/#/experiments/0/traces"
    return [
        Page("home", "/", "Default"),
        Page("traces", traces, "900ms"),
        Page("one trace", f"{traces}?selectedEvaluationId=tr-{small}", NEEDLE),
        Page("big trace", f"{traces}?selectedEvaluationId=tr-{big}", "big-root"),
    ]


def ours() -> Peer:
    """This checkout."""
    return Peer(
        "lightning-otel",
        [sys.executable, "-m", "lightning_otel", "ui", "--port", "{port}", "--store", "{folder}"],
        our_pages,
    )


def phoenix(folder: Path) -> Peer:
    """Phoenix, with its telemetry off."""
    python = peers.environment(folder, "phoenix", PHOENIX)
    return Peer(
        "Phoenix",
        [str(python.parent / "phoenix"), "serve"],
        phoenix_pages,
        {
            "PHOENIX_WORKING_DIR": ".",
            "PHOENIX_PORT": "{port}",
            "PHOENIX_TELEMETRY_ENABLED": "false",
        },
    )


def mlflow(folder: Path) -> Peer:
    """MLflow on SQLite, with its telemetry off."""
    python = peers.environment(folder, "mlflow", MLFLOW)
    return Peer(
        "MLflow",
        [str(python.parent / "mlflow"), "server", "--port", "{port}",
         "--backend-store-uri", "sqlite:///{folder}/mlflow.db"],
        mlflow_pages,
        {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
        {"x-mlflow-experiment-id": "0"},
    )  # fmt: skip


# Looking


@dataclass(frozen=True, slots=True)
class Look:
    """One page, opened once."""

    seconds: float | None
    bytes: int
    outside: frozenset[str]


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


def look(chromium: Any, url: str, page: Page, first: str | None) -> Look:
    """Open a page in a new context; where a link must be opened first, that is not counted."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    outside: set[str] = set()

    def guard(route: Any) -> None:
        host = urlsplit(route.request.url).hostname
        if host in ("127.0.0.1", "localhost", None):
            route.continue_()
            return
        outside.add(host)
        route.abort()

    tab, below = context.new_page(), url
    if first and first != page.path:
        tab.goto(url + first)
        # Ours has its pages below a path that the link leads to.
        found = re.match(r".*/v-[\w-]+(?=/)", tab.url)
        below = found[0] if found else url
        tab.close()
        tab = context.new_page()
    context.route("**/*", guard)
    wire = context.new_cdp_session(tab)
    wire.send("Network.enable")
    wire.send("Network.setCacheDisabled", {"cacheDisabled": True})
    weights: list[float] = []
    wire.on("Network.loadingFinished", lambda event: weights.append(event["encodedDataLength"]))
    begin = time.perf_counter()
    try:
        tab.goto(below + page.path, timeout=LIMIT_S * 1000, wait_until="commit")
        tab.get_by_text(page.text).first.wait_for(timeout=LIMIT_S * 1000)
        seconds = time.perf_counter() - begin
        tab.wait_for_timeout(1000)  # what comes in late is weighed too
    except Exception as exc:
        if type(exc).__name__ != "TimeoutError":
            raise
        seconds = None
    context.close()
    return Look(seconds, int(sum(weights)), frozenset(outside))


def measure(
    peer: Peer, port: int, requests: Sequence[bytes], ids: tuple[str, str], rounds: int
) -> dict[str, Any]:
    """Everything of one server."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server(peer, Path(folder), port)
        try:
            peers.say(f"{peer.name} answers after {server.first_answer_s:.1f} s")
            sent_s = server.send(requests)
            peers.say(f"{peer.name} took the spans in {sent_s:.1f} s")
            pages = peer.pages(server, *ids)
            first = pages[0].path if "key=" in pages[0].path else None
            found: dict[str, Any] = {"start_s": server.first_answer_s, "sent_s": sent_s}
            with browser() as chromium:
                # Some store what they took in the background: the last trace that was sent.
                begin = time.perf_counter()
                while look(chromium, server.url, pages[2], first).seconds is None:
                    if time.perf_counter() - begin > STORED_S:
                        break
                found["shown_s"] = sent_s + time.perf_counter() - begin
                for page in pages:
                    looks = [look(chromium, server.url, page, first) for _ in range(rounds)]
                    found[page.name] = [
                        [each.seconds, each.bytes, sorted(each.outside)] for each in looks
                    ]
                    peers.say(f"{peer.name}, {page.name}: {found[page.name]}")
            found["memory_mb"] = server.memory_mb()
            return found
        finally:
            server.end()


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """The tables."""
    names = list(found)
    pages = ("home", "traces", "one trace", "big trace")

    def seconds(looks: Sequence[Sequence[Any]]) -> str:
        if any(each[0] is None for each in looks):
            return f"> {LIMIT_S:.0f}"
        return peers.with_spread([each[0] for each in looks], 2)

    def kilobytes(looks: Sequence[Sequence[Any]]) -> str:
        return f"{statistics.median(each[1] for each in looks) / 1000:,.0f}"

    def ratio(page: str) -> str:
        others = [[each[0] or LIMIT_S for each in found[name][page]] for name in names[1:]]
        own = [each[0] or LIMIT_S for each in found[names[0]][page]]
        best = min(map(statistics.median, others)) if others else float("nan")
        return f"{statistics.median(own) / best:.2f}"

    peers.table(
        "Seconds until a page can be used: median (lowest to highest)",
        ["page", *names, "ours / best peer"],
        [[page, *(seconds(found[name][page]) for name in names), ratio(page)] for page in pages],
    )
    peers.table(
        "Kilobytes over the wire",
        ["page", *names],
        [[page, *(kilobytes(found[name][page]) for name in names)] for page in pages],
    )
    outside = {
        name: {host for page in pages for each in found[name][page] for host in each[2]}
        for name in names
    }
    peers.table(
        "The server",
        ["", *names],
        [
            ["command to first answer, s", *(f"{found[name]['start_s']:.1f}" for name in names)],
            ["taking the spans, s", *(f"{found[name]['sent_s']:.1f}" for name in names)],
            [
                "until the last trace is shown, s",
                *(f"{found[name]['shown_s']:.1f}" for name in names),
            ],
            ["memory at the end, MB", *(f"{found[name]['memory_mb']:,.0f}" for name in names)],
            ["outside hosts asked for", *(len(outside[name]) for name in names)],
        ],
    )
    for name in names:
        if outside[name]:
            print(f"{name} asks {', '.join(sorted(outside[name]))}")


def main() -> None:
    """Measure and print."""
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--big", type=int, default=32_844, help="spans of the one long trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="NAME", help="these alone")
    options = parser.parse_args()
    if options.quick:
        options.traces, options.big, options.rounds = 200, 5000, 1
    small, spans = "", []
    for trace_id, own in conversations(options.traces):
        spans += own
        small = trace_id if any(NEEDLE in each["name"] for each in own) else small
    big, long = long_trace(options.big)
    # The long trace goes first: the newest are the small ones, as lists show them.
    requests = [*encoded(long), *encoded(spans)]
    makers: dict[str, Callable[[], Peer]] = {
        "lightning-otel": ours,
        "Phoenix": lambda: phoenix(options.env),
        "MLflow": lambda: mlflow(options.env),
    }
    wanted = options.only or list(makers)
    found = {
        name: measure(makers[name](), 43_180 + number, requests, (small, big), options.rounds)
        for number, name in enumerate(wanted)
    }
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

"""The viewer beside Phoenix and MLflow: time and weight of each page, and the server's memory.

    python benchmarks/viewer.py [--quick] [--only NAME] [--memory]

Each server starts with an empty store and gets the same spans by OTLP/HTTP: conversations of an
agent with a tool, and one trace of very many spans. A headless Chromium opens its pages, with
nothing cached, until a text that only the spans hold is on the screen. Requests to other hosts are
refused, and counted. ``--memory`` asks our server for every page, and prints what it holds
meanwhile and afterwards. Needs the extra ``test``.
"""

import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import harness
from harness import OURS, Server, spread
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PER_REQUEST = 500
LIMIT_S, STORED_S = 60.0, 240.0
NEEDLE = "needle-in-one-trace"
BIG = f"{0xB16:032x}"
PAGES = (
    "/", "/home/curve", "/home/funnel", "/traces", "/traces?text=needle", "/traces/{small}",
    "/traces/{small}?tab=chat", "/traces/{big}", "/traces/{big}?tab=waterfall",
    "/traces/{big}?tab=chat", "/traces/{big}/rows?first=15000", "/conversations",
    "/conversations/{small}", "/transitions", "/transitions/export", "/rollouts",
    "/rollouts/{small}", "/resources", "/runs", "/sql/columns",
    "/sql?q=SELECT+name,+count(*)+FROM+spans+GROUP+BY+1+LIMIT+5", "/settings",
)  # fmt: skip


class Spans:
    """OTLP requests, made span by span."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self._scope: Any = None

    def add(
        self,
        trace_id: str,
        span_id: str,
        parent: str,
        name: str,
        start_ns: int,
        ms: int,
        **own: Any,
    ) -> None:
        if self._scope is None or len(self._scope.spans) == PER_REQUEST:
            self.requests.append(ExportTraceServiceRequest())
            resource = self.requests[-1].resource_spans.add()
            resource.resource.attributes.add(key="service.name").value.string_value = "bench"
            self._scope = resource.scope_spans.add()
        span = self._scope.spans.add(
            trace_id=bytes.fromhex(trace_id), span_id=bytes.fromhex(span_id),
            parent_span_id=bytes.fromhex(parent), name=name, kind=1,
            start_time_unix_nano=start_ns, end_time_unix_nano=start_ns + ms * 1_000_000,
        )  # fmt: skip
        for key, value in own.items():
            kept = span.attributes.add(key=f"gen_ai.{key.replace('__', '.')}").value
            setattr(kept, "int_value" if isinstance(value, int) else "string_value", value)


def recorded(traces: int, big: int) -> tuple[list[bytes], str]:
    """Return requests with all spans, and the id of the trace that has the needle."""
    spans, now = Spans(), time.time_ns()
    # The long trace goes first: the newest are the small ones, as lists show them.
    root = "b000000000000000"
    spans.add(BIG, root, "", "invoke_workflow big-root", now - 3_600_000_000_000, 600_000)
    for number in range(1, big):
        step = (number - 1) // 5 * 5 + 1
        is_step = number == step
        spans.add(
            BIG, f"b{number:015x}", root if is_step else f"b{step:015x}",
            f"step-{step}" if is_step else f"execute_tool tool-{number}",
            now - 3_600_000_000_000 + number * 1_000_000, 5,
            **({} if is_step else {"operation__name": "execute_tool"}),
        )  # fmt: skip
    for number in range(traces):
        trace_id, agent = f"{number + 1:032x}", f"{number + 1:08x}00000001"
        topic = NEEDLE if number == traces - 2 else f"question {number}"
        start = now - (traces - number) * 1_000_000_000
        asked = [{"role": "user", "parts": [{"type": "text", "content": f"{topic} " + "x " * 700}]}]
        said = [{"role": "assistant", "parts": [{"type": "text", "content": f"answer {number}"}]}]
        chat = {
            "operation__name": "chat", "provider__name": "openai", "request__model": "toy",
            "response__model": "toy", "usage__input_tokens": 700, "usage__output_tokens": 3,
            "input__messages": json.dumps(asked), "output__messages": json.dumps(said),
        }  # fmt: skip
        own = {"operation__name": "invoke_agent", "agent__name": "planner"}
        spans.add(trace_id, agent, "", f"invoke_agent {topic}", start, 900, **own)
        spans.add(trace_id, agent[:-1] + "2", agent, "chat toy", start, 300, **chat)
        own = {"operation__name": "execute_tool", "tool__name": "look_up"}
        spans.add(
            trace_id, agent[:-1] + "3", agent, "execute_tool look_up", start + 300, 200, **own
        )
        spans.add(trace_id, agent[:-1] + "4", agent, "chat toy", start + 500, 300, **chat)
    return [each.SerializeToString() for each in spans.requests], f"{traces - 1:032x}"


def send(server: Server, requests: Sequence[bytes], **headers: str) -> float:
    """Send spans as a sender of OTLP does that may be told to come again; return the seconds."""
    began = time.perf_counter()
    for each in requests:
        while True:
            try:
                server.ask("/v1/traces", each, Content_Type="application/x-protobuf", **headers)
                break
            except OSError:
                if time.perf_counter() - began > 300:
                    raise
                time.sleep(1)
    return time.perf_counter() - began


class Peer(NamedTuple):
    """A viewer: its package, command and settings, and the pages of a small trace."""

    package: str
    command: Sequence[str]
    pages: Callable[[Server, str], dict[str, tuple[str, str]]]
    env: Mapping[str, str] = harness.NO_SETTINGS
    headers: Mapping[str, str] = harness.NO_SETTINGS


def link_of(server: Server) -> str:
    """Return the path of the printed link, with its key."""
    words = [word for word in server.log.read_text().split() if "?key=" in word]
    parts = urlsplit(words[0])
    return f"{parts.path}?{parts.query}"


def our_pages(server: Server, small: str) -> dict[str, tuple[str, str]]:
    return {
        "home": (link_of(server), "planner"),
        "traces": ("/traces", NEEDLE),
        "one trace": (f"/traces/{small}", NEEDLE),
        "big trace": (f"/traces/{BIG}", "big-root"),
    }


def phoenix_pages(server: Server, small: str) -> dict[str, tuple[str, str]]:
    projects = json.loads(server.ask("/v1/projects"))["data"]
    home = next(f"/projects/{each['id']}" for each in projects if each["name"] == "default")
    return {
        "home": ("/projects", "default"),
        "traces": (f"{home}/traces", NEEDLE),
        "one trace": (f"{home}/traces/{small}", NEEDLE),
        "big trace": (f"{home}/traces/{BIG}", "big-root"),
    }


def mlflow_pages(server: Server, small: str) -> dict[str, tuple[str, str]]:
    traces = "/#/experiments/0/traces"
    return {
        "home": ("/", "Default"),
        "traces": (traces, "900ms"),  # the list shows no name of a span
        "one trace": (f"{traces}?selectedEvaluationId=tr-{small}", NEEDLE),
        "big trace": (f"{traces}?selectedEvaluationId=tr-{BIG}", "big-root"),
    }


PEERS = {
    OURS: Peer("", ["-m", "lightning_otel", "ui", "--store", ".", "--port", "{port}"], our_pages),
    "Phoenix": Peer(
        "arize-phoenix==20.26.1", ["phoenix", "serve"], phoenix_pages,
        {"PHOENIX_WORKING_DIR": ".", "PHOENIX_PORT": "{port}", "PHOENIX_TELEMETRY_ENABLED": "0"},
    ),
    "MLflow": Peer(
        "mlflow==3.17.2",
        ["mlflow", "server", "--port", "{port}", "--backend-store-uri", "sqlite:///mlflow.db"],
        mlflow_pages, {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
        {"x_mlflow_experiment_id": "0"},
    ),
}  # fmt: skip


def serve(name: str, folder: str, port: int, env: Path) -> Server:
    """Start a viewer."""
    peer = PEERS[name]
    program = sys.executable
    words = [word.format(port=port) for word in peer.command]
    if peer.package:
        python = harness.environment(env, name.lower(), [peer.package])
        program = str(python.with_name(words.pop(0)))
    settings = {key: value.format(port=port) for key, value in peer.env.items()}
    return Server([program, *words], Path(folder), port, settings)


def look(chromium: Any, url: str, path: str, text: str, first: str) -> dict[str, Any]:
    """Open a page in a new context, after a link that is not counted."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    outside: set[str] = set()

    def guard(route: Any) -> None:
        host = urlsplit(route.request.url).hostname
        if host in ("127.0.0.1", "localhost", None):
            route.continue_()
            return
        outside.add(host)
        route.abort()

    tab = context.new_page()
    if first and first != path:
        tab.goto(url + first)
        found = re.match(r".*/v-[\w-]+(?=/)", tab.url)  # our pages are below a path of their own
        url = found[0] if found else url
    context.route("**/*", guard)
    tab = context.new_page()
    wire = context.new_cdp_session(tab)
    wire.send("Network.enable")
    wire.send("Network.setCacheDisabled", {"cacheDisabled": True})
    weights: list[float] = []
    wire.on("Network.loadingFinished", lambda event: weights.append(event["encodedDataLength"]))
    began = time.perf_counter()
    seconds = None
    try:
        tab.goto(url + path, timeout=LIMIT_S * 1000, wait_until="commit")
        tab.get_by_text(text).first.wait_for(timeout=LIMIT_S * 1000)
        seconds = time.perf_counter() - began
        tab.wait_for_timeout(1000)  # what comes late is weighed, too
    except Exception as exc:
        if type(exc).__name__ != "TimeoutError":
            raise
    context.close()
    return {"seconds": seconds, "kB": sum(weights) / 1000, "outside": sorted(outside)}


def measure_pages(
    server: Server, name: str, small: str, rounds: int, sent_s: float
) -> dict[str, Any]:
    """Return every look at every page, and the facts of the server."""
    from playwright.sync_api import sync_playwright

    pages = PEERS[name].pages(server, small)
    first = pages["home"][0] if "key=" in pages["home"][0] else ""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        # Some store what they took in the background: the last trace that was sent.
        began = time.perf_counter()
        while look(chromium, server.url, *pages["one trace"], first)["seconds"] is None:
            if time.perf_counter() - began > STORED_S:
                break
        shown_s = sent_s + time.perf_counter() - began
        looks = {
            page: [look(chromium, server.url, *where, first) for _ in range(rounds)]
            for page, where in pages.items()
        }
        chromium.close()
    facts = {
        "first answer, s": server.start_s,
        "taking the spans, s": sent_s,
        "until the last trace is shown, s": shown_s,
        "memory, MB": server.memory_mb(),
    }
    return {"pages": looks, "facts": facts}


def show_pages(found: dict[str, dict[str, Any]]) -> None:
    """Print seconds and weight of each page, and the facts of the servers."""

    def seconds(name: str, page: str) -> list[float]:
        return [each["seconds"] or LIMIT_S for each in found[name]["pages"][page]]

    rows, peers = [], [name for name in found if name != OURS]
    for page in ("home", "traces", "one trace", "big trace"):
        best = min((median(seconds(name, page)) for name in peers), default=float("nan"))
        weight = [median(each["kB"] for each in one["pages"][page]) for one in found.values()]
        rows.append(
            [page, *(spread(seconds(name, page), 2) for name in found),
             f"{median(seconds(OURS, page)) / best:.2f}" if OURS in found else "",
             *(f"{kb:,.0f}" for kb in weight)]
        )  # fmt: skip
    title = (
        f"Seconds until a page can be used: median (range; {LIMIT_S:.0f}: never); kB on the wire"
    )
    harness.table(title, ["page", *found, "ours / best peer", *(f"kB {n}" for n in found)], rows)
    facts = next(iter(found.values()))["facts"]
    harness.table(
        "The server", ["", *found],
        [[fact, *(f"{one['facts'][fact]:,.1f}" for one in found.values())] for fact in facts],
    )  # fmt: skip
    for name, one in found.items():
        hosts = {
            host for looks in one["pages"].values() for each in looks for host in each["outside"]
        }
        print(f"{name} asks {', '.join(sorted(hosts)) or 'no other host'}")


def measure_memory(server: Server, small: str, rounds: int) -> dict[str, Any]:
    """Ask for every page in rounds, and print the memory of the server and its children."""
    key = link_of(server).partition("key=")[2]
    found: dict[str, Any] = {"at rest": server.memory_mb()}
    looks: dict[str, list[tuple[float, float, float]]] = {page: [] for page in PAGES}
    for _ in range(rounds):
        for page in PAGES:
            done, most = threading.Event(), [0.0]

            def watch(done: threading.Event = done, most: list[float] = most) -> None:
                while not done.wait(0.004):
                    most[0] = max(most[0], server.memory_mb())

            watcher = threading.Thread(target=watch)
            watcher.start()
            began = time.perf_counter()
            path = page.format(small=small, big=BIG)
            server.ask(path, Authorization=f"Bearer {key}", Accept="text/html")
            seconds = time.perf_counter() - began
            done.set()
            watcher.join()
            looks[page].append((seconds, server.memory_mb(), most[0]))
    found["after all pages"] = server.memory_mb()
    harness.table(
        "Each page: seconds, MB after it, most MB meanwhile; median (range)",
        ["page", "s", "MB after", "MB most"],
        [
            [page, *(spread(list(each), 2) for each in zip(*one, strict=True))]
            for page, one in looks.items()
        ],
    )
    harness.table("The server", ["", "MB"], [(name, f"{mb:.0f}") for name, mb in found.items()])
    return {**found, "pages": looks}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--memory", action="store_true", help="our server's memory by page")
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--big", type=int, default=32_844, help="spans of the long trace")
    options = parser.parse_args()
    rounds = 3
    if options.quick:
        options.traces, options.big, rounds = 200, 5000, 1
    requests, small = recorded(options.traces, options.big)
    figures: dict[str, Any] = {}
    for number, name in enumerate([OURS] if options.memory else options.only or PEERS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            server = serve(name, folder, 43_180 + number, options.env)
            try:
                harness.say(f"{name} answers after {server.start_s:.1f} s")
                sent_s = send(server, requests, **PEERS[name].headers)
                if options.memory:
                    figures = measure_memory(server, small, rounds)
                else:
                    figures[name] = measure_pages(server, name, small, rounds, sent_s)
            finally:
                server.end()
    if not options.memory:
        show_pages(figures)
    harness.finish(options, figures, "lightning-otel")


if __name__ == "__main__":
    main()

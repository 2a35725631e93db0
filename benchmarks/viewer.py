"""The viewer beside Phoenix and MLflow: time and weight of each page, and the server's memory."""

import contextlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import harness
from harness import OURS, Server, spread

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
PER_REQUEST = 500
LIMIT_S, STORED_S = 60.0, 240.0
NEEDLE = "needle-in-one-trace"
BIG = f"{0xB16:032x}"
PAGES = (
    "/", "/home/curve", "/home/funnel", "/traces", "/traces?text=needle", "/traces/{small}",
    "/traces/{small}?tab=chat", "/traces/{big}", "/traces/{big}?tab=waterfall",
    "/traces/{big}?tab=chat", "/traces/{big}/rows?first=15000", "/transitions",
    "/transitions/export", "/rollouts",
    "/rollouts/{small}", "/resources", "/runs", "/sql/columns",
    "/sql?q=SELECT+name,+count(*)+FROM+spans+GROUP+BY+1+LIMIT+5", "/settings",
)  # fmt: skip


def recorded(traces: int, big: int) -> tuple[list[bytes], str]:
    spans, now = harness.Requests(PER_REQUEST), time.time_ns()

    def add(trace: str, span: str, parent: str, name: str, at_ns: int, ms: int, **own: Any) -> None:
        ids = map(bytes.fromhex, (trace, span, parent))
        own = {f"gen_ai.{key}": value for key, value in own.items()}
        spans.add(name, (at_ns, at_ns + ms * 1_000_000), *ids, kind=1, **own)

    # The long trace goes first: the newest are the small ones, as lists show them.
    root, hour_ago = "b000000000000000", now - 3_600_000_000_000
    add(BIG, root, "", "invoke_workflow big-root", hour_ago, 600_000)
    tool = {"operation__name": "execute_tool"}
    for number in range(1, big):
        step, at = (number - 1) // 5 * 5 + 1, hour_ago + number * 1_000_000
        parent, name, own = f"b{step:015x}", f"execute_tool tool-{number}", tool
        if number == step:
            parent, name, own = root, f"step-{step}", {}
        add(BIG, f"b{number:015x}", parent, name, at, 5, **own)
    for number in range(traces):
        trace, agent = f"{number + 1:032x}", f"{number + 1:08x}0000000"
        topic = NEEDLE if number == traces - 2 else f"question {number}"
        start = now - (traces - number) * 1_000_000_000
        chat = {
            "operation__name": "chat", "provider__name": "openai", "request__model": "toy",
            "response__model": "toy", "usage__input_tokens": 700, "usage__output_tokens": 3,
            "input__messages": harness.messages(("user", f"{topic} " + "x " * 700)),
            "output__messages": harness.messages(("assistant", f"answer {number}")),
        }  # fmt: skip
        planner = {"operation__name": "invoke_agent", "agent__name": "planner"}
        look_up = {**tool, "tool__name": "look_up"}
        add(trace, agent + "1", "", f"invoke_agent {topic}", start, 900, **planner)
        for place, name, after, ms, own in (
            ("2", "chat toy", 0, 300, chat), ("3", "execute_tool look_up", 300, 200, look_up),
            ("4", "chat toy", 500, 300, chat),
        ):  # fmt: skip
            add(trace, agent + place, agent + "1", name, start + after, ms, **own)
    return [each.SerializeToString() for each in spans.made], f"{traces - 1:032x}"


def send(server: Server, requests: Sequence[bytes], **headers: str) -> float:
    began, waiting = time.perf_counter(), list(requests)
    while waiting:
        try:
            server.ask("/v1/traces", waiting[0], Content_Type="application/x-protobuf", **headers)
            del waiting[0]
        except OSError:
            if time.perf_counter() - began > 300:
                raise
            time.sleep(1)
    return time.perf_counter() - began


def link_of(server: Server) -> str:
    key_file = server.log.read_text().partition("the key in ")[2].partition("\n")[0]
    return f"/?key={Path(key_file).read_text().strip()}"


def project_of(server: Server) -> str:
    projects = json.loads(server.ask("/v1/projects"))["data"]
    return next(f"/projects/{each['id']}" for each in projects if each["name"] == "default")


class Peer(NamedTuple):
    package: str
    command: Sequence[str]
    pages: Mapping[str, tuple[str, str]]
    find: Callable[[Server], str] = lambda server: ""
    env: Mapping[str, str] = MappingProxyType({})
    headers: Mapping[str, str] = MappingProxyType({})


PEERS = {
    OURS: Peer(
        "", [sys.executable, "-m", "lightning_otel", "ui", "--store", ".", "--port", "{port}"],
        {
            "home": ("{found}", "planner"), "traces": ("/traces", NEEDLE),
            "one trace": ("/traces/{small}", NEEDLE), "big trace": ("/traces/{big}", "big-root"),
        }, link_of,
    ),
    "Phoenix": Peer(
        "arize-phoenix==20.26.1", ["phoenix", "serve"],
        {
            "home": ("/projects", "default"), "traces": ("{found}/traces", NEEDLE),
            "one trace": ("{found}/traces/{small}", NEEDLE),
            "big trace": ("{found}/traces/{big}", "big-root"),
        }, project_of,
        {
            "PHOENIX_WORKING_DIR": ".", "PHOENIX_PORT": "{port}",
            "PHOENIX_TELEMETRY_ENABLED": "false",
        },
    ),
    "MLflow": Peer(
        "mlflow==3.17.2",
        ["mlflow", "server", "--port", "{port}", "--backend-store-uri", "sqlite:///mlflow.db"],
        {
            "home": ("/", "Default"),
            "traces": ("/#/experiments/0/traces", "900ms"),  # the list shows no name of a span
            "one trace": ("/#/experiments/0/traces?selectedEvaluationId=tr-{small}", NEEDLE),
            "big trace": ("/#/experiments/0/traces?selectedEvaluationId=tr-{big}", "big-root"),
        },
        env={"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
        headers={"x_mlflow_experiment_id": "0"},
    ),
}  # fmt: skip


def serve(name: str, port: int, env: Path) -> Server:
    peer = PEERS[name]
    words = [word.format(port=port) for word in peer.command]
    if peer.package:
        python = harness.environment(env, name.lower(), [peer.package])
        words[0] = str(python.with_name(words[0]))
    settings = {key: value.format(port=port) for key, value in peer.env.items()}
    return Server(words, port, settings)


def look(chromium: Any, url: str, first: str, path: str, text: str) -> dict[str, Any]:
    from playwright.sync_api import TimeoutError

    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    outside, weights = set[str](), list[float]()

    def guard(route: Any) -> None:
        host = urlsplit(route.request.url).hostname
        if host in ("127.0.0.1", "localhost", None):
            return route.continue_()
        outside.add(host)
        return route.abort()

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
    wire.on("Network.loadingFinished", lambda event: weights.append(event["encodedDataLength"]))
    began, seconds = time.perf_counter(), None
    with contextlib.suppress(TimeoutError):
        tab.goto(url + path, timeout=LIMIT_S * 1000, wait_until="commit")
        tab.get_by_text(text).first.wait_for(timeout=LIMIT_S * 1000)
        seconds = time.perf_counter() - began
        tab.wait_for_timeout(1000)  # what comes late is weighed, too
    context.close()
    return {"seconds": seconds, "kB": sum(weights) / 1000, "hosts": sorted(outside)}


def measure_pages(server: Server, name: str, small: str, rounds: int, sent_s: float) -> Any:
    from playwright.sync_api import sync_playwright

    peer = PEERS[name]
    names = {"small": small, "big": BIG, "found": peer.find(server)}
    pages = {page: (path.format(**names), text) for page, (path, text) in peer.pages.items()}
    first = pages["home"][0] if "key=" in pages["home"][0] else ""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        open_page = partial(look, chromium, server.url, first)
        # Some store what they took in the background: the last trace that was sent.
        began = time.perf_counter()
        while open_page(*pages["one trace"])["seconds"] is None:
            if time.perf_counter() - began > STORED_S:
                break
        shown_s = sent_s + time.perf_counter() - began
        looks = {page: [open_page(*each) for _ in range(rounds)] for page, each in pages.items()}
        chromium.close()
    facts = {
        "first answer, s": server.start_s, "taking the spans, s": sent_s,
        "until the last trace is shown, s": shown_s, "memory, MB": server.memory_mb(),
    }  # fmt: skip
    return {"pages": looks, "facts": facts}


def show_pages(found: dict[str, dict[str, Any]]) -> None:
    rows = []
    for page in PEERS[OURS].pages:
        looks = {name: one["pages"][page] for name, one in found.items()}
        took = {name: [each["seconds"] or LIMIT_S for each in some] for name, some in looks.items()}
        weight = [median(each["kB"] for each in some) for some in looks.values()]
        ratio = harness.by_best(took, found.keys() - {OURS})
        spreads = [spread(each, 2) for each in took.values()]
        rows.append([page, *spreads, ratio, *(f"{kb:,.0f}" for kb in weight)])
    head = ["page", *found, "ours / best peer", *(f"kB {name}" for name in found)]
    never = f"median (range; {LIMIT_S:.0f}: never)"
    harness.table(f"Seconds until a page can be used: {never}; kB on the wire", head, rows)
    facts = next(iter(found.values()))["facts"]
    rows = [[fact, *(f"{one['facts'][fact]:,.1f}" for one in found.values())] for fact in facts]
    harness.table("The server", ["", *found], rows)
    for name, one in found.items():
        hosts = {host for some in one["pages"].values() for each in some for host in each["hosts"]}
        print(f"{name} asks {', '.join(sorted(hosts)) or 'no other host'}")


def measure_memory(server: Server, small: str, rounds: int) -> dict[str, Any]:
    key = link_of(server).partition("key=")[2]
    found: dict[str, Any] = {"at rest": server.memory_mb()}
    looks: dict[str, list[tuple[float, float, float]]] = {page: [] for page in PAGES}
    for _ in range(rounds):
        for page in PAGES:
            most, path = 0.0, page.format(small=small, big=BIG)
            headers = {"Authorization": f"Bearer {key}", "Accept": "text/html"}
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(harness.cost_of, partial(server.ask, path, **headers))
                while not asking.done():
                    most = max(most, server.memory_mb())
                    time.sleep(0.004)
            looks[page].append((asking.result()[0], server.memory_mb(), most))
    found["after all pages"] = server.memory_mb()
    rows = [
        [page, *(spread(each, 2) for each in zip(*one, strict=True))] for page, one in looks.items()
    ]
    head = ["page", "s", "MB after", "MB most"]
    harness.table("Each page, with most MB meanwhile: median (range)", head, rows)
    harness.table("The server", ["", "MB"], [(name, f"{mb:.0f}") for name, mb in found.items()])
    return {**found, "pages": looks}


def main(options: Any) -> None:
    traces, big, rounds = (200, 5000, 1) if options.quick else (2000, 32_844, 3)
    requests, small = recorded(traces, big)
    figures: dict[str, Any] = {}
    for number, name in enumerate([OURS] if options.memory else options.only or PEERS):
        with serve(name, 43_180 + number, options.env) as server:
            harness.say(f"{name} answers after {server.start_s:.1f} s")
            sent_s = send(server, requests, **PEERS[name].headers)
            if options.memory:
                figures = measure_memory(server, small, rounds)
            else:
                figures[name] = measure_pages(server, name, small, rounds, sent_s)
    if not options.memory:
        show_pages(figures)
    harness.finish(options, figures, "lightning-otel")


if __name__ == "__main__":
    memory = {"action": "store_true", "help": "our server's memory by page, while and after it"}
    harness.run(main, memory=memory)

"""Runs an example as it is and recorded, and says everything that is not as it should be."""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.examples import facts
from tests.examples.programs import Program

from lightning_otel import Store, TripletAdapter
from lightning_otel import conventions as c
from lightning_otel.adapter.tree import build
from lightning_otel.demo.policy import ToyPolicy
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.types import Report, Span

LIMIT_S = 100
SETTINGS = {
    "OPENAI_API_KEY": "none",
    "PYTHONHASHSEED": "0",
    # Counts of users that go elsewhere, and tables that come from elsewhere.
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TESTING": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}
OURS = ("OTEL_", "LIGHTNING_OTEL", "OPENAI_")
OWN_HEADERS = ("idempotency-key", "host", "x-stainless-read-timeout")
"""Headers that are drawn at random for each request, or name the server's port."""
_MADE_UP = re.compile(r"(?:resp|msg|fc|rs|chatcmpl|call)[-_][0-9a-f]{24,32}")
"""Ids that a server draws, which come back to it in the next request."""
_MOST_SHOWN = 700


@dataclass(frozen=True, slots=True)
class Host:
    """What a program did that anybody can see.

    Attributes:
        log: What the server was asked.
    """

    code: int
    out: str
    err: str
    log: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A program's recorded run."""

    host: Host
    spans: Sequence[Span]
    report: Report
    in_views: tuple[int, int]
    """How many calls the views ``calls`` and ``rollouts`` tell of."""

    @property
    def calls(self) -> list[Span]:
        """Every span that is a request to a model."""
        return [span for span in self.spans if span.operation in c.CALL_OPERATIONS]

    @property
    def tools(self) -> list[Span]:
        """Every span that is an execution of a tool."""
        return [span for span in self.spans if span.operation == c.EXECUTE_TOOL]

    @property
    def requests(self) -> list[Exchange]:
        """The server's log, one entry a request."""
        return facts.final_exchanges(self.host.log)

    @property
    def orphans(self) -> list[Span]:
        """Spans whose parent was not kept."""
        known = {span.span_id for span in self.spans}
        return [s for s in self.spans if s.parent_span_id and s.parent_span_id not in known]

    @property
    def doubles(self) -> int:
        """How many call spans there are for a request that has one already."""
        ids = Counter(span.attributes.get(c.RESPONSE_ID) for span in self.calls)
        return sum(count - 1 for response_id, count in ids.items() if response_id)

    def agents_of(self, spans: Iterable[Span]) -> list[str]:
        """The agent each span belongs to."""
        tree = build(self.spans)
        names = {span.span_id: tree.agents[i] for i, span in enumerate(tree.spans)}
        return [names[span.span_id] for span in spans]


def run(
    program: Program,
    folder: Path,
    within: Sequence[str] = (),
    recorder: Sequence[str] = (),
    **environment: str,
) -> Host:
    """Run a program against a server of its own, which answers the same each time.

    Args:
        program: What to run.
        folder: Where it runs.
        within: A Python program and its arguments which run it.
        recorder: The command line that runs the whole.
        **environment: Variables it gets besides.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    # Slow enough that a client which leaves a stream is gone before the server has sent it all.
    with DemoServer(ToyPolicy({"copy": 100.0}), chunk_delay_s=0.002) as server:
        done = subprocess.run(
            [*recorder, sys.executable, *within, str(program.path)],
            cwd=folder,
            env={**kept, **SETTINGS, "OPENAI_BASE_URL": server.base_url, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        with contextlib.suppress(TimeoutError):  # a stream that was left is known a moment later
            server.wait_for_log(sum(program.agents.values()), timeout_s=1.0)
        return Host(done.returncode, done.stdout, done.stderr, tuple(server.log))


def record(program: Program, folder: Path, within: Sequence[str] = ()) -> Recorded:
    """Run it under ``lightning-otel run``.

    Args:
        program: What to run.
        folder: Where it runs; its store is there too.
        within: A Python program and its arguments which run it.
    """
    path = folder / "traces.duckdb"
    ours = (sys.executable, "-m", "lightning_otel", "run", "--quiet", "--store", str(path))
    return recorded_in(path, run(program, folder, within, [*ours, "--"]))


def recorded_in(path: Path, host: Host) -> Recorded:
    """A program's run with what a store holds of it, if its file is there."""
    store = Store(path)
    if not path.exists():
        return Recorded(host, [], TripletAdapter().explain([]).report, (0, 0))
    spans = store.spans().rows()
    (counted,) = store.sql(
        "SELECT (SELECT count(*) FROM calls) AS calls, "
        "(SELECT sum(calls)::BIGINT FROM rollouts) AS in_rollouts"
    ).rows()
    in_views = counted["calls"], counted["in_rollouts"]
    return Recorded(host, spans, TripletAdapter().explain(spans).report, in_views)


def run_both(program: Program, folder: Path, within: Sequence[str] = ()) -> tuple[Host, Recorded]:
    """Run it as it is and recorded, at the same time, in folders of their own."""
    places = folder / "plain", folder / "recorded"
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(run, program, places[0], within)
        recorded = pool.submit(record, program, places[1], within)
        return plain.result(), recorded.result()


def problems(program: Program, plain: Host, recorded: Recorded) -> list[str]:
    """Everything that is not as it should be, in words."""
    return [
        *host_problems(plain, recorded.host),
        *call_problems(recorded),
        *_tree_problems(recorded),
        *structure_problems(program, recorded),
        *transition_problems(recorded),
        *view_problems(recorded),
        *_unshown(program, recorded),
    ]


def host_problems(plain: Host, host: Host, own_headers: Sequence[str] = OWN_HEADERS) -> list[str]:
    """Wherein anybody can see that the program was recorded."""
    found = []
    if plain.code != 0:
        found.append(f"the program fails by itself: {plain.err[-2000:]}")
    for what in ("code", "out", "err"):
        before, after = getattr(plain, what), getattr(host, what)
        if before != after:
            found.append(f"{what} differs: {before!r} by itself, {after!r} recorded")
    before, after = (
        Counter(_sent(exchange, own_headers) for exchange in each.log) for each in (plain, host)
    )
    found += [f"sent only by itself: {each[-_MOST_SHOWN:]}" for each in before - after]
    found += [f"sent only when recorded: {each[-_MOST_SHOWN:]}" for each in after - before]
    return found


def _sent(exchange: Exchange, own_headers: Sequence[str]) -> str:
    """A request as it was sent, byte for byte but for what is drawn at random."""
    headers = {name: text for name, text in exchange.headers.items() if name not in own_headers}
    return _MADE_UP.sub("ID", json.dumps([exchange.path, exchange.request, headers]))


def call_problems(recorded: Recorded) -> list[str]:
    """Requests without a span, spans without a request, and wherein they differ."""
    wanted = [facts.of_exchange(exchange) for exchange in recorded.requests]
    told = [facts.of_span(span) for span in recorded.calls]
    lost, more = _without(wanted, told), _without(told, wanted)
    found = []
    for one in lost:
        other = next((each for each in more if each["response id"] == one["response id"]), None)
        if other is None:
            found.append(f"lost: no span for {_short(one)}")
            continue
        more.remove(other)
        found += [
            f"call {one['response id']}: {key} is {other[key]!r}, the server says {one[key]!r}"
            for key in one
            if one[key] != other[key]
        ]
    found += [f"doubled or made up: {_short(one)}" for one in more]
    return found


def _without(one: list[facts.Facts], other: list[facts.Facts]) -> list[facts.Facts]:
    rest = list(other)
    found = []
    for each in one:
        if each in rest:
            rest.remove(each)
        else:
            found.append(each)
    return found


def _short(one: Mapping[str, Any]) -> str:
    return json.dumps(one)[:_MOST_SHOWN]


def _tree_problems(recorded: Recorded) -> list[str]:
    spans = recorded.spans
    found = [f"orphan: {span.name} ({span.scope})" for span in recorded.orphans]
    found += [f"never ended: {span.name}" for span in spans if span.is_incomplete]
    wholes = {
        "root": [span.name for span in spans if not span.parent_span_id],
        "trace": sorted({span.trace_id for span in spans}),
        "rollout": sorted({span.rollout_id for span in spans}),
    }
    found += [f"{len(all_)} {what}s: {all_}" for what, all_ in wholes.items() if len(all_) != 1]
    twice = [one for one, count in Counter(span.span_id for span in spans).items() if count > 1]
    return found + [f"stored twice: {span_id}" for span_id in twice]


def structure_problems(program: Program, recorded: Recorded) -> list[str]:
    """Calls and tools that are not of the agent they should be of, or lack their facts."""
    found = []
    agents = Counter(recorded.agents_of(recorded.calls))
    if agents != Counter(program.agents):
        found.append(f"calls by agent: {dict(agents)}, expected {dict(program.agents)}")
    names = [str(span.attributes.get(c.TOOL_NAME)) for span in recorded.tools]
    tools = Counter(zip(recorded.agents_of(recorded.tools), names, strict=True))
    if tools != Counter(program.tools):
        found.append(f"tools by agent: {dict(tools)}, expected {dict(program.tools)}")
    asked = _calls_asked_for(recorded.requests)
    for span in recorded.tools:
        get = span.attributes.get
        if get(c.TOOL_ARGUMENTS) is None:
            found.append(f"{span.name} has no arguments")
        if (get(c.TOOL_RESULT) is None) != (span.status == "ERROR"):
            found.append(f"{span.name} is {span.status}, its result {get(c.TOOL_RESULT)!r}")
        if get(c.TOOL_CALL_ID) is not None and get(c.TOOL_CALL_ID) not in asked:
            found.append(f"{span.name}: no model asked for the call {get(c.TOOL_CALL_ID)}")
    return found


def _calls_asked_for(exchanges: Iterable[Exchange]) -> set[str]:
    """The ids of all tool calls in the server's answers."""
    answers = [facts.of_exchange(exchange)["answered"] or [] for exchange in exchanges]
    return {part[1] for parts in answers for each in parts for part in each if part[0] == "call"}


def transition_problems(recorded: Recorded) -> list[str]:
    """Whether each answer that came to its end is one transition."""
    wanted = sum(map(facts.is_generative, recorded.requests))
    report = recorded.report
    if report.transitions == wanted:
        return []
    return [f"{report.transitions} transitions, expected {wanted}; dropped: {report.reasons()}"]


def view_problems(recorded: Recorded) -> list[str]:
    """Whether each request is one call to whoever asks in SQL."""
    wanted = len(recorded.requests)
    if recorded.in_views == (wanted, wanted):
        return []
    return [f"{recorded.in_views} calls in the views, expected {wanted}"]


def _unshown(program: Program, recorded: Recorded) -> list[str]:
    """Columns of the matrix that the program stands for and does not show."""
    seen = [facts.of_exchange(exchange) for exchange in recorded.requests]
    has_calls = any(_calls_asked_for(recorded.requests))
    tree = ast.parse(program.path.read_text())
    shown = {
        "call": any(one["answered"] for one in seen),
        # Who calls tools by hand has no span for them, but the model's request is in its action.
        "tools": bool(program.tools) or ("" in program.agents and has_calls),
        "stream": any(one["is stream"] and not one["is left"] for one in seen),
        "async": any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree)),
        "agent": any(program.agents),
        "token ids": recorded.report.exact > 0,
    }
    return [f"does not show: {column}" for column in program.shows if not shown[column]]

"""Runs an example as it is and recorded, and says everything that is not as it should be."""

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import facts
from tests.examples.policy import FrameworkPolicy
from tests.examples.programs import Program

from lightning_otel import Store, TripletAdapter
from lightning_otel.adapter.tree import build_tree
from lightning_otel.demo.server import DemoServer, LogEntry
from lightning_otel.types import Report, Span
from lightning_otel.types import conventions as c

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
_MOST_SHOWN = 700


@dataclass(frozen=True, slots=True)
class Host:
    """What a program did that anybody can see."""

    code: int
    out: str
    err: str
    log: tuple[LogEntry, ...]


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
        return [span for span in self.spans if span.operation in c.CALL_OPERATIONS]

    @property
    def tools(self) -> list[Span]:
        return [span for span in self.spans if span.operation == c.EXECUTE_TOOL]

    @property
    def requests(self) -> list[LogEntry]:
        """The server's log without what the client itself repeated: one entry a request."""
        found: list[LogEntry] = []
        for exchange in self.host.log:
            if int(exchange.headers.get("x-stainless-retry-count", 0)):
                tried = [each for each in found if each.request == exchange.request]
                found.remove(next(each for each in reversed(tried) if each.status != 200))
            found.append(exchange)
        return found

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
        tree = build_tree(self.spans)
        names = {span.span_id: tree.agents[i] for i, span in enumerate(tree.spans)}
        return [names[span.span_id] for span in spans]


def run(
    program: Program,
    folder: Path,
    within: Sequence[str] = (),
    recorder: Sequence[str] = (),
    **environment: str,
) -> Host:
    """Run a program against a server of its own, which answers the same each time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    # Slow enough that a client which leaves a stream is gone before the server has sent it all.
    with DemoServer(FrameworkPolicy({"copy": 100.0}), chunk_delay_s=0.002) as server:
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


def record(program: Program, folder: Path) -> Recorded:
    """Run it under ``lightning-otel run``, with a store in the folder."""
    path = folder / "traces.duckdb"
    ours = (sys.executable, "-m", "lightning_otel", "run", "--quiet", "--store", str(path))
    return recorded_in(path, run(program, folder, recorder=[*ours, "--"]))


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


def run_both(program: Program, folder: Path) -> tuple[Host, Recorded]:
    """Run it as it is and recorded, at the same time, in folders of their own."""
    places = folder / "plain", folder / "recorded"
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(run, program, places[0])
        recorded = pool.submit(record, program, places[1])
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


def host_problems(plain: Host, host: Host) -> list[str]:
    """Wherein anybody can see that the program was recorded."""
    found = []
    if plain.code != 0:
        found.append(f"the program fails by itself: {plain.err[-2000:]}")
    for what in ("code", "out", "err"):
        before, after = getattr(plain, what), getattr(host, what)
        if before != after:
            found.append(f"{what} differs: {before!r} by itself, {after!r} recorded")
    before, after = (Counter(map(facts.sent, each.log)) for each in (plain, host))
    found += [f"sent only by itself: {each[-_MOST_SHOWN:]}" for each in before - after]
    found += [f"sent only when recorded: {each[-_MOST_SHOWN:]}" for each in after - before]
    return found


def call_problems(recorded: Recorded) -> list[str]:
    """Requests without a span, spans without a request, and wherein they differ."""
    found, spans = [], list(recorded.calls)
    for exchange in recorded.requests:
        response_id = exchange.response_id if exchange.status == 200 else None
        fitting = [s for s in spans if s.attributes.get(c.RESPONSE_ID) == response_id]
        if not fitting:
            found.append(f"lost: no span for {exchange.path} {exchange.request}"[:_MOST_SHOWN])
            continue
        span, wrong = min(
            ((span, _wrong_facts(span, exchange)) for span in fitting),
            key=lambda each: len(each[1]),
        )
        spans.remove(span)
        found += [f"call {response_id}: {key} is {each[0]!r}, the server says {each[1]!r}"
                  for key, each in wrong.items()]  # fmt: skip
    return found + [f"doubled or made up: {span.name} {span.attributes}" for span in spans]


def _wrong_facts(span: Span, exchange: LogEntry) -> dict[str, tuple[Any, Any]]:
    """What the span says otherwise than the server; whose call it is, the server cannot know."""
    get = span.attributes.get
    wrong = facts.differences(span, exchange)
    for key in (c.PROVIDER, c.AGENT_NAME, c.CONVERSATION_ID, c.OUTPUT_TYPE):
        wrong.pop(key, None)
    has_failed = exchange.status != 200
    if has_failed or exchange.client_gone:  # of the answer under way then, nobody can tell
        sent = (c.INPUT_MESSAGES, c.TOOL_DEFINITIONS, *facts.REQUEST_KEYS.values())
        wrong = {key: wrong[key] for key in sent if key in wrong}
    else:
        wrong.pop(c.ERROR_TYPE, None)  # an answer that came to its end may have failed to validate
    # What came to its end and failed, failed to validate.
    is_failed = span.status == "ERROR" and not get(c.FINISH_REASONS)
    states = {"has failed": (is_failed, has_failed),
              "is left": (bool(get(c.ABANDONED)), exchange.client_gone)}  # fmt: skip
    return wrong | {name: each for name, each in states.items() if each[0] != each[1]}


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


def _calls_asked_for(exchanges: Iterable[LogEntry]) -> set[str]:
    """The ids of all tool calls in the server's answers."""
    answers = [facts.content(each).get(c.OUTPUT_MESSAGES, "[]") for each in exchanges]
    messages = [message for answer in answers for message in json.loads(answer)]
    return {part.get("id") for message in messages for part in message["parts"]} - {None}


def transition_problems(recorded: Recorded) -> list[str]:
    """Whether each answer that came to its end is one transition."""
    wanted = sum(
        facts.OPERATIONS[facts.endpoint(each)] in c.GENERATIVE_OPERATIONS
        and each.status == 200
        and not each.client_gone
        for each in recorded.requests
    )
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
    seen = [each for each in recorded.requests if each.status == 200]
    has_calls = any(_calls_asked_for(recorded.requests))
    tree = ast.parse(program.path.read_text())
    shown = {
        "call": bool(seen),
        # Who calls tools by hand has no span for them, but the model's request is in its action.
        "tools": bool(program.tools) or ("" in program.agents and has_calls),
        "stream": any(each.is_stream and not each.client_gone for each in seen),
        "async": any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree)),
        "agent": any(program.agents),
        "token ids": recorded.report.exact > 0,
    }
    return [f"does not show: {column}" for column in program.shows if not shown[column]]

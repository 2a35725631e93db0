"""Failures and breakdowns: one fault once, and the same numbers by SQL, Python and command line."""

import contextlib
import json
import math
import statistics
import time
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.command import invoke
from tests.viewer.failing import make_rollout
from tests.viewer.spans import span

from lightning_otel import ConfigError, Store, auto_trace, operation
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

HOUR_NS = 3600 * 10**9
FAULTS = ("", "search", "", "run_python", "", "search", "", "", "run_python", "", "", "search")
"""The tool that fails in each rollout; every fifth rollout survives that."""
SECRET = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH"
TOOL = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "look_up"}


@pytest.fixture
def made(store: Store) -> Store:
    """Twenty-four rollouts of three agents, an hour apart, the last of them an hour ago."""
    for rank in range(24):
        start_ns, fault = time.time_ns() - (24 - rank) * HOUR_NS, FAULTS[rank % 12]
        store.add(make_rollout(rank, start_ns, fault, survives=rank % 5 == 0))
    return store


def failed(number: int, parent: int | None, words: str = "", kind: str = "", **keys: str) -> Span:
    """A span that failed; the first one is a rollout's own."""
    attributes = {**keys, **({c.ERROR_TYPE: kind} if kind else {})}
    name = c.SPAN_ROLLOUT if number == 1 else f"work {number}"
    told = {"status": "ERROR", "status_message": words, "attributes": attributes}
    return span(number, parent, name=name, **told)


TREES = {
    # Spans, and of each failure its span, type, tool and whether the rollout failed of it.
    "through all": (
        [failed(1, None, "no 7", "KeyError"), failed(2, 1, "no 7", "KeyError"),
         failed(3, 2, "no 7", "KeyError", **TOOL)],
        [(3, "KeyError", "look_up", True)],
    ),
    "in other words": (
        [failed(1, None, "the agent failed: no 7", "AgentError"), failed(2, 1, "no 7", "KeyError")],
        [(2, "KeyError", None, True)],
    ),
    "below a tool": (
        [failed(1, None, "refused", "E"), failed(2, 1, "refused", "E", **TOOL),
         failed(3, 2, "refused", "E")],
        [(3, "E", "look_up", True)],
    ),
    "in the SDK's words": (
        [failed(1, None, "no 7", "app.Lost"), failed(2, 1, "Lost: no 7", "app.Lost", **TOOL)],
        [(2, "app.Lost", "look_up", True)],
    ),
    "survived, then another": (
        [failed(1, None, "no 8", "KeyError"), failed(2, 1, "timed out", "TimeoutError")],
        [(1, "KeyError", None, True), (2, "TimeoutError", None, False)],
    ),
    "tried again in vain": (
        [failed(1, None, "no 7", "E"), failed(2, 1, "no 7", "E"), failed(3, 1, "no 7", "E")],
        [(2, "E", None, False), (3, "E", None, True)],
    ),
    "nothing told": ([failed(1, None), failed(2, 1)], [(2, "error", None, True)]),
    "no rollout's span": ([failed(2, None, "x", "E")], [(2, "E", None, None)]),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_a_fault_counts_once_where_it_arose(case: str, store: Store) -> None:
    """An exception passes through tool, agent and root; the rollout tells the reason of its end."""
    spans, expected = TREES[case]
    store.add(spans)

    rows = list(store.sql("FROM failures ORDER BY start_ns"))
    (rollout,) = store.rollouts()

    names = ("span_id", "error_type", "tool", "is_fatal")
    told = [tuple(row[name] for name in names) for row in rows]
    reason = next((row for row in rows if row["is_fatal"]), rows[0])
    assert told == [(f"{number:016x}", *more) for number, *more in expected]
    for name in ("error_type", "error_message"):
        assert rollout[name] == reason[name]
    assert not (reason["error_message"] or "").startswith("Lost")


@pytest.mark.parametrize(
    ("by", "acts"),
    [("tool", "SELECT *, error_type IS NOT NULL AS is_bad FROM tools"),
     ("model", "SELECT *, model AS name, status = 'ERROR' AS is_bad FROM calls")],
)  # fmt: skip
def test_a_breakdown_counts_as_python_does(by: str, acts: str, made: Store) -> None:
    """Rewards of rollouts with their interval; errors and latency of calls and executions."""
    query = f"SELECT name, rollout_id, duration_ms, is_bad, rollouts.reward FROM ({acts}) AS acts"
    rows = list(made.sql(f"{query} JOIN rollouts USING (rollout_id)"))

    told = {row["name"]: row for row in made.breakdown(by)}

    assert told.keys() == {row["name"] for row in rows}
    for name, row in told.items():
        mine = [each for each in rows if each["name"] == name]
        rewards = {each["rollout_id"]: each["reward"] for each in mine}
        values = [value for value in rewards.values() if value is not None]
        expected = {
            "rollouts": len(rewards), "rewarded": len(values), "uses": len(mine),
            "reward": statistics.mean(values), "p50_s": statistics.median(
                each["duration_ms"] / 1e3 for each in mine),
            "margin": 1.96 * statistics.stdev(values) / math.sqrt(len(values)),
            "error_rate": statistics.mean(each["is_bad"] for each in mine),
        }  # fmt: skip
        assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_agents_and_versions_are_told_by_their_attempts(made: Store) -> None:
    """An agent fails where a rollout failed in it, a version where its rollout did."""
    agents, versions = (list(made.breakdown(by)) for by in ("agent", "version"))

    def count(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
        return {row["name"]: (row["uses"], round(row["error_rate"] * row["uses"])) for row in rows}

    # Ranks 5, 15 and 20 survive; the coder acts only where the researcher did not fail.
    assert count(agents) == {"planner": (24, 0), "researcher": (24, 5), "coder": (19, 2)}
    assert sum(failures for _, failures in count(versions).values()) == 7
    assert {row["name"]: row["rollouts"] for row in versions} == {
        "prompt@1": 8, "prompt@2": 8, "prompt@3": 8}  # fmt: skip
    for name in ("tokens", "cost"):
        sums = [sum(row[name] for row in rows) for rows in (agents, versions)]
        assert sums[0] == pytest.approx(sums[1])
        assert sums[0] > 0


@pytest.mark.parametrize("by", ["agent", "model", "version", "tool"])
def test_every_door_tells_the_same(by: str, made: Store) -> None:
    """SQL, Python and the command line; a time leaves out what began before."""
    query = f"FROM breakdown WHERE dimension = '{by}' ORDER BY rollouts DESC, uses DESC, name"
    whole, late = (
        json.loads(invoke("stats", "--by", by, *more, "--json", "--store", made.name).stdout)
        for more in ((), ("--since", "6h"))
    )

    assert list(made.sql(query)) == list(made.breakdown(by)) == whole
    assert 0 < max(row["rollouts"] for row in late) <= 6


def test_failures_are_listed_by_filters(made: Store) -> None:
    """With type, tool, agent, model and rollout; the list of failed rollouts has the reason."""
    timeouts, fatal, rollouts = (
        json.loads(invoke("ls", *words.split(), "--json", "--store", made.name).stdout)
        for words in ("failures --tool search", "failures --fatal --all", "--status failed")
    )  # fmt: skip

    assert [row["rollout_id"][-2:] for row in timeouts] == ["23", "17", "13", "11", "05", "01"]
    assert {(row["error_type"], row["agent"], row["model"]) for row in timeouts} == {
        ("httpx.ReadTimeout", "researcher", "gpt-4o-mini")
    }  # fmt: skip
    ends = [{(row["rollout_id"], row["error_type"]) for row in rows} for rows in (fatal, rollouts)]
    assert ends[0] == ends[1]
    assert invoke("stats", "--since", "1h", "--store", made.name).returncode == 2
    with pytest.raises(ConfigError, match="agent, model, version, tool"):
        made.breakdown("colour")


@pytest.mark.parametrize(
    ("settings", "kept", "sent"),
    [
        ({}, {"retried", "inner"}, 0),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "NO_CONTENT"}, set(), 0),
        ({"LIGHTNING_OTEL_EXPORT_CONTENT": "1"}, {"retried", "inner"}, 2),
    ],
)
def test_a_stack_trace_is_kept_once_as_content(
    settings: dict[str, str], kept: set[str], sent: int, store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the innermost operation, bounded and without secrets; it leaves where content may."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with auto_trace(store=store):
        pass  # the first recording makes the provider
    exporter, joined = InMemorySpanExporter(), trace.get_tracer_provider()
    joined.add_span_processor(SimpleSpanProcessor(exporter))  # type: ignore[attr-defined]  # the SDK's

    def dig(depth: int) -> None:
        if not depth:
            raise KeyError(f"{SECRET} is unknown")
        dig(depth - 1)

    with contextlib.suppress(KeyError), auto_trace(store=store), operation("outer"):
        with contextlib.suppress(ValueError), operation("retried"):
            raise ValueError("other")
        with operation("inner"):
            dig(400)

    def read_stacks() -> dict[str, str]:
        pairs = [(each, event.attributes) for each in store.spans() for event in each.events]
        return {each.attributes[c.OPERATION_NAME]: told[c.EXCEPTION_STACKTRACE]
                for each, told in pairs}  # fmt: skip

    end = "KeyError: '[redacted:api_key] is unknown'\n"
    stacks = read_stacks()
    assert stacks.keys() == kept
    assert sum(len(each.events) for each in exporter.get_finished_spans()) == sent
    if kept:
        (inner,) = store.sql("SELECT span_id FROM failures WHERE is_fatal")
        assert len(stacks["inner"]) <= 8192
        assert stacks["inner"].endswith(end)
        assert f"      {end}" in invoke("show", inner["span_id"], "--store", store.name).stdout
        store.redact(patterns=["unknown"])
        assert "unknown" not in read_stacks()["inner"]

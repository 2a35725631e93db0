"""The list of traces: what matches, what is told of each, and how it is gone through."""

import pytest
from tests.adapter.forest import Forest, draw
from tests.store.conftest import MakeSpan

from lightning_otel import Store
from lightning_otel.tracing.emitters import reward_span
from lightning_otel.types import conventions as c
from lightning_otel.views.traces import TRACE_SEARCH, TRACES

CALL = f"so@model=demo-1@tokens=3@{c.OUTPUT_TOKENS}=2@scope={c.SCOPE}"


def add(store: Store, *traces: str) -> Forest:
    """Add traces that are drawn: a, b, c, …"""
    words = [
        f"#trace={letter},rollout=,attempt= {text}"
        for letter, text in zip("abcdef", traces, strict=False)
    ]
    forest = draw(" ".join(words))
    store.add(forest.spans)
    return forest


def ids(store: Store, **wanted: object) -> list[str]:
    """First letters of the traces that match, newest first."""
    found = TRACE_SEARCH.read(store, wanted)
    assert found.total == len(found.rows)
    return [row["trace_id"][0] for row in found.rows]


@pytest.fixture
def filled(store: Store) -> Store:
    """Three traces: a plain call of a planner, a failed one of a coder, one that was received."""
    add(
        store,
        f"planner[ {CALL}<What-is-2+2? ]",
        f'coder@error@{c.RESOURCE_VERSION}=prompt:v3[ {CALL}<Say"hi" ]',
        f"{CALL}@model=other@{c.RECEIVED}=otlp:127.0.0.1<how? !.5",
    )
    return store


def test_traces_are_told_newest_first(filled: Store) -> None:
    """Each with its agents, models, counts, tokens, reward, status and first words."""
    found = TRACES.read(filled)

    assert [row["trace_id"][0] for row in found.rows] == ["c", "b", "a"]
    assert (found.total, found.following) == (3, None)
    told = ("reward", "models", "status", "errors", "agents", "spans", "calls", "input")
    assert [[row[name] for name in told] for row in found.rows] == [
        [0.5, ["other"], "ended", 0, None, 2, 1, "how?"],
        [None, ["demo-1"], "failed", 1, "coder", 2, 1, 'Say"hi"'],
        [None, ["demo-1"], "ended", 0, "planner", 2, 1, "What-is-2+2?"],
    ]
    oldest = found.rows[-1]
    assert (oldest["input_tokens"], oldest["output_tokens"]) == (3, 2)
    assert oldest["end_ns"] > oldest["start_ns"]


FILTERS: list[tuple[dict[str, object], str]] = [
    ({"agent": "planner"}, "a"),
    ({"agent": "*er"}, "ba"),
    ({"model": "demo*"}, "ba"),
    ({"model": "demo"}, ""),
    ({"status": "failed"}, "b"),
    ({"status": "ended"}, "ca"),
    ({"error": True}, "b"),
    ({"error": False}, "ca"),
    ({"rewarded": True}, "c"),
    ({"rewarded": False}, "ba"),
    ({"min_reward": 0.5}, "c"),
    ({"max_reward": 0.4}, ""),
    ({"origin": "received"}, "c"),
    ({"origin": "own"}, "ba"),
    ({"version": "prompt:v3"}, "b"),
    ({"version": "prompt:*"}, "b"),
    ({"q": "WHAT-IS"}, "a"),
    ({"q": 'say"HI"'}, "b"),
    ({"q": "bbbb"}, "b"),
    ({"q": "%"}, ""),
    ({"q": "so", "agent": "planner"}, "a"),
]


def test_traces_are_filtered(filled: Store) -> None:
    """Every filter leaves what matches, and the count is of these."""
    for wanted, expected in FILTERS:
        assert ids(filled, **wanted) == list(expected), wanted


def test_traces_are_filtered_by_time(store: Store, make_span: MakeSpan) -> None:
    """A trace begins with its first span: from a time on, and before another."""
    store.add(
        make_span(trace_id=letter * 32, start_ns=n, end_ns=n) for n, letter in enumerate("abc")
    )
    store.add([make_span(trace_id="a" * 32, start_ns=9, end_ns=9)])

    assert ids(store, since=1) == ["c", "b"]
    assert ids(store, until=2) == ["b", "a"]


def test_a_reward_given_later_is_told_with_its_trace(store: Store) -> None:
    """It stands in a trace of its own, which is not listed; by link or rollout it finds the one."""
    forest = add(store, f"{CALL}@as=one", CALL)
    store.add([
        reward_span({"feedback": -1.0}, span_id=forest.named["one"]),
        reward_span({"feedback": 1.0}, rollout_id="b" * 32),
    ])  # fmt: skip

    rewards = {row["trace_id"][0]: row["reward"] for row in TRACES.read(store).rows}

    assert rewards == {"a": -1.0, "b": 1.0}
    assert ids(store, rewarded=True, max_reward=0) == ["a"]


def test_traces_are_gone_through_by_pages(store: Store, make_span: MakeSpan) -> None:
    """Each page goes on where the last one ended, traces of one instant too; all are counted."""
    store.add(make_span(trace_id=f"{n:032x}", start_ns=n // 3, end_ns=n) for n in range(10))
    pages = [TRACES.read(store, limit=3, offset=offset) for offset in range(0, 12, 3)]

    assert {page.total for page in pages} == {10}
    assert [len(page.rows) for page in pages] == [3, 3, 3, 1]
    seen = [row["trace_id"] for page in pages for row in page.rows]
    assert sorted(seen) == [f"{n:032x}" for n in range(10)]


def test_a_trace_that_goes_on_is_running_until_its_process_dies(
    store: Store, make_span: MakeSpan
) -> None:
    """What never ended says so; what began in a process that lives may still end."""
    process = store.writer().process
    store.add(
        [
            make_span(trace_id="a" * 32, end_ns=None, process=process),
            make_span(trace_id="b" * 32, end_ns=None, process="gone"),
            make_span(trace_id="c" * 32, span_id="9" * 16, process="gone"),
            make_span(trace_id="c" * 32, parent_span_id="9" * 16, end_ns=None, process="gone"),
        ]
    )

    found = {row["trace_id"][0]: row["status"] for row in TRACES.read(store).rows}

    assert found == {"a": "running", "b": "incomplete", "c": "ended"}
    assert ids(store, status="running") == ["a"]


def test_a_call_that_two_tracers_told_of_counts_once(store: Store) -> None:
    """The list counts requests, not spans about them."""
    add(store, f"{CALL}@id=r-1@at=10-20 {CALL}@scope=another@id=r-1@at=9-21")

    (row,) = TRACES.read(store).rows

    assert (row["spans"], row["calls"], row["input_tokens"]) == (2, 1, 3)


def test_a_trace_is_named_by_its_task_or_by_what_was_asked(
    store: Store, make_span: MakeSpan
) -> None:
    """A task as people say it; of messages that are none, nothing."""
    asked = (
        '[{"role":"system","parts":[]},{"role":"user","parts":[{"type":"text","content":"why"}]}]'
    )
    named = [
        ({c.TASK: '"sum"'}, ("sum", "")), ({c.TASK: '{"q":"sum"}'}, ("sum", "")),
        ({c.TASK: '{"q":1,"a":2}'}, ('{"q":1,"a":2}', "")), ({c.INPUT_MESSAGES: "["}, ("", "")),
            ({c.TASK: '{"id":"long-name","question":"who?"}'}, ("who?", "")),
            ({c.TASK: '{"task":{"id":"x","words":"how many"}}'}, ("how many", "")),
            ({c.TASK: '[{"role":"user","content":"hi"}]'}, ("hi", "")),
        ({c.INPUT_MESSAGES: asked}, ("", "why")),
    ]  # fmt: skip
    for number, (attributes, _) in enumerate(named):
        name = c.SPAN_ROLLOUT if c.TASK in attributes else "chat"
        attributes = {c.OPERATION: c.CHAT, **attributes}
        store.add([make_span(trace_id=f"{number:032x}", name=name, attributes=attributes)])

    found = {row["trace_id"]: (row["task"], row["input"]) for row in TRACES.read(store).rows}

    assert found == {f"{number:032x}": words for number, (_, words) in enumerate(named)}

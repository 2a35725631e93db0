"""The views: every span once, of any convention, to all readers, while others write and settle."""

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
import requests
from opentelemetry import trace
from tests.adapter.fixtures import recorded
from tests.adapter.forest import call_attributes, draw
from tests.store.conftest import MakeSpan
from tests.viewer.browsing import KEY

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.adapter.interop import to_conventions
from lightning_otel.receivers import protobuf
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.store.layout import Layout
from lightning_otel.store.schema import build_record, build_span
from lightning_otel.store.views import NAMES
from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c

OTHER = "opentelemetry.instrumentation.langchain"
REQUESTS = (
    # By id, else where two overlap and nothing speaks against it.
    ("x@as=a@at=10-20@id=a", "x@as=b@at=5-25@id=a", 1),
    ("x@as=a@at=10-20@id=a", "x@as=b@at=5-25", 1),
    ("x@as=a@at=10-20", "x@as=b@at=5-25", 1),
    ("x@as=a@at=10-20@id=a", "x@as=b@at=5-25@id=b", 2),
    ("x@as=a@at=10-20@model=m", "x@as=b@at=5-25@model=m-2026", 2),
    ("x@as=a@at=10-20@model=m", "x@as=b@at=5-25@model=n", 2),
    # A server that repeats its ids answers one call after the other.
    ("x@as=a@at=10-20@id=a", "x@as=b@at=30-40@id=a", 2),
    # Of three at once two were told twice, one of them without its id.
    (
        "x@as=a@at=10-30@id=a x@as=b@at=11-30@id=b x@as=c@at=12-30@id=c",
        "x@as=d@at=9-31@id=a x@as=e@at=12-31",
        3,
    ),
    # One make tells a request on two levels; of the inner ones, tries, the last is that request.
    ("x@as=a@at=10-20@id=a", "+x@as=d@at=5-25@id=a d/x@as=e@at=6-24 -d", 1),
    ("x@as=a@at=10-20@id=a", "+x@as=d@at=5-25@id=a d/x@as=e@at=6-12 d/x@as=f@at=13-24 -d", 2),
    # Without us a framework's record gives way to the client's within it.
    ("", "+x@as=a@at=5-25 a/x@as=b@at=10-20@id=a@scope=opentelemetry.instrumentation.openai -a", 1),
)


def test_a_call_has_the_agent_around_it_and_a_stream_is_counted_once(store: Store) -> None:
    """A framework's record may end before the request that it prepares begins."""
    ours = f"@scope={c.SCOPE}@model=m"
    drawing = (
        f"A[ w( a@id=r1@at=1-2{ours} ) ] root( prepare@at=9-9@scope={OTHER}@model=m"
        f" stream@at=9-10@scope={OTHER}@model=m b@id=r2@at=10-12{ours} )"
    )
    said = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)
    for span in draw(drawing).spans:
        heard = {} if span.scope != OTHER else dict.fromkeys(said)
        kept = {key: value for key, value in span.attributes.items() if key not in heard}
        store.add([replace(span, attributes=kept)])

    rows = store.sql("SELECT agent, response_id FROM calls ORDER BY response_id").rows()

    assert [tuple(row.values()) for row in rows] == [("A", "r1"), (None, "r2")]
    assert store.sql("SELECT calls FROM rollouts").rows() == [{"calls": 2}]


@pytest.mark.parametrize(("ours", "theirs", "calls"), REQUESTS)
def test_a_request_that_several_makes_recorded_is_one_call(
    store: Store, ours: str, theirs: str, calls: int
) -> None:
    """The one of ours is kept, however many instrumentors tell of it."""
    makes = [
        text.replace("@at", f"@tokens=3@scope={scope}@at")
        for text, scope in ((theirs, OTHER), (ours, c.SCOPE))
    ]
    forest = draw(" ".join(makes))
    store.add(forest.spans)

    found = {row["span_id"] for row in store.sql("SELECT span_id FROM calls").rows()}
    (rollout,) = store.sql("SELECT calls, input_tokens, spans FROM rollouts").rows()

    assert {forest.named[name] for name in re.findall(r"as=(\w)", ours)} <= found
    assert (len(found), rollout["calls"], rollout["input_tokens"]) == (calls, calls, 3 * calls)
    assert rollout["spans"] == len(forest.spans)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT count(*) FROM spans WHERE trace_id = ? AND name <> 'why?'", {"spans"}),
        ("SELECT count(*) FROM calls WHERE trace_id = $1", {"spans", "calls", "attempts", "facts"}),
        ("SELECT count(*) FROM duckdb_views() WHERE sql = ?", NAMES),
    ],
)
def test_only_the_views_that_a_query_reads_are_made(
    store: Store, query: str, names: Collection[str]
) -> None:
    """To bind a view costs as much as a small read; parameters hide none."""
    store.add([Span("a" * 32, "b" * 16, None, "x", 1, 2)])

    con = store.source.connect(query=query, parameters=["a"])

    found = con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    assert {name for (name,) in found} == set(names)


def test_catalogue_is_made_anew_where_the_store_was_moved(
    store: Store, layout: Layout, tmp_path: Path, make_span: MakeSpan
) -> None:
    """A moved or renamed store works after the first look of ours at it."""
    store.add(make_span() for _ in range(3))
    store.writer().seal()
    store.settle()
    moved = tmp_path / "elsewhere" / "renamed.duckdb"
    moved.parent.mkdir()
    shutil.move(layout.catalogue, moved)
    shutil.move(layout.root, f"{moved}.d")

    count = len(Store(moved).spans().rows())

    assert count == 3
    with duckdb.connect(str(moved), read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM spans").fetchone() == (3,)
    assert list((tmp_path / "elsewhere" / "renamed.duckdb.d" / "new").iterdir()) == []


READERS = """
import mmap, os, struct, sys, time
import duckdb
from lightning_otel import Store
from lightning_otel.store import journal, settle
from lightning_otel.types import Span
path, grace_us, is_plain = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "plain"
journal.ROTATE_BYTES, settle.BATCH_BYTES = 8_000, 20_000
settle.GRACE_US, settle.COMMIT_AHEAD_US = grace_us, 30_000
Store(path).layout.create()
shared = mmap.mmap(-1, 64)
QUERY = "SELECT count(*) AS n, count(DISTINCT span_id) AS d FROM spans"

def write(which):
    store = Store(path)
    for number in range(150):
        span_id = (which + 1) * 1_000_000 + number
        store.add([Span(f"{span_id:032x}", f"{span_id:016x}", None, "s", number, number + 1)])
        struct.pack_into("Q", shared, 8 * which, number + 1)
        time.sleep(0.004)
    store.writer().seal()
    shared[16 + which] = 1

def settle_all():
    while not (shared[16] and shared[17]):
        Store(path).settle()
        time.sleep(0.1)
    time.sleep(0.1)
    Store(path).settle()

def read():
    store, last, reads = Store(path), 0, 0
    con = store.connect()
    while last < 300 or reads < 3:
        acked = sum(struct.unpack_from("2Q", shared))
        if is_plain:
            n, d = con.execute(QUERY).fetchone()
        else:
            (row,) = store.sql(QUERY)
            n, d = row["n"], row["d"]
        assert n == d >= max(acked, last), (n, d, acked, last)
        last, reads = n, reads + 1

children = []
for work, *arguments in ((write, 0), (write, 1), (settle_all,), (settle_all,), (read,), (read,)):
    child = os.fork()
    if not child:
        try:
            work(*arguments)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
print(Store(path).sql(QUERY).rows())
"""


@pytest.mark.parametrize(("grace_us", "way"), [(60_000_000, "plain"), (0, "retrying")])
def test_readers_never_see_fewer_or_doubled_spans(
    tmp_path: Path, run_python: Callable[..., str], grace_us: int, way: str
) -> None:
    """Two readers count in a loop while two processes write and two settle."""
    printed = run_python(READERS, tmp_path / "traces.duckdb", grace_us, way)

    assert printed.splitlines() == ["[0, 0, 0, 0, 0, 0]", "[{'n': 300, 'd': 300}]"]


SOURCES = (
    "lightning",
    "current",
    "legacy",
    "flattened",
    "openinference",
    "openllmetry",
    "agentops",
    "agentlightning",
    "litellm",
)


@pytest.mark.parametrize("source", SOURCES)
def test_calls_view_knows_the_calls(store: Store, source: str) -> None:
    """Each request is one call with its model, id and usage."""
    store.add(recorded(source))
    # The old OpenLLMetry does not count the tokens of a stream.
    streamed = ((None, None),) * 2 if source == "flattened" else ((58, 3), (66, 4))

    calls = store.sql(
        "SELECT operation, model, response_id, input_tokens, output_tokens FROM calls "
        "ORDER BY start_ns"
    ).rows()

    assert [tuple(row.values()) for row in calls] == [
        ("chat", "toy-policy", f"chatcmpl-{number:024d}", *usage)
        for number, usage in enumerate(((38, 3), (46, 4), *streamed), 1)
    ]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_calls_of_the_adapter_are_rows_of_the_view(store: Store, provider: str) -> None:
    """Agent Lightning's proxy leaves the raw bodies of LiteLLM alone."""
    raw = [span for span in recorded("litellm") if span.name.startswith("raw_")][:2]
    for span in raw:
        keys = {key.replace("llm.openai.", f"llm.{provider}."): key for key in span.attributes}
        bare = {key: span.attributes[name] for key, name in keys.items()}
        store.add([replace(span, attributes=bare, parent_span_id=None)])
    steps = [(step.span_id, "chat", step.model, step.input_tokens) for step in store.transitions()]

    calls = store.sql("SELECT span_id, operation, model, input_tokens FROM calls ORDER BY start_ns")

    assert [tuple(row.values()) for row in calls] == steps


def test_rollout_with_the_attributes_of_a_call_is_none(store: Store) -> None:
    """LiteLLM's callback writes those of its calls on the span around them."""
    with auto_trace(store=store):
        trace.get_current_span().set_attributes({c.OPERATION: c.CHAT, c.RESPONSE_ID: "r1"})

    assert store.report().calls == 0
    assert store.sql("SELECT count(*) AS n FROM calls").rows() == [{"n": 0}]
    assert store.sql("SELECT calls FROM rollouts").rows() == [{"calls": 0}]


@pytest.mark.parametrize("source", ["current", "openinference", "openllmetry", "agentops"])
def test_rollouts_view_knows_agents_and_tools(store: Store, source: str) -> None:
    """A rollout counts its calls and names its agents; tools that ran are operations."""
    store.add(recorded(source))

    (rollout,) = store.sql("SELECT calls, agents, input_tokens FROM rollouts").rows()
    tools = store.sql(f"SELECT count(*) AS n FROM spans WHERE operation = '{c.EXECUTE_TOOL}'")

    assert tuple(rollout.values()) == (4, "calc", 208)
    assert tools.rows() == [{"n": 2}]


def test_rewards_view_and_rollout_of_agentlightning(store: Store) -> None:
    """Ids that stand on the resource are the rollout's, and its reward is found there."""
    spans = recorded("agentlightning")
    store.add(spans)

    (reward,) = store.sql("SELECT rollout_id, attempt_id, value FROM rewards").rows()

    resource = spans[0].otel_resource
    assert reward == {
        "rollout_id": resource[c.ROLLOUT_ID],
        "attempt_id": resource[c.ATTEMPT_ID],
        "value": 1.0,
    }


@pytest.mark.parametrize("source", SOURCES)
def test_a_foreign_span_is_kept_as_it_was(source: str) -> None:
    """Readers fill columns; what is stored is the span as it came."""
    for span in recorded(source):
        assert build_span(build_record(span)) == span


@pytest.mark.parametrize("missing", ["", None])
def test_an_empty_rollout_id_is_none(store: Store, missing: str | None) -> None:
    """An empty id names no rollout, in Python as in SQL: the span belongs to its trace's."""
    attributes = {c.ROLLOUT_ID: missing, c.ATTEMPT_ID: missing, c.OPERATION: c.CHAT}
    store.add([Span("a" * 32, "b" * 16, None, "chat", 1, 2, attributes=attributes)])

    found = store.sql("SELECT rollout_id, attempt_id FROM rollouts").rows()

    assert found == [{"rollout_id": "a" * 32, "attempt_id": "1"}]


GOOD = {c.EVALUATION_NAME: "relevance", c.EVALUATION_SCORE: 0.75, c.EVALUATION_EXPLANATION: "so"}


def earned(store: Store) -> list[tuple[object, ...]]:
    """Each reward by the views, and what the steps earned by the adapter."""
    told = store.sql("SELECT name, value FROM rewards ORDER BY start_ns").rows()
    steps = store.trajectories()
    whole = store.sql("SELECT reward FROM rollouts").rows()
    return [
        *(tuple(row.values()) for row in told),
        tuple(step.reward for path in steps for step in path.transitions),
        tuple(row["reward"] for row in whole),
    ]


def test_an_evaluation_of_others_is_a_reward(store: Store, served: Callable[..., str]) -> None:
    """Received as an event of a call or as a span beside it, and sent twice: each counts once."""
    call = Span(
        "a" * 32, "b" * 16, None, "chat", 1, 9, kind="CLIENT", scope="theirs",
        attributes=call_attributes("why?", "so"), events=(Event(c.EVENT_EVALUATION, 5, GOOD),),
    )  # fmt: skip
    judged = Span(
        "c" * 32, "d" * 16, None, "chat", 11, 12, scope="theirs",
        attributes=call_attributes("and?", "that"),
    )  # fmt: skip
    beside = Span(
        "c" * 32, "e" * 16, "d" * 16, c.EVENT_EVALUATION, 13, 13, scope="theirs",
        attributes={**GOOD, c.EVALUATION_SCORE: 1},
    )  # fmt: skip
    url = served(store, "", key=KEY) + "/v1/traces"
    for spans in ([call, judged, beside], [call]):
        body = encode_request(spans, with_content=True)
        kind = {"Content-Type": "application/x-protobuf"}
        assert requests.post(url, body, headers=kind, timeout=9).ok

    assert earned(store) == [
        ("relevance", 0.75), ("relevance", 1.0), (0.75, 1.0), (0.75, 1.0)
    ]  # fmt: skip
    (kept,) = (each for each in store.spans(trace_id=call.trace_id) if each.span_id == call.span_id)
    assert kept.events == call.events


def test_an_evaluation_noted_in_process_is_a_reward_once(store: Store, tmp_path: Path) -> None:
    """On the span at work; and where it goes on to another store, as ours do in both forms."""
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("first")
        emit_reward(0.5)
        emit_action("second")
        trace.get_current_span().add_event(c.EVENT_EVALUATION, GOOD)
        trace.get_current_span().add_event(c.EVENT_EVALUATION, {c.EVALUATION_NAME: "no number"})
    other = Store(tmp_path / "other.duckdb")
    sent = [to_conventions(span, with_content=True) for span in store.spans()]
    body = encode_request(sent, with_content=True)
    other.add([each for each in protobuf.decode_spans(body, "") if isinstance(each, Span)])

    assert earned(store) == earned(other) == [
        ("primary", 0.5), ("relevance", 0.75), (0.5, 0.75), (1.25,)
    ]  # fmt: skip

"""The provider joined or set, the ways in, and what is inherited: each in a process of its own.

The global tracer provider can be set once a process, so what depends on it runs in a subprocess.
"""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from lightning_otel import Store, instrument, uninstrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

PRELUDE = """
import json, os, sys, threading
import lightning_otel as lo
from lightning_otel import config, provider
from lightning_otel.types import conventions as c
from opentelemetry import trace

def own_provider(*processors, **options):
    from opentelemetry.sdk.trace import TracerProvider
    own = TracerProvider(**options)
    for processor in processors:
        own.add_span_processor(processor)
    trace.set_tracer_provider(own)
    return own

def in_memory():
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    exporter = InMemorySpanExporter()
    return exporter, SimpleSpanProcessor(exporter)
"""


class Process:
    """Runs scripts in processes of their own, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "traces.duckdb")

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            cwd=self.folder,
            env={**os.environ, "LIGHTNING_OTEL_STORE": self.store.name, **environment},
            capture_output=True,
            text=True,
            timeout=50,
        )

    def spans(self) -> list[Span]:
        return self.store.spans().rows()


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


SEEDED = """
import random
for turn in range(2):
    random.seed(7)
    with lo.auto_trace():
        lo.emit_action("say", turn)
    assert random.random() == random.Random(7).random()
"""


@pytest.mark.parametrize("setup", ["", "own_provider()\n"])
def test_ids_of_a_seeded_program_are_never_repeated(process: Process, setup: str) -> None:
    """Neither within a run nor by the next one, in a provider of ours or theirs."""
    runs = [process.run(setup + SEEDED) for _ in range(2)]

    assert [run.returncode for run in runs] == [0, 0], runs
    spans = process.spans()
    assert len(spans) == 8
    assert len({span.span_id for span in spans}) == 8
    assert len({span.trace_id for span in spans}) == len({span.rollout_id for span in spans}) == 4


ROOT, SAID = c.SPAN_ROLLOUT, c.SPAN_MESSAGE
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
SCRIPTS: dict[str, tuple[str, dict[str, str], str | None, list[str]]] = {
    "a generator of ids that the user chose stays": (
        """
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        class Counting(RandomIdGenerator):
            def generate_trace_id(self):
                return 7
        own_provider(id_generator=Counting())
        with lo.auto_trace() as recording:
            assert trace.get_current_span().get_span_context().trace_id == 7
        """, {}, "", [ROOT],
    ),
    "a provider is joined; its exporter gets every span as it was, without the content": (
        """
        exporter, processor = in_memory()
        own = own_provider(processor)
        full = {f"k{number}": number for number in range(128)}
        with lo.auto_trace(task="secret") as recording:
            lo.emit_message("secret")
            with trace.get_tracer("app").start_as_current_span("app", attributes=full):
                pass
        with trace.get_tracer("app").start_as_current_span("outside"):
            pass
        assert trace.get_tracer_provider() is own
        exported = exporter.get_finished_spans()
        assert "secret" not in repr([dict(span.attributes) for span in exported])
        assert [span.name for span in exported][1::2] == ["app", "outside"]
        assert dict(exported[1].attributes) == full
        kept = {span.name: span for span in recording.spans()}
        assert len(kept["app"].attributes) == 130
        assert "secret" in repr(kept[c.SPAN_MESSAGE].attributes)
        """, {}, "", [ROOT, "app", SAID],
    ),
    "content reaches other exporters where that is allowed": (
        """
        exporter, processor = in_memory()
        own_provider(processor)
        with lo.auto_trace():
            lo.emit_message("hello")
        assert exporter.get_finished_spans()[0].attributes[c.MESSAGE_BODY] == "hello"
        """, {"LIGHTNING_OTEL_EXPORT_CONTENT": "1"}, "", [ROOT, SAID],
    ),
    "what the user's provider does not sample is not recorded": (
        """
        from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
        class NoMessages(Sampler):
            def should_sample(self, parent_context, trace_id, name, *args, **kwargs):
                is_wanted = name != c.SPAN_MESSAGE and "drop" not in name
                return SamplingResult(Decision.RECORD_AND_SAMPLE if is_wanted else Decision.DROP)
            def get_description(self):
                return "no messages"
        own_provider(sampler=NoMessages())
        with lo.auto_trace() as recording:
            lo.emit_message("dropped")
            lo.emit_object("kept")
            with trace.get_tracer("app").start_as_current_span("drop me"):
                lo.emit_reward(1.0)
        assert len(recording.spans()) == 3
        """, {}, "", [ROOT, c.SPAN_OBJECT, c.SPAN_ANNOTATION],
    ),
    "with sampling off functions run and are judged": (
        """
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
        own_provider(sampler=ALWAYS_OFF)
        judged = []
        @lo.auto_trace(reward_evaluator=lambda it: judged.append((it.result, it.spans())))
        def double(number):
            return number * 2
        assert double(21) == 42
        assert judged == [(42, [])]
        """, {}, "", [],
    ),
    "a provider that takes no processors is named once": (
        """
        trace.set_tracer_provider(trace.NoOpTracerProvider())
        for _ in range(3):
            with lo.auto_trace() as recording:
                assert lo.emit_reward(1.0) is None
                with lo.operation("x") as found:
                    assert found.span_id is None
        assert (recording.spans(), recording.trace_id, recording.span_id) == ([], "", "")
        """, {}, "takes no processors", [],
    ),
    "a batch exporter into the same store doubles nothing, and no content goes with ids": (
        """
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        import copy, pickle
        own = own_provider(BatchSpanProcessor(lo.DuckDBSpanExporter()))
        with lo.auto_trace(task="said") as recording:
            lo.emit_message("said")
            ids = trace.get_current_span().get_span_context()
        for copied in (pickle.loads(pickle.dumps(ids)), copy.deepcopy(ids)):
            assert copied == ids
            assert not any(copied.__dict__.values())
        own.force_flush()
        bodies = [span.attributes.get(c.MESSAGE_BODY) for span in recording.spans()]
        assert bodies == [None, "said"]
        """, {}, "", [ROOT, SAID],
    ),
    "the hook is idle unless it is named and allowed": (
        """
        for environment in (
            {},
            {"OTEL_TRACES_EXPORTER": "none"},
            {"OTEL_TRACES_EXPORTER": "duckdb", "LIGHTNING_OTEL": "0"},
            {"OTEL_TRACES_EXPORTER": "duckdb", "LIGHTNING_OTEL": "1", "OTEL_SDK_DISABLED": "true"},
        ):
            os.environ.update(environment)
            provider.pre_instrument()
        assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
        assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
        assert os.listdir() == []
        """, {}, "", [],
    ),
    "the hook says what to write where nothing sends": (
        "provider.pre_instrument()", {"OTEL_TRACES_EXPORTER": "otlp"},
        "write --traces_exporter otlp,duckdb", [],
    ),
    "the hook is silent where the SDK is set up": (
        "own_provider(); provider.pre_instrument()", {"OTEL_TRACES_EXPORTER": "otlp"}, "", [],
    ),
    "the hook lets the program run where no store can be made": (
        """
        open("file", "w").close()
        for store in ("file/store", "clickhouse://here", ":memory:"):
            os.environ["LIGHTNING_OTEL_STORE"] = store
            provider.pre_instrument()
        assert os.listdir() == ["file"]
        """, {"OTEL_TRACES_EXPORTER": "duckdb"}, None, [],
    ),
    "a process sends nothing where somebody forwards its store": (
        """
        provider.leave_otlp_to_the_store()
        with lo.auto_trace():
            pass
        """, ENDPOINT, "", [ROOT],
    ),
    "a suppressed operation is no parent to the program's own spans": (
        """
        from opentelemetry.instrumentation.utils import suppress_instrumentation
        exporter, processor = in_memory()
        own_provider(processor)
        with lo.auto_trace() as recording, suppress_instrumentation(), lo.operation("x"):
            lo.emit_message("near")
            with trace.get_tracer("app").start_as_current_span("app"):
                lo.emit_message("far")
        app, root = exporter.get_finished_spans()
        assert app.parent.span_id == root.context.span_id
        kept = {s.attributes.get(c.MESSAGE_BODY) or s.name: s for s in recording.spans()}
        parents = {name: kept[name].parent_span_id for name in kept}
        ids = {name: kept[name].span_id for name in kept}
        assert parents["near"] == ids[c.SPAN_OPERATION]
        assert parents["far"] == ids["app"]
        assert parents["app"] == parents[c.SPAN_OPERATION] == ids[c.SPAN_ROLLOUT]
        """, {}, "", [ROOT, c.SPAN_OPERATION, "app", SAID, SAID],
    ),
    "suppressed spans are of the service that the program names later": (
        """
        from opentelemetry.instrumentation.utils import suppress_instrumentation
        from opentelemetry.sdk.resources import Resource
        with lo.auto_trace() as recording, suppress_instrumentation():
            lo.emit_message("before")
            own_provider(resource=Resource.create({"service.name": "shop"}))
            lo.emit_message("after")
        names = [span.otel_resource["service.name"] for span in recording.spans()]
        assert names[1].startswith("unknown_service")
        assert names[2] == "shop"
        """, {}, "", [ROOT, SAID, SAID],
    ),
    "a forked child is an instance of its own": (
        """
        with lo.auto_trace() as recording:
            lo.emit_message("parent")
            child = os.fork()
            if not child:
                lo.emit_message("child")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        instances = {span.otel_resource.get("service.instance.id") for span in recording.spans()}
        assert len(instances) == 2
        """, {}, "", [ROOT, SAID, SAID],
    ),
    # The SDK's hook at a fork looks for resources in a pool of threads; ours does not.
    "a fork starts no thread and goes on recording": (
        """
        events = []
        sys.addaudithook(lambda event, args: events.append(event))
        with lo.auto_trace():
            lo.emit_action("parent")
            events.clear()
            pid = os.fork()
            if pid == 0:
                lo.emit_action("child")
                os._exit("_thread.start_new_thread" in events)
            assert os.waitpid(pid, 0)[1] == 0
        """, {}, "", [ROOT, c.SPAN_ACTION, c.SPAN_ACTION],
    ),
    "threads that cannot be patched and a broken instrumentor leave openai's on": (
        """
        import logging, openai._base_client as base, autogen_core
        from lightning_otel.instrumentors import threads
        logging.disable()
        def broken(*args):
            raise KeyError("start")
        threads.replace = broken
        provider.INSTRUMENTORS["autogen_core"] = "no.such:Instrumentor"
        lo.instrument()
        assert hasattr(base.SyncAPIClient.request, "__lightning_otel_wrapped__")
        """, {}, "", [],
    ),
    "what is no traceparent is no parent": (
        """
        nonsense = ["", "x", "00-x-y-01", "00-0-0-01", "-", f"00-{'0' * 32}-{'cd' * 8}-01",
                    f"00-{'ab' * 16}-{'0' * 16}-01", f"00-{'ab' * 20}-{'cd' * 8}-01",
                    f"00-0x{'ab' * 15}-{'cd' * 8}-01", f"ff-{'ab' * 16}-{'cd' * 8}-01", "\\udcff"]
        for text in nonsense:
            os.environ["TRACEPARENT"] = text
            provider.start_process()
            lo.emit_message(text)
        spans = lo.Store().spans().rows()
        assert {(span.parent_span_id, span.rollout_id) for span in spans} == {(None, "r1")}
        assert "ab" * 16 not in {span.trace_id for span in spans}
        """, {"LIGHTNING_OTEL_ROLLOUT_ID": "r1"}, "", [SAID] * 11,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_program_with_and_without_a_provider(process: Process, name: str) -> None:
    """Each runs to its end, is warned of one thing or nothing, and keeps what it should."""
    script, environment, warning, stored = SCRIPTS[name]

    done = process.run(script, **environment)

    assert done.returncode == 0, done.stderr
    if warning is None:
        assert done.stderr.count("cannot make the store") == 1
    else:
        assert len(done.stderr.splitlines()) == bool(warning), done.stderr
        assert warning in done.stderr
    spans = process.spans() if stored or process.folder.joinpath("traces.duckdb.d").exists() else []
    assert sorted(span.name for span in spans) == sorted(stored)


@pytest.mark.parametrize("is_joined", [True, False])
def test_first_recordings_of_many_threads_share_one_processor(
    is_joined: bool, process: Process
) -> None:
    """Threads that begin at once set or join one provider, once."""
    done = process.run(
        f"""
        if {is_joined}:
            own_provider()
        added = []
        from opentelemetry.sdk.trace import TracerProvider
        plain = TracerProvider.add_span_processor
        def add(self, processor):
            added.append(processor)
            plain(self, processor)
        TracerProvider.add_span_processor = add
        sys.setswitchinterval(1e-6)
        together = threading.Barrier(16)
        def work():
            together.wait()
            with lo.auto_trace():
                lo.emit_message("x")
        threads = [threading.Thread(target=work) for _ in range(16)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(len(added))
        """
    )

    assert (done.stdout, done.stderr) == ("1\n", "")
    assert len(process.spans()) == 32
    assert len({span.rollout_id for span in process.spans()}) == 16


PRE_INSTRUMENT = """
if {has_provider}:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from lightning_otel import DuckDBSpanExporter
    own_provider(BatchSpanProcessor(DuckDBSpanExporter(), schedule_delay_millis=50))
provider.pre_instrument()
with trace.get_tracer("app").start_as_current_span("outer"):
    with lo.auto_trace():
        lo.emit_message("said")
    trace.get_tracer("app").start_span("never ended")
if {has_provider}:
    trace.get_tracer_provider().force_flush()
os.kill(os.getpid(), 9) if {is_killed} else None
"""


@pytest.mark.parametrize(("has_provider", "is_killed"), [(True, False), (False, True)])
def test_pre_instrument_keeps_every_span_once(
    has_provider: bool, is_killed: bool, process: Process
) -> None:
    """Named in ``OTEL_TRACES_EXPORTER``, everything is kept at once, and by nobody else again."""
    done = process.run(
        PRE_INSTRUMENT.format(has_provider=has_provider, is_killed=is_killed),
        OTEL_TRACES_EXPORTER="duckdb",
    )

    ended = [span for span in process.spans() if not span.is_incomplete]
    segments = [path.read_text() for path in process.folder.rglob("live/*-*.ndjson")]
    assert (done.returncode, done.stderr) == (-9 if is_killed else 0, "")
    assert sorted(span.name for span in ended) == sorted(["outer", c.SPAN_ROLLOUT, c.SPAN_MESSAGE])
    assert {span.attributes.get(c.MESSAGE_BODY) for span in ended} == {None, "said"}
    assert "".join(segments).count('"record":"span"') == 3


INHERIT = """
provider.start_run_child()
lo.emit_message("main")
def work():
    lo.emit_message("thread")
    with lo.operation("deeper"):
        lo.emit_message("deep")
thread = threading.Thread(target=work)
thread.start()
thread.join()
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    pool.submit(lo.emit_message, "pool").result()
with lo.auto_trace(name="part") as part:
    pass
print(part.rollout_id, part.attempt_id)
"""


def test_rollout_and_parent_are_inherited_from_the_environment(process: Process) -> None:
    """A child process goes on in its parent's rollout and trace, in all its threads."""
    done = process.run(
        INHERIT,
        LIGHTNING_OTEL_ROLLOUT_ID="r1",
        LIGHTNING_OTEL_ATTEMPT_ID="2",
        TRACEPARENT=f"00-{'ab' * 16}-{'cd' * 8}-00",
    )

    spans = process.spans()
    deeper = next(span for span in spans if span.name == c.SPAN_OPERATION)
    parents = {
        span.attributes.get(c.MESSAGE_BODY) or span.name: span.parent_span_id for span in spans
    }
    assert (done.stdout, done.stderr) == ("r1 2\n", "")
    assert {(span.rollout_id, span.attempt_id) for span in spans} == {("r1", "2")}
    assert {span.trace_id for span in spans} == {"ab" * 16}
    assert parents == {
        "main": "cd" * 8,
        "thread": "cd" * 8,
        "pool": "cd" * 8,
        c.SPAN_OPERATION: "cd" * 8,
        "deep": deeper.span_id,
        c.SPAN_ROLLOUT: "cd" * 8,
    }


PIPELINES = {
    "instrument": "provider.start_process()",
    "processor": "own_provider(lo.LightningSpanProcessor()); lo.instrument()",
    "exporter": "own_provider(batch()); lo.instrument()",
    "late provider": "lo.instrument(); own_provider(batch())",
}
DIVIDES = """
import time
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
def batch():
    return BatchSpanProcessor(lo.DuckDBSpanExporter(), schedule_delay_millis=20)
SETUP
tracer = trace.get_tracer("a_framework")
def ask(which):
    with tracer.start_as_current_span("step"):
        time.sleep(0.05)  # longer than a batch waits
        lo.emit_message(which)
def ids_of(span):
    span = span.get_span_context()
    return span.trace_id, span.span_id
def serve(which, kind, ids=None, links=()):
    carrier = {"traceparent": "00-%032x-%016x-01" % ids} if ids else {}
    context = propagate.extract(carrier, Context())
    with tracer.start_as_current_span("x", context, kind, links=links):
        ask(which)
ask("first")
for name in ("run one", "run two"):
    span = tracer.start_span(name)
    span.set_attribute("gen_ai.operation.name", "invoke_agent")
    with trace.use_span(span, end_on_exit=True):
        ask(name)
for kind in (SpanKind.SERVER, SpanKind.CONSUMER):
    serve(f"root {kind.name}", kind)
    serve(f"remote {kind.name}", kind, (kind.value, 5))
with tracer.start_as_current_span("create", kind=SpanKind.PRODUCER) as produced:
    pass
serve("sent within", SpanKind.CONSUMER, ids_of(produced))
serve("linked within", SpanKind.CONSUMER, links=[Link(produced.get_span_context())])
serve("linked elsewhere", SpanKind.CONSUMER, links=[Link(SpanContext(11, 12, True, TraceFlags(1)))])
with tracer.start_as_current_span("post", kind=SpanKind.CLIENT) as post:
    serve("own client", SpanKind.SERVER, ids_of(post))
    ask("after own client")
with lo.auto_trace():
    ask("traced")
with lo.context(agent="x"):
    ask("named")
lo.emit_reward(1.0)
shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
shutdown() if shutdown else None
"""
APART = {
    "root SERVER", "remote SERVER", "root CONSUMER", "remote CONSUMER", "linked elsewhere",
    "own client", "traced", "named",
}  # fmt: skip


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_frameworks_spans_never_divide_a_process_and_requests_do(
    process: Process, pipeline: str
) -> None:
    """Whenever they set their attributes; nor do messages within; blocks and requests do."""
    done = process.run(DIVIDES.replace("SETUP", PIPELINES[pipeline]))

    spans = process.spans()
    rollouts = {span.attributes.get(c.MESSAGE_BODY): span.rollout_id for span in spans}
    apart = [rollouts.pop(name) for name in APART]
    of_process = rollouts["first"]
    assert done.stderr == ""
    assert len({of_process, *apart}) == 1 + len(APART)
    assert {rollouts[name] for name in rollouts if name} == {of_process}
    assert {span.rollout_id for span in spans if span.name == c.SPAN_ANNOTATION} == {of_process}
    assert {span.rollout_id for span in spans} == {of_process, *apart}  # none is empty


@pytest.mark.parametrize("first", ["agents import BaseChatAgent", "teams import BaseGroupChat"])
def test_module_that_imports_its_library_is_patched_once_it_is_whole(
    first: str, process: Process
) -> None:
    """AutoGen's core is switched on in the midst of the module the program imports first."""
    pytest.importorskip("autogen_agentchat")

    done = process.run(
        f"""
        with lo.auto_trace():
            from autogen_agentchat.{first} as found
            print(hasattr(found.run_stream, "__lightning_otel_wrapped__"))
        """
    )

    assert (done.stdout, done.stderr) == ("True\n", "")


def test_instrument_switches_on_by_name_and_uninstrument_off() -> None:
    """A library is named as text or in a list; off again its own methods are back."""
    import openai._base_client as base

    def is_wrapped() -> bool:
        return hasattr(base.SyncAPIClient.request, "__lightning_otel_wrapped__")

    uninstrument()
    states = [is_wrapped()]
    for libraries in ("openai", ["openai"], None):
        instrument(libraries)
        states.append(is_wrapped())
        uninstrument()
        states.append(is_wrapped())

    assert states == [False, True, False, True, False, True, False]
    assert threading.Thread.start.__module__ == "threading"
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"
    assert openai.OpenAI.__mro__[1] is base.SyncAPIClient


@pytest.mark.parametrize("disabled", ["", "lightning-openai", "lightning-langchain"])
@pytest.mark.parametrize("switch", ["", "lo.instrument()"])
def test_disabled_instrumentor_stays_off(
    switch: str, disabled: str, process: Process, server: DemoServer
) -> None:
    """OpenTelemetry's own setting counts, whichever way the others are switched on."""
    script = f"""
    import openai
    {switch}
    with lo.auto_trace():
        client = openai.OpenAI(base_url={server.base_url!r}, api_key="k")
        client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "a"}}])
    """
    done = process.run(script, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=disabled)

    assert (done.returncode, done.stderr) == (0, "")
    calls = [span for span in process.spans() if span.name == "chat m"]
    assert len(calls) == (disabled != "lightning-openai")


def test_instrument_refuses_a_library_it_does_not_know() -> None:
    """A name without an instrumentor is an error that lists those there are."""
    with pytest.raises(ConfigError, match="'opena1'; there is one for openai"):
        instrument("opena1")
    with pytest.raises(ConfigError, match="'pytest'"):
        instrument(["openai", "pytest"])


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        ("lo.instrument(); ask(); ask()", "a call was not recorded: instrument() only switches"),
        ("lo.auto_trace(); ask(); lo.auto_trace()", "auto_trace() was never entered"),
        ("lo.auto_trace(name='x')", "auto_trace() was never entered"),
        ("lo.context(agent='x')", "context() was never entered"),
        ("with lo.auto_trace(): ask()", ""),
        ("lo.auto_trace()(ask)()", ""),
        ("lo.auto_trace(ask)()", ""),
        ("lo.instrument()\nwith lo.auto_trace(): ask()\nask()", ""),
    ],
)
def test_what_records_nothing_says_so_once(
    script: str, warning: str, process: Process, server: DemoServer
) -> None:
    """A program that meant to record and did not is told, in one line."""
    done = process.run(
        f"""
import openai
client = openai.OpenAI(base_url={server.base_url!r}, api_key="k")
def ask():
    client.chat.completions.create(model="toy", messages=[{{"role": "user", "content": "hi"}}])
{script}
"""
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count(warning) == 1 if warning else done.stderr == ""
    assert len(done.stderr.splitlines()) == bool(warning)

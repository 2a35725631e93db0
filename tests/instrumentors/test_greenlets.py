"""gevent's greenlets go on in the recording of whoever started them, whoever comes first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer

pytest.importorskip("gevent")

MONKEY = "from gevent import monkey; monkey.patch_all()\n"
OURS = "import lightning_otel as lo, openai; lo.instrument()\n"
BODY = """
import gevent, gevent.hub, gevent.pool, gevent.threadpool, sys, threading

def ask(text):  # each thread has a loop of gevent's own, which a connection stays in
    client = openai.OpenAI()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

def start_thread(*args):
    thread = threading.Thread(target=args[0], args=args[1:])
    thread.start()
    return thread

class Greenlet(gevent.Greenlet):
    def __init__(self, *args):
        super().__init__()
        self.work = args

    def _run(self):
        self.work[0](*self.work[1:])

def start_greenlet(*args):
    greenlet = Greenlet(*args)
    greenlet.start()
    return greenlet

class Raw:
    def __init__(self, spawn, *args):
        self.greenlet = spawn(*args)

    def join(self):
        while not self.greenlet.dead:
            gevent.sleep(0.01)

class Pool:
    def __init__(self, *args):
        self.result = gevent.threadpool.ThreadPool(1).spawn(*args)

    def join(self):
        self.result.get()

class Result:
    def __init__(self, future):
        self.join = future.result

starts = {
    "spawn": gevent.spawn,
    "class": gevent.Greenlet.spawn,
    "subclass": start_greenlet,
    "raw": lambda *args: Raw(gevent.spawn_raw, *args),
    "hub": lambda *args: Raw(gevent.hub.spawn_raw, *args),
    "threadpool": Pool,
    "executor": lambda *args: Result(gevent.threadpool.ThreadPoolExecutor(1).submit(*args)),
    "spawn_later": lambda *args: gevent.spawn_later(0, *args),
    "pool": gevent.pool.Pool(2).spawn,
    "thread": start_thread,
}
with lo.auto_trace(agent="planner"):
    for name in sys.argv[1:]:
        starts[name](ask, name).join()
gevent.spawn(ask, "outside").join()
lo.uninstrument()
pool = gevent.threadpool.ThreadPool
for owner, name in ((gevent, "spawn_raw"), (pool, "spawn"), (threading.Thread, "start")):
    assert not hasattr(getattr(owner, name), "__lightning_otel_wrapped__"), name
"""


@pytest.mark.parametrize(
    "script", [MONKEY + OURS, OURS + MONKEY, "import gevent.pool\n" + OURS], ids=repr
)
def test_greenlets_keep_their_recording_and_agent(
    script: str, server: DemoServer, tmp_path: Path
) -> None:
    """Patched before us, after us or not at all: each call is in the rollout and the agent's."""
    names = ["spawn", "class", "subclass", "raw", "hub", "threadpool", "executor", "spawn_later"]
    names += ["pool", "thread"]
    if "monkey" not in script:
        names.remove("thread")  # a thread of the system's, which waits for the loop it blocks
    store = Store(tmp_path / "traces.duckdb")
    settings = {
        "LIGHTNING_OTEL_STORE": store.name,
        "OPENAI_BASE_URL": server.base_url,
        "OPENAI_API_KEY": "key",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script + BODY, *names],
        env={**os.environ, **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.returncode, done.stderr) == (0, "")
    steps = store.transitions().rows()
    texts = [step.observation[-1]["parts"][0]["content"] for step in steps]
    assert sorted(texts) == sorted(names)
    assert {step.agent for step in steps} == {"planner"}

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
import gevent, gevent.pool, sys, threading
client = openai.OpenAI()

def ask(text):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

def start_thread(*args):
    thread = threading.Thread(target=args[0], args=args[1:])
    thread.start()
    return thread

starts = {
    "spawn": gevent.spawn,
    "spawn_later": lambda *args: gevent.spawn_later(0, *args),
    "pool": gevent.pool.Pool(2).spawn,
    "thread": start_thread,
}
with lo.auto_trace(agent="planner"):
    for name in sys.argv[1:]:
        starts[name](ask, name).join()
gevent.spawn(ask, "outside").join()
lo.uninstrument()
for owner, name in ((gevent, "spawn"), (gevent.pool.Group, "spawn"), (threading.Thread, "start")):
    assert not hasattr(getattr(owner, name), "__lightning_otel_wrapped__"), name
"""


@pytest.mark.parametrize(
    "script", [MONKEY + OURS, OURS + MONKEY, "import gevent.pool\n" + OURS], ids=repr
)
def test_greenlets_keep_their_recording_and_agent(
    script: str, server: DemoServer, tmp_path: Path
) -> None:
    """Patched before us, after us or not at all: each call is in the rollout and the agent's."""
    names = ["spawn", "spawn_later", "pool", "thread"]
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

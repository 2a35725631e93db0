"""``run``: workers of pools are the program's own, whichever library starts them."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

ASK = """\
import os
def ask(text):
    import openai
    with openai.OpenAI(base_url=os.environ["URL"], api_key="k") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return os.getpid()
"""
PROGRAM = """
import os
from asking import ask
texts = [f"worker {i}" for i in range(4)]
def main():
    ask("agent")
    POOL
    print(len(pids), os.getpid() in pids)
if __name__ == "__main__":
    main()
"""
SPAWNED = """import multiprocessing
    with multiprocessing.get_context("{}").Pool(2) as pool: pids = pool.map(ask, texts)"""
EXECUTOR = """from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(2) as pool: pids = list(pool.map(ask, texts))"""
JOBLIB = """import joblib
    pids = joblib.Parallel(2, backend="{}")(joblib.delayed(ask)(text) for text in texts)"""
LOKY = """import loky
    with loky.get_reusable_executor(2) as pool: pids = list(pool.map(ask, texts))"""
RAY = """import ray
    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    class Asker:
        def ask(self, text): return ask(text)
    actor, function = ray.remote(Asker).remote(), ray.remote(ask)
    asked = [actor.ask.remote(texts[0]), *map(function.remote, texts[1:])]
    pids = ray.get(asked)
    ray.shutdown()"""
XDIST = """import execnet
    group = execnet.Group(["popen"] * 2)
    source = "import asking; channel.send(asking.ask(channel.receive()))"
    channels = [group[i % 2].remote_exec(source) for i in range(4)]
    for channel, text in zip(channels, texts): channel.send(text)
    pids = [channel.receive() for channel in channels]
    group.terminate()"""
GEVENT = """import gevent.pool
    pids = gevent.pool.Pool(2).map(ask, texts)"""
GEVENT_THREADS = """import gevent
    pids = [gevent.get_hub().threadpool.spawn(ask, text).get() for text in texts]"""
POOLS = {
    "spawn": ("", SPAWNED.format("spawn")),
    "forkserver": ("", SPAWNED.format("forkserver")),
    "executor": ("", EXECUTOR),
    "joblib-loky": ("joblib", JOBLIB.format("loky")),
    "joblib-multiprocessing": ("joblib", JOBLIB.format("multiprocessing")),
    "joblib-threading": ("joblib", JOBLIB.format("threading")),
    "loky": ("loky", LOKY),
    "ray": ("ray", RAY),
    "xdist": ("execnet", XDIST),
    "gevent": ("gevent", GEVENT),
    "gevent-threads": ("gevent", GEVENT_THREADS),
}
"""By name the library that it needs, and the lines that ask from workers."""
THREADED = {"joblib-threading", "gevent", "gevent-threads"}
CASES = [
    (name, kind)
    for name in POOLS
    for kind in ("all", "own")
    if kind == "all" or name not in THREADED
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "children"), CASES)
def test_workers_are_the_programs_own(
    name: str, children: str, spawn: Cli, server: DemoServer, tmp_path: Path
) -> None:
    """Each worker's call is in the program's rollout, and of no executed program."""
    library, pool = POOLS[name]
    if library and find_spec(library) is None:
        pytest.skip(f"{library} is not installed here")
    path = tmp_path / "s.duckdb"
    (tmp_path / "asking.py").write_text(ASK)
    (tmp_path / "program.py").write_text(PROGRAM.replace("POOL", pool))

    done = spawn(
        "run", "--store", path, "--rollout-id", "r1", "--children", children,
        "--", "python", tmp_path / "program.py",
        env={"URL": server.base_url, "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"4 {name in THREADED}"
    calls = [span for span in Store(path).spans() if c.INPUT_MESSAGES in span.attributes]
    assert len(calls) == len(server.log) == 5
    owners = Counter(
        (call.attributes.get(c.ROLLOUT_ID), call.attributes.get(c.EXECUTED)) for call in calls
    )
    assert owners == {("r1", None): 5}
    assert ", 5 calls, " in done.stderr
    assert "not recorded" not in done.stderr

"""Writes the pinned store: what an older commit made of every convention and example program.

    git worktree add OLD f4d8ed8
    PYTHONPATH=OLD/src:OLD python tests/data/pins/make_store.py OLD NEW_FILE.tar.xz

Run with the code of that commit, in an environment with the frameworks of the examples; programs
whose frameworks are missing are left out. The store has a compacted file, a settled one, segments
of ended and of killed processes, rewards given later, a redaction, the position of a consumer, and
its database of resources and rollouts. Ids and times are what they happen to be; they are pinned by
being committed.
"""

import json
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.examples import checker
from tests.examples.programs import PROGRAMS
from tests.examples.table import is_here

from lightning_otel import Queue, Resources, State, Store
from lightning_otel.types import Event, Link, Span

SPANS = Path(__file__).resolve().parents[1] / "spans"
_KILLED = """
import os, signal, sys
import lightning_otel as lo
with lo.auto_trace(store=sys.argv[1], name="killed", task={"q": 1}), lo.operation("plan"):
    lo.emit_reward(0.25)
    lo.emit_message("about to die")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def recorded(path: Path) -> list[Span]:
    """The spans of one recorded conversation."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        fields["events"] = tuple(Event(**event) for event in fields["events"])
        fields["links"] = tuple(Link(**link) for link in fields["links"])
        found.append(Span(**fields))
    return found


def command(store: Store, *arguments: str) -> None:
    """Run one of our commands on the store."""
    subprocess.run(
        [sys.executable, "-m", "lightning_otel", *arguments, "--store", store.name], check=True
    )


def run_programs(store: Store, *names: str) -> None:
    """Record example programs."""
    ours = (sys.executable, "-m", "lightning_otel", "run", "--quiet", "--store", store.name, "--")
    for program in PROGRAMS:
        if program.name not in names or not all(map(is_here, program.needs)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            host = checker.run(program, Path(folder), (), ours)
        if host.code:
            raise SystemExit(f"{program.name}: {host.err}")


def fill(store: Store) -> None:
    """Record, settle, compact, and record again."""
    spans = sorted(SPANS.glob("*.jsonl")) + sorted(SPANS.glob("openinference/*.jsonl"))
    for number, path in enumerate(spans):
        store.add(recorded(path))
        if number == len(spans) // 2:
            store.settle()
    run_programs(store, *(p.name for p in PROGRAMS if p.source == "openai"))
    store.settle()
    store.compact()
    follower = store.follow("pinned")
    follower.batch(40)
    follower.commit()
    follower.close()
    run_programs(store, *(p.name for p in PROGRAMS if p.source in ("LangChain", "LangGraph")))
    rollouts = store.rollouts().rows()
    for rollout, reward in zip(rollouts[-3:], ("1", "0.5", "-1"), strict=True):
        command(store, "reward", rollout["rollout_id"], reward)
    store.settle()
    command(store, "redact", "--pattern", "Reykjavik|Oslo", "--yes")
    run_programs(store, *(p.name for p in PROGRAMS if p.source in ("AutoGen", "OpenAI Agents SDK")))
    killed = subprocess.run([sys.executable, "-c", _KILLED, store.name])
    assert killed.returncode == -signal.SIGKILL
    state = State.beside(store)
    resources = Resources(state)
    resources.publish("system_prompt", "Be brief.")
    resources.publish("system_prompt", "Be brief and kind.", alias="canary")
    Queue(state).put([{"question": "What is 6*7?"}])
    state.close()


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    return entry.replace(uname="", gname="", uid=0, gid=0, deep=False)


def main(old: str, file: str) -> None:
    """Write the store into a tar file."""
    import lightning_otel

    assert str(lightning_otel.__file__).startswith(old), f"not the code of {old}"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        place.mkdir()
        fill(Store(place / "traces.duckdb"))
        with tarfile.open(file, "w:xz") as tar:
            tar.add(place, "store", filter=_without_owner)


if __name__ == "__main__":
    main(*sys.argv[1:])

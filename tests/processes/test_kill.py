"""``kill -9`` at a random moment, in each way in: every call the program had ended is in the store.

``LIGHTNING_TEST_KILLS`` is how many processes are killed in each way.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes.conftest import WAYS

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

AT_ONCE = 5
STARTS = -(-int(os.environ.get("LIGHTNING_TEST_KILLS", "5")) // AT_ONCE)
MOST_CALLS = 40
# A process and its forks, each with two threads that call for ever. The id of a reply is
# acknowledged when the call has returned, so its span must have been kept by then.
CALLS_WITHOUT_END = """\
import os, sys, threading, openai
for _ in range(int(sys.argv[3]) - 1):
    if os.fork() == 0:
        break
path = os.path.join(sys.argv[2], str(os.getpid()))
acknowledged = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def work():
    with openai.OpenAI(base_url=sys.argv[1], api_key="k") as client:
        while True:
            reply = client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "What is 17*23?"}]
            )
            os.write(acknowledged, f"{reply.id}\\n".encode())
threading.Thread(target=work, daemon=True).start()
work()
"""


def kill_each_in_its_time(folder: Path) -> None:
    """Kill each process that acknowledges into a folder a little after so many calls."""
    left = [random.randint(1, MOST_CALLS) for _ in range(AT_ONCE)]
    alive: dict[Path, int] = {}
    while left or alive:
        for path in folder.iterdir():
            if left and path not in alive and path.suffix != ".killed":
                alive[path] = left.pop()
        for path, wanted in list(alive.items()):
            if len(path.read_text().splitlines()) >= wanted:
                os.kill(int(path.name), signal.SIGKILL)
                alive.pop(path)
                path.rename(path.with_suffix(".killed"))
        time.sleep(random.random() / 200)


@pytest.mark.parametrize("start_number", range(STARTS))
@pytest.mark.parametrize("way", WAYS)
def test_kill_loses_no_acknowledged_call(
    way: str, start_number: int, starter: Callable[[str], Any], server: DemoServer, tmp_path: Path
) -> None:
    """Killed while two threads call, a process leaves each acknowledged call behind, once."""
    program, folder = tmp_path / "app.py", tmp_path / "acknowledged"
    program.write_text(CALLS_WITHOUT_END)
    folder.mkdir()
    start = starter(way)

    with start(program, server.base_url, folder, AT_ONCE) as child:
        kill_each_in_its_time(folder)
        child.communicate(timeout=30)

    spans = Store(start.store).spans().rows()
    kept = Counter(
        span.attributes[c.RESPONSE_ID] for span in spans if c.RESPONSE_ID in span.attributes
    )
    acknowledged = {id for path in folder.iterdir() for id in path.read_text().splitlines()}
    assert child.returncode in (137, -signal.SIGKILL)
    assert len(acknowledged) >= AT_ONCE
    assert acknowledged - set(kept) == set()
    assert set(kept.values()) == {1}
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    # At most two calls under way in each process, and a root span.
    assert sum(span.is_incomplete for span in spans) <= 2 * AT_ONCE + 1

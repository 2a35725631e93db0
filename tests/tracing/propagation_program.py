"""A program that hands work to other processes in each way there is, and says what was recorded.

Arguments: how processes are started, the way, the store, the server's address.
"""

import asyncio
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import openai

from lightning_otel import auto_trace, carried, context, operation

START, WAY, STORE, BASE_URL = sys.argv[1:5] if len(sys.argv) > 4 else ("", "", "", "")
TASKS = 4


def ask(number: int, base_url: str = "") -> str:
    """Ask the model, in an operation of the worker's own."""
    with (
        operation(f"task {number}"),
        openai.OpenAI(base_url=base_url or BASE_URL, api_key="k", max_retries=0) as client,
    ):
        reply = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": f"number {number}"}]
        )
    return str(reply.choices[0].message.content)


def by_pool(processes: Any, urls: list[str]) -> list[str]:
    with ProcessPoolExecutor(2, mp_context=processes) as pool:
        return list(pool.map(carried(ask), range(TASKS), urls))


def by_run_in_executor(processes: Any, urls: list[str]) -> list[str]:
    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(2, mp_context=processes) as pool:
            asked = [
                loop.run_in_executor(pool, carried(ask), number, url)
                for number, url in enumerate(urls)
            ]
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def by_multiprocessing_pool(processes: Any, urls: list[str]) -> list[str]:
    with processes.Pool(2) as pool:
        found = pool.starmap(carried(ask), enumerate(urls))
        pool.close()
        pool.join()
    return list(found)


def by_process(processes: Any, urls: list[str]) -> list[str]:
    """A process for each; with fork nothing is pickled."""
    started = [
        processes.Process(target=carried(ask), args=(number, url))
        for number, url in enumerate(urls)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    return [f"You said: number {number}" for number in range(TASKS)]


def main() -> None:
    """Do the work in a rollout, with workers that outlive another one."""
    processes = multiprocessing.get_context(START)
    way = {
        "pool": by_pool,
        "run_in_executor": by_run_in_executor,
        "multiprocessing": by_multiprocessing_pool,
        "process": by_process,
    }[WAY]
    with (
        auto_trace(store=STORE, rollout_id="r1", attempt_id="2", agent="lead") as recording,
        context(agent="worker", resources={"*": {"prompt": "v3"}}),
        operation("hand out") as outer,
    ):
        said = way(processes, [BASE_URL] * TASKS)
    agents = [path.agent for path in recording.trajectories()]
    found = {
        "said": said,
        "outer": outer.span_id,
        "agents": agents,
        "spans": len(recording.spans()),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

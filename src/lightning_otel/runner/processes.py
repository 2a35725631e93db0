"""Workers as processes of this machine."""

import contextlib
import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection

from lightning_otel.errors import ConfigError
from lightning_otel.runner.worker import Runner


class Process:
    """A worker in a process of its own, which ends after its attempt when this one dies."""

    def __init__(self, runner: Runner, *, until_empty: bool) -> None:
        """Start it, or raise ConfigError if it cannot be sent there."""
        # A fresh interpreter: a fork would take along the threads' locks of this one. The end of a
        # pipe says stop; a shared event's lock would stay locked by a worker killed in it.
        context = multiprocessing.get_context("spawn")
        heard, self._tell = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run_worker,
            args=(runner, heard),
            kwargs={"until_empty": until_empty},
            name=runner.worker_id,
        )
        try:
            self._process.start()
        except Exception as exc:  # whatever an object raises that cannot be sent
            raise ConfigError(
                f"the agent {runner.agent.name!r} (or a hook or evaluator) cannot be sent to "
                f"another process ({exc}); define it at the top of a module, or run threads"
            ) from exc
        finally:
            heard.close()

    def is_alive(self) -> bool:
        """Return whether it works."""
        return self._process.is_alive()

    def describe_end(self) -> str:
        """Return why it died; empty if it ended in order."""
        self._tell.close()
        code = self._process.exitcode
        self._process.close()
        if not code:
            return ""
        if code > 0:
            return f"its process ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process was ended by signal {-code}"

    def stop(self) -> None:
        """Have it end after its present attempt."""
        self._tell.close()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join()


def _run_worker(runner: Runner, heard: "Connection[object, object]", *, until_empty: bool) -> None:
    # An interrupt of the terminal reaches everybody; whoever started this says what is to be done.
    # A handler, since what is ignored would be ignored by the agent's own children too.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    stop = threading.Event()

    def listen() -> None:
        # Readable once the other end is closed: by whoever started this process, or its death.
        heard.poll(None)
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    runner.run(until_empty=until_empty, stop=stop)

"""Workers as processes of this machine."""

import contextlib
import multiprocessing
import signal
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING

from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.runner.crew import Duty


def start(duty: "Duty") -> "Process":
    """Start a worker in a process of its own.

    Raises:
        ConfigError: What it is to do cannot be sent there.
    """
    return Process(duty)


class Process:
    """A worker in a process of its own, which ends after its attempt when this one dies."""

    def __init__(self, duty: "Duty") -> None:
        # A fresh interpreter: a fork would take along the threads' locks of this one. The end of a
        # pipe says stop; a shared event's lock would stay locked by a worker killed in it.
        context = multiprocessing.get_context("spawn")
        told, self._tell = context.Pipe(duplex=False)
        self._process = context.Process(target=_work_duty, args=(duty, told), name=duty.worker_id)
        try:
            self._process.start()
        except Exception as exc:  # whatever an object raises that cannot be sent
            raise ConfigError(
                f"the agent {duty.agent.name!r} (or a hook or evaluator) cannot be sent to another "
                f"process ({exc}); define it at the top of a module, or run threads"
            ) from exc
        finally:
            told.close()

    @property
    def pid(self) -> int | None:
        """The process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether it works."""
        return self._process.is_alive()

    def ended(self) -> str:
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


class _Told:
    """Set when the other end of a pipe is closed: by whoever started this process, or its death."""

    def __init__(self, told: "Connection[object, object]") -> None:
        self._told = told

    def is_set(self) -> bool:
        return self._told.poll(0)

    def wait(self, timeout: float) -> bool:
        return self._told.poll(timeout)


def _work_duty(duty: "Duty", told: "Connection[object, object]") -> None:
    # An interrupt of the terminal reaches everybody; whoever started this says what is to be done.
    # A handler, since what is ignored would be ignored by the agent's own children too.
    signal.signal(signal.SIGINT, _let_pass)
    duty.run(_Told(told))


def _let_pass(number: int, frame: FrameType | None) -> None:
    pass

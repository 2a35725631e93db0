"""A worker: takes training requests, one at a time, and runs them.

After a kill the next worker continues the run from its last checkpoint.
"""

import glob
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewards.totals import KEY
from lightning_otel.runner.worker import Stop
from lightning_otel.state.requests import LEASE_S, Requests, TrainingRequest
from lightning_otel.trainer import Fit, Trainer

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
_WAIT_S: Final = 0.2
_LONGEST_REASON: Final = 2_000

Make = Callable[[str, Mapping[str, Any]], Trainer]
"""Makes a trainer of an algorithm's name and the request's settings."""
Ended = Callable[[TrainingRequest, Fit | None, str], None]
"""Called with each request that ended, its result, and the reason of a failure."""


class TrainingWorker:
    """Runs training requests."""

    def __init__(
        self,
        requests: Requests,
        make: Make,
        *,
        algorithm: str = "",
        train: Sequence[Any] = (),
        val: Sequence[Any] = (),
        lease_s: float = LEASE_S,
    ) -> None:
        """Configure the worker; it takes nothing yet.

        ``algorithm`` is the default and the only one that is trained; empty takes every request.
        Without tasks it learns from what is recorded; a request for a category takes its tasks.
        """
        self._requests = requests
        self._make = make
        self._algorithm = algorithm
        self._train, self._val = train, val
        self._heartbeat_s = lease_s / 4
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"

    def work(self, stop: Stop, ended: Ended) -> int:
        """Take requests until told to stop; return how many were done."""
        count = 0
        takes: Collection[str] | None = [self._algorithm] if self._algorithm else None
        announced_s = -math.inf
        while not stop.is_set():
            if time.monotonic() - announced_s >= self._heartbeat_s:
                announced_s = time.monotonic()
                self._requests.announce(self.worker_id, self._algorithm)
            request = self._requests.claim(self.worker_id, takes)
            if request is None:
                stop.wait(POLL_S)
                continue
            log.info("training %s begins", request.request_id)
            count += self._do_request(request, stop, ended)
        self._requests.dismiss(self.worker_id)
        return count

    def _do_request(self, request: TrainingRequest, stop: Stop, ended: Ended) -> bool:
        fit: Fit | None = None
        run_id = reason = ""
        try:
            fit = self._fit_request(request, stop)
        except Exception as exc:  # noqa: BLE001  # it ends the request, and not the worker
            reason = f"{type(exc).__name__}: {exc}"[:_LONGEST_REASON]
        if fit is not None:
            run_id = fit.run.run_id
            if fit.run.status == "stopped":
                return False
        if not self._requests.finish(request, run_id=run_id, reason=reason):
            log.warning("training %s is another worker's by now", request.request_id)
            return False
        ended(request, fit, reason)
        return True

    def _fit_request(self, request: TrainingRequest, stop: Stop) -> Fit | None:
        """Run a request, or give it back; return None if its run was over."""
        algorithm = request.algorithm or self._algorithm
        if not algorithm:
            raise ConfigError(
                "neither the request nor the worker names an algorithm; ask for one, or start the "
                "worker with one"
            )
        train, val, settings = self._train, self._val, request.settings
        if request.category and train:
            train, val = (
                [task for task in tasks if _category_of(task) == request.category]
                for tasks in (train, val)
            )
            if not train:
                raise ConfigError(f"no task of the worker has the category {request.category!r}")
        elif request.category:
            # Of what is recorded, the steps that were made with a resource of the category.
            pattern = f"*{glob.escape(f'[{request.category}]')}@*"
            settings = {**settings, "select": {"resource_version": pattern}}
        trainer = self._make(algorithm, settings)
        if request.run_id:
            try:
                if trainer.runs.get(request.run_id).status == "succeeded":
                    return None
                trainer.resume_from_checkpoint(request.run_id)
            except NotFoundError:
                log.warning("training run %s is gone; another one begins", request.run_id)
        trainer.started = lambda run: self._note_run(request, run.run_id)
        fitting = trainer.fit_async(train, val, follow=False)
        is_mine, seen_s = True, time.monotonic()
        while (fit := fitting.wait(_WAIT_S)) is None:
            if time.monotonic() - seen_s >= self._heartbeat_s:
                seen_s = time.monotonic()
                self._requests.announce(self.worker_id, self._algorithm)
                is_mine = self._requests.heartbeat(request)
            if stop.is_set() or not is_mine:
                fitting.stop()
        if fit.run.status == "stopped" and is_mine:
            self._requests.release(request, run_id=fit.run.run_id)
        return fit

    def _note_run(self, request: TrainingRequest, run_id: str) -> None:
        self._requests.heartbeat(request, run_id=run_id)


def _category_of(task: Any) -> object:
    return task.get(KEY) if isinstance(task, Mapping) else None

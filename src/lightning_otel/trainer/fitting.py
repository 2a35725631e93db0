"""A training run beside the program that began it: stopped, waited for, awaited."""

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

from lightning_otel.trainer.session import Fit


class Fitting:
    """A training run in a thread of its own."""

    def __init__(self, fit: Callable[[], Fit], stop: threading.Event) -> None:
        """Begin.

        Args:
            fit: Trains until it is told to stop.
            stop: Tells it.
        """
        self._stop = stop
        self._fit = fit
        self._done: Fit | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run_thread, name="lightning-otel-trainer")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while it trains or waits for experience."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Have it end after its present step, which is kept."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> Fit | None:
        """Wait for the result; return None if the time is up first.

        Raises:
            LightningOtelError: What it failed with.
        """
        self._thread.join(timeout_s)
        if self._failed is not None:
            raise self._failed
        return self._done

    def __await__(self) -> Generator[Any, None, Fit | None]:
        return asyncio.to_thread(self.wait).__await__()

    def _run_thread(self) -> None:
        try:
            self._done = self._fit()
        except BaseException as exc:  # noqa: BLE001  # raised where it is waited for
            self._failed = exc

"""Metrics of a training run in TensorBoard, Weights & Biases or MLflow, by their own settings.

A run here is one run there, also after it was resumed.
"""

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel.errors import ConfigError, NotInstalledError, warn_once

if TYPE_CHECKING:
    from lightning_otel.algorithms.run import Run

_PROJECT: Final = "lightning-otel"
_RUN_TAG: Final = "lightning_otel.run_id"
_NAME: Final = re.compile(r"[^\w\-./ ]")


class _Reporter(NamedTuple):
    log: Callable[[int, dict[str, float]], None]
    close: Callable[[bool], None]


def reporter_names(choice: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names that ``report_to`` holds; ``none`` and nothing are none."""
    names = (choice,) if isinstance(choice, str) else tuple(choice or ())
    names = tuple(name for name in names if name != "none")
    for name in names:
        if name not in _OPENERS:
            raise ConfigError(f"report_to has {name!r}; it takes {', '.join(_OPENERS)}")
    return names


@contextlib.contextmanager
def open_reports(reported: "Run") -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Open the reporters of a run; yield what reports a step. Log failures once."""
    with contextlib.ExitStack() as opened:
        names = reported.config.report_to
        reporters = [(name, opened.enter_context(_open(name, reported))) for name in names]

        def report(step: int, metrics: Mapping[str, float]) -> None:
            finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
            for name, reporter in reporters:
                with _log_failure(name):
                    reporter.log(step, finite)

        yield report


@contextlib.contextmanager
def _open(name: str, reported: "Run") -> Iterator[_Reporter]:
    try:
        reporter = _OPENERS[name](reported)
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            f"report_to={name!r} needs {exc.name}; pip install {_PACKAGES[name]}"
        ) from exc
    except Exception as exc:
        raise ConfigError(
            f"report_to={name!r} cannot begin: {type(exc).__name__}: {exc}; mend its settings, or "
            "leave it out"
        ) from exc
    is_done = False
    try:
        yield reporter
        is_done = True
    finally:
        with _log_failure(name):
            reporter.close(is_done)


@contextlib.contextmanager
def _log_failure(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # a library of others, on which no training depends
        warn_once(f"report_to={name!r}: {type(exc).__name__}: {exc}", key=f"report_to {name}")
        logging.getLogger("lightning_otel").debug("report_to=%r failed", name, exc_info=True)


def _open_tensorboard(reported: "Run") -> _Reporter:
    """Source: https://docs.pytorch.org/docs/stable/tensorboard.html; tensorboardX has the same."""
    try:
        module = import_module("torch.utils.tensorboard")
    except ImportError:
        module = import_module("tensorboardX")
    folder = str(reported.run_dir / "tensorboard")
    last = reported.step
    # Files are named by the second, and a resumed run must not replace what it wrote before.
    writer = module.SummaryWriter(
        folder, purge_step=last + 1 if last else None, filename_suffix=f".{time.time_ns()}"
    )

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return _Reporter(log, lambda _: writer.close())


def _open_wandb(reported: "Run") -> _Reporter:
    """Source: https://docs.wandb.ai/ref/python/init."""
    wandb = import_module("wandb")
    run = wandb.init(
        project=wandb.setup().settings.project or _PROJECT,
        id=reported.run.run_id,
        name=reported.run.run_id,
        config=reported.config.describe(),
        dir=str(reported.run_dir),
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(console="off"),
    )
    return _Reporter(
        lambda step, metrics: run.log(metrics, step=step),
        lambda is_done: run.finish(exit_code=0 if is_done else 1),
    )


def _open_mlflow(reported: "Run") -> _Reporter:
    """Source: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html."""
    client = import_module("mlflow.tracking").MlflowClient()
    metric = import_module("mlflow.entities").Metric
    experiment = client.get_experiment_by_name(_PROJECT)
    place = client.create_experiment(_PROJECT) if experiment is None else experiment.experiment_id
    is_same = f"tags.`{_RUN_TAG}` = '{reported.run.run_id}'"
    runs = client.search_runs([place], is_same, max_results=1)
    if runs:
        run_id = runs[0].info.run_id
        client.update_run(run_id, "RUNNING")
    else:
        tags = {_RUN_TAG: reported.run.run_id}
        run_id = client.create_run(place, tags=tags, run_name=reported.run.run_id).info.run_id
        for name, value in reported.config.describe().items():
            client.log_param(run_id, name, str(value)[:500])

    def log(step: int, metrics: dict[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        names = {name: _NAME.sub("_", name)[:250] for name in metrics}
        client.log_batch(
            run_id, [metric(names[name], value, now_ms, step) for name, value in metrics.items()]
        )

    return _Reporter(
        log, lambda is_done: client.set_terminated(run_id, "FINISHED" if is_done else "FAILED")
    )


_OPENERS: Final[Mapping[str, Callable[["Run"], _Reporter]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
_PACKAGES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}

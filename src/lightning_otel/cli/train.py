"""``train``: an algorithm learns from a store, or from tasks an agent is run on."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_otel.algorithms.options import RunConfig, TrainingOptions
from lightning_otel.cli.names import ALGORITHM, RUN
from lightning_otel.cli.options import (
    Form,
    SignalStop,
    filter_options,
    format_option,
    load_named,
    store_option,
)
from lightning_otel.cli.output import (
    count_noun,
    print_data,
    print_note,
    print_rows,
    suggest,
)
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.types.values import parse_json
from lightning_otel.views.options import list_options

if TYPE_CHECKING:
    from lightning_otel.state.requests import TrainingRequest
    from lightning_otel.trainer import Fit, Fitting, Trainer

_FILE = click.Path(exists=True, dir_okay=False)
_COLUMNS = ("run_id", "algorithm", "status", "step", "reason")


@click.command()
@click.argument("algorithm", metavar="[ALGORITHM]", type=ALGORITHM, required=False)
@click.option("--agent", metavar="MODULE:NAME", help="Agent that runs the tasks.")
@click.option("--tasks", type=_FILE, help="Training tasks, as JSON lines.")
@click.option("--val", type=_FILE, help="Held-out tasks; a better version on them becomes live.")
@click.option("--option", "-o", "options", multiple=True, metavar="NAME=VALUE",
              help="An option of the algorithm; may be repeated.")  # fmt: skip
@filter_options(list_options(TrainingOptions, RunConfig))
@click.option("--follow", is_flag=True, help="Wait for new rollouts until stopped.")
@click.option("--resume", metavar="RUN", type=RUN, help="Continue a run (@last) or a checkpoint.")
@click.option("--save", metavar="FOLDER", help="Copy the last checkpoint there.")
@click.option("--worker", "is_worker", is_flag=True,
              help="Run the training requested by HTTP, until stopped.")  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="List past runs.")
@format_option
@store_option
def train(
    algorithm: str | None, agent: str | None, tasks: str | None, val: str | None,
    options: tuple[str, ...], follow: bool, resume: str | None, save: str | None, is_worker: bool,
    is_list: bool, form: Form | None, store: str | None, **more: Any,
) -> None:  # fmt: skip
    """Run a training algorithm (baseline, apo, sft, … or a package's own) on recorded rollouts.

    With --agent and --tasks it runs the agent itself. The result is published as canary; with --val
    it becomes live if it is better on those tasks. Ctrl-C ends the run after the current step.

    With --worker it runs the training requested by HTTP (POST /training/trigger), one request after
    the other: of ALGORITHM, or of any.
    """
    from lightning_otel import algorithms
    from lightning_otel.trainer import Trainer
    from lightning_otel.views.plot import Progress

    if is_list:
        _list_runs(store, form)
        return
    if is_worker and (resume or save or follow):
        raise ConfigError("a worker takes what is asked for; leave out --resume, --save, --follow")
    train_tasks, val_tasks = _read_tasks(tasks), _read_tasks(val)
    loaded = load_named(agent, "agent") if agent else None
    values = {name: value for name, value in more.items() if value not in (None, ())}

    def make(name: str, overrides: Mapping[str, Any]) -> Trainer:
        settings = {**values, **_parse_options(options), **overrides}
        extras = settings.pop("options", {})
        return Trainer(loaded, name, store=store, **{**settings, **extras})

    if is_worker:
        _work_until_signal(make, algorithm or "", train_tasks, val_tasks, store)
        return
    if algorithm is None:
        raise ConfigError(f"no algorithm is named; there are {', '.join(algorithms.names())}")
    if loaded is None and not train_tasks and not follow:
        _require_store(store)
    trainer = make(algorithm, {})
    if resume:
        trainer.resume_from_checkpoint(resume)
    with Progress() as trainer.progress:
        # A step is never cut off: the run goes on beside, and is told to stop.
        fitting = trainer.fit_async(train_tasks, val_tasks, follow=follow)
        fit = _wait_for_fit(fitting)
    if save:
        trainer.save_checkpoint(save)
    row = _describe_fit(fit)
    print_data(form, [row], document=row)
    _tell_fit(fit, store)


def _require_store(store: str | None) -> None:
    """Refuse to learn from rollouts where there is no store: to look makes none."""
    layout = Store(store).layout
    if layout is not None:
        layout.require()


def _work_until_signal(
    make: "Callable[[str, Mapping[str, Any]], Trainer]", algorithm: str, tasks: Sequence[Any],
    val: Sequence[Any], store: str | None,
) -> None:  # fmt: skip
    from lightning_otel.state import State
    from lightning_otel.state.requests import Requests
    from lightning_otel.trainer.worker import TrainingWorker

    def ended(request: "TrainingRequest", fit: "Fit | None", reason: str) -> None:
        print_note(f"{request.request_id}: {reason or 'done'}")
        if fit is not None:
            _tell_fit(fit, store)

    worker = TrainingWorker(
        Requests(State.beside(Store(store))), make, algorithm=algorithm, train=tasks, val=val
    )
    print_note(f"⚡ {worker.worker_id} trains what is asked for: POST /training/trigger")
    with SignalStop() as stop:
        count = worker.work(stop, ended)
    print_note(f"{count_noun(count, 'request')} done")


def _parse_options(texts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in texts:
        name, mark, text = option.partition("=")
        if not mark or not name.isidentifier():
            raise ConfigError(f"the option {option!r} names no value; write it as name=value")
        options[name] = parse_json(text)
    return options


def _read_tasks(name: str | None) -> list[Any]:
    if name is None:
        return []
    lines = Path(name).read_text(encoding="utf-8").splitlines()
    tasks: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as exc:
                raise ConfigError(f"{name}, line {number}: {exc}; write a task a line") from exc
    if not tasks:
        raise ConfigError(f"{name} holds no task; write one a line, as JSON")
    return tasks


def _wait_for_fit(fitting: "Fitting") -> "Fit":
    with SignalStop() as stop:
        while (fit := fitting.wait(0.2)) is None:
            if stop.is_set():
                fitting.stop()
                print_note("stopping after this step; it is kept")
                stop.clear()
    return fit


def _describe_fit(fit: "Fit") -> dict[str, Any]:
    return {
        "run_id": fit.run.run_id,
        "status": fit.run.status,
        "step": fit.run.step,
        "metrics": dict(fit.metrics),
        "resources": {name: version.version for name, version in fit.resources.items()},
        "promoted": list(fit.promoted),
        "withdrawn": list(fit.withdrawn),
        "reason": fit.verdict.reason,
        "left_out": dict(fit.left_out),
    }


def _tell_fit(fit: "Fit", store: str | None) -> None:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(fit.metrics.items()))
    print_note(
        f"{fit.run.run_id} {fit.run.status} after {count_noun(fit.run.step, 'step')}: {metrics}"
    )
    if fit.run.reason:
        print_note(fit.run.reason)
    for name, version in fit.resources.items():
        where = fit.place_of(name)
        print_note(f"{name} version {version.version} is {where}: {fit.verdict.reason}")
    suggest("train --list", store)


def _list_runs(store: str | None, form: Form | None) -> None:
    from lightning_otel.state import State
    from lightning_otel.state.runs import Runs

    state = State.beside(Store(store))
    runs = Runs(state).all() if state.is_made else []  # to look makes nothing
    rows = [{name: getattr(run, name) for name in _COLUMNS} for run in runs]
    print_rows(rows, _COLUMNS, form=form)
    if rows:
        suggest("plot --run @last", store)
    else:
        print_note("no training run yet")
        suggest("train baseline", store)

"""``run``: a program as it is, recorded as one rollout, with its own exit code."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_otel.cli.output import store_option, talk
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.exporters.otlp import Forwarder
    from lightning_otel.store import Store
    from lightning_otel.store.layout import Layout
    from lightning_otel.tracing import Recording

_NOTHING_CAPTURED = 3
_NOT_FOUND = 127
_POLL_S = 1.0
_LAST_CHANCE_S = 5.0
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--require-spans", is_flag=True, help="Exit with 3 if nothing was captured.")
@click.option("--rollout-id", metavar="ID", help="Id of the rollout; a fresh one by default.")
@click.option("--task", help="The rollout's task, JSON or text.")
@click.option("--agent", help="Who acts, where the program does not say.")
@click.option(
    "--reward-evaluator",
    metavar="MODULE:FUNCTION",
    help="Judges the finished rollout: gets its Recording, gives a number.",
)
@click.option("--quiet", is_flag=True, help="No closing line.")
@store_option
def run(
    command: Sequence[str],
    require_spans: bool,
    rollout_id: str | None,
    task: str | None,
    agent: str | None,
    reward_evaluator: str | None,
    quiet: bool,
    store: str | None,
) -> int:
    """Run a program with recording on: lightning-otel run -- python app.py.

    ``python`` means the Python that lightning-otel is installed in. The exit code is the program's.
    """
    from lightning_otel import provider, tracing
    from lightning_otel.store import Store

    evaluator = _loaded(reward_evaluator) if reward_evaluator else None
    program = _resolved(command)
    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("run needs a store on disk; name one with --store")
    opened.layout.create()
    provider.leave_otlp_to_the_store()
    options = tracing.Options(
        store=opened, rollout_id=rollout_id, task=_json_or_text(task), agent=agent,
        reward_evaluator=evaluator,
    )  # fmt: skip
    with _Forwarding(opened.layout) as forwarding:
        scope = tracing.Scope(options, _name_of(command))
        scope.recording.span_processes()
        forwarding.begin(scope.recording.rollout_id)
        code = _run_child(program, _environment(opened, scope.recording))
        failure = subprocess.CalledProcessError(code, list(command)) if code else None
        scope.end(failure)
        opened.writer().seal()
    captured = _summary(opened, scope.recording, forwarding, quiet=quiet)
    if require_spans and not captured and code == 0:
        return _NOTHING_CAPTURED
    return 128 - code if code < 0 else code


def _loaded(where: str) -> Any:
    module, _, name = where.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"cannot load the reward evaluator {where!r}: {exc}; write it as module:function"
        ) from exc
    finally:
        sys.path.pop(0)


def _json_or_text(task: str | None) -> object:
    import json

    try:
        return json.loads(task) if task is not None else None
    except ValueError:
        return task


def _resolved(command: Sequence[str]) -> list[str]:
    """The command with its program found: our own Python, its scripts, or anything on the path."""
    name, *rest = command
    if name in ("python", "python3"):
        return [sys.executable, *rest]
    if name.endswith(".py") and Path(name).is_file() and not os.access(name, os.X_OK):
        return [sys.executable, name, *rest]
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        talk(f"error: no program {name!r}")
        talk("why:   it is neither a file nor on the PATH")
        talk("try:   lightning-otel run -- python your_agent.py")
        sys.exit(_NOT_FOUND)
    return [found, *rest]


def _name_of(command: Sequence[str]) -> str:
    """What a person would call the program: the script or module, not the interpreter."""
    words = [word for word in command[1:] if not word.startswith("-")]
    is_python = command[0] in ("python", "python3") and words
    return Path(words[0] if is_python else command[0]).name


def _environment(opened: "Store", recording: "Recording") -> dict[str, str]:
    from lightning_otel import config, startup

    return config.child_environment(
        store=opened.name,
        rollout_id=recording.rollout_id,
        attempt_id=recording.attempt_id,
        trace_parent=f"00-{recording.trace_id}-{recording.span_id}-01",
        startup=Path(startup.__path__[0]),
    )


def _run_child(program: Sequence[str], environment: dict[str, str]) -> int:
    """Run the program to its end, handing on the signals we get; gives its return code."""
    child = subprocess.Popen(program, env=environment)
    previous = {}

    def hand_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    for number in _FORWARDED:
        previous[number] = signal.signal(number, hand_on)
    # From a terminal the child gets Ctrl-C itself; from anywhere else only we do.
    on_interrupt: Any = signal.SIG_IGN if sys.stdin is not None and _is_terminal() else hand_on
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, on_interrupt)
    try:
        return child.wait()
    finally:
        for known, handler in previous.items():
            signal.signal(known, handler)


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


class _Forwarding:
    """Sends the rollout's spans to the user's OTLP endpoint while the program runs."""

    def __init__(self, layout: "Layout") -> None:
        self._layout = layout
        self._earlier = {path.name for path in layout.segments()}
        self._forwarder: "Forwarder | None" = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.waiting = 0
        self.delivered = 0

    def begin(self, rollout_id: str) -> None:
        """Follow the rollout from here on, if the environment names an endpoint."""
        from lightning_otel.exporters.otlp import Forwarder, otlp_exporter
        from lightning_otel.provider import wants_otlp

        if not wants_otlp():
            return
        self._forwarder = Forwarder(self._layout, rollout_id, otlp_exporter(), self._earlier)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __enter__(self) -> "_Forwarding":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is None or self._forwarder is None:
            return
        self._stop.set()
        self._thread.join(_LAST_CHANCE_S)
        if not self._thread.is_alive():
            self.waiting = self._forwarder.poll()
        self.delivered = self._forwarder.delivered

    def _follow(self) -> None:
        assert self._forwarder is not None
        while not self._stop.wait(_POLL_S):
            self.waiting = self._forwarder.poll()


def _summary(
    opened: "Store", recording: "Recording", forwarding: _Forwarding, *, quiet: bool
) -> int:
    """Say what was kept and where; gives the number of spans the program itself made."""
    report = opened.report(rollout_id=recording.rollout_id)
    captured = max(0, report.spans - 1)  # without the run's own root span
    if quiet:
        return captured
    talk(
        f"⚡ {captured} spans, {report.calls} calls, {report.rewards} rewards → {opened.name}"
        f"  ({report.transitions} transitions, {report.exact} with exact token ids)"
    )
    if forwarding.delivered or forwarding.waiting:
        waiting = f", {forwarding.waiting} NOT delivered" if forwarding.waiting else ""
        talk(f"  OTLP: {forwarding.delivered} spans delivered{waiting}")
    if not captured:
        talk(
            "  warning: the program made no span; does it call a model through the openai client, "
            "in a Python that has lightning-otel, without -I, -E or -S? lightning-otel doctor tells"
        )
    elif not report.rewards:
        talk("  no reward yet: emit_reward(1.0), or: lightning-otel reward @last 1.0")
    talk("  → lightning-otel show @last")
    return captured

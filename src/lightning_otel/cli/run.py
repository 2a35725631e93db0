"""``run``: a program as it is, recorded as one rollout, with its own exit code."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from lightning_otel.cli import print_error, silence_stream
from lightning_otel.cli.counts import count_records, tell_losses, tell_unnamed
from lightning_otel.cli.gate import Gate
from lightning_otel.cli.options import load_named, store_option
from lightning_otel.cli.output import count_noun, print_note, suggest
from lightning_otel.cli.program import (
    ProgramError,
    child_environment,
    find_program,
    program_name,
    run_child,
    shell_exit_code,
    take_unrecorded,
)
from lightning_otel.errors import ConfigError, LightningOtelError, StoreError

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.exporters.forwarding import Forwarder
    from lightning_otel.tracing import Options, Recording
    from lightning_otel.types import Span

_NOTHING_CAPTURED = 3
_QUESTION = (
    "does the program call a model through a library that is known, in a Python that has "
    "lightning-otel, without -I, -E or -S?"
)
_NO_SPAN = f"the program made no span; {_QUESTION}"
_NO_CALL = f"no request to a model was recorded; {_QUESTION}"
_FAILED_FIRST = "the program failed before its first span; its rollout is kept as failed"


# What stands after the program's name is the program's.
@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--require-spans", is_flag=True, help="Exit with 3 if no model call was captured.")
@click.option("--rollout-id", metavar="ID", help="Id of the rollout [default: a new one].")
@click.option("--task", help="Task of the rollout, JSON or text.")
@click.option("--agent", help="Agent name, if the program gives none.")
@click.option(
    "--reward-evaluator",
    metavar="MODULE:FUNCTION",
    help="Scores the finished rollout: takes its Recording, returns a number.",
)
@click.option(
    "--transform",
    "transforms",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Takes each span before it is written; returns the span to store, or None.",
)
@click.option(
    "--enable-retokenization-fix",
    is_flag=True,
    help="Request token ids and logprobs from vLLM-like servers.",
)
@click.option(
    "--children",
    type=click.Choice(["all", "own", "none"]),
    help="Record other processes, too: all, its own (forks and workers) or none [default: all].",
)
@click.option("--apply", is_flag=True, help="Substitute the live resources in requests.")
@click.option("--proxy", is_flag=True, help="Record any program's requests by a proxy, too.")
@click.option("--only", is_flag=True, help="With --proxy: record nothing inside the program.")
@click.option(
    "--debug", is_flag=True, help="Print what is recorded and what is not, and why, on stderr."
)
@click.option("--quiet", is_flag=True, help="Print no summary.")
@store_option
def run(
    command: Sequence[str],
    require_spans: bool,
    task: str | None,
    reward_evaluator: str | None,
    transforms: Sequence[str],
    children: str | None,
    proxy: bool,
    only: bool,
    quiet: bool,
    store: str | None,
    **switches: Any,
) -> int:
    """Run a program with recording on: lightning-otel run -- python app.py.

    python and app.py alone mean the Python that lightning-otel is installed in. The exit
    code is the program's.
    """
    from lightning_otel.store.transforms import add_named_transforms, load_transform
    from lightning_otel.types.values import parse_json

    evaluator = load_named(reward_evaluator) if reward_evaluator else None
    for name in transforms:
        load_transform(name)
    add_named_transforms(transforms)
    if only and not proxy:
        raise ConfigError("--only goes with --proxy; add it")
    # Without the libraries that are asked for no program is started.
    if proxy:
        import_module("lightning_otel.proxy")
    if switches["apply"]:
        import_module("lightning_otel.resources")
    try:
        opened = _on_disk(store)
    except StoreError as exc:
        _tell_bare(exc)
        code = shell_exit_code(run_child(find_program(command), None))
        return _NOTHING_CAPTURED if require_spans and code == 0 else code
    settings = {"store": opened, "task": parse_json(task), "reward_evaluator": evaluator}
    chosen = {name: value or None for name, value in switches.items()}
    options = cast("Options", {**settings, **chosen})
    gate = Gate(options, is_wanted=proxy, is_only=only)
    recorded = _ProgramRun(opened, options, program_name(command), transforms, children, gate)
    try:
        code = recorded.run(find_program(command))
    except ProgramError as exc:
        print_error(exc.what, exc.why, exc.remedy)
        return exc.code
    calls = _tell_captured(recorded, store, is_quiet=quiet)
    if require_spans and not calls and code == 0:
        return _NOTHING_CAPTURED
    return shell_exit_code(code)


def _tell_bare(problem: LightningOtelError) -> None:
    print_error(problem.what, problem.why, problem.remedy)
    print_note("the program runs without recording")


def _on_disk(store: str | None) -> "Store":
    from lightning_otel.dataset import Store

    opened = Store(store).local
    if opened.layout is None:
        raise ConfigError(
            f"run needs a store on disk, which {opened.name} is not; name one with "
            "--store, and send the spans on by OTLP"
        )
    return opened


def _tell_captured(recorded: "_ProgramRun", store: str | None, *, is_quiet: bool) -> int:
    try:
        return recorded.tell(store, is_quiet=is_quiet)
    except LightningOtelError as exc:
        # The program's exit code counts, whatever became of its store meanwhile.
        print_error(exc.what, exc.why, exc.remedy or "lightning-otel doctor")
        return 0
    except BrokenPipeError:
        silence_stream(sys.stderr)
        return 1


@dataclass(slots=True)
class _ProgramRun:
    """One program under a rollout; where nothing can be recorded it runs all the same."""

    _opened: "Store"
    _options: "Options"
    _name: str
    _transforms: Sequence[str]
    _children: str | None
    _gate: Gate
    _started_ns: int = field(default_factory=time.time_ns)
    _recording: "Recording | None" = None
    _code: int = 0
    _problem: LightningOtelError | None = None
    _forwarder: "Forwarder | None" = None
    _is_whole: bool = False
    _counts: Mapping[str, Any] | None = None
    _has_root: bool = False
    _is_divided: bool = False

    def run(self, program: Sequence[str]) -> int:
        self._problem = _find_problem(self._opened)
        if self._problem is None:
            return self._record_program(program)
        if not isinstance(self._problem, ConfigError):
            _tell_bare(self._problem)
        return run_child(program, None)

    def _record_program(self, program: Sequence[str]) -> int:
        from lightning_otel import config, provider, tracing
        from lightning_otel.store.maintenance import maintain_store

        assert self._opened.layout is not None
        provider.leave_otlp_to_the_store()
        scope = tracing.Scope({**self._options, "transforms": [self._keep_root]}, self._name)
        recording = self._recording = scope.opened
        recording.span_processes()
        if config.wants_otlp():
            from lightning_otel.cli.destinations import start_forwarding

            self._forwarder = start_forwarding(
                self._opened.layout, recording.rollout_id, recording.trace_id, self._started_ns
            )
        try:
            with contextlib.closing(self._gate), maintain_store(self._opened.layout):
                environment = self._make_environment(recording)
                program, environment = self._gate.open(scope, program, environment)
                code = self._code = run_child(program, environment)
            scope.end(subprocess.CalledProcessError(code, list(program)) if code else None)
        except ProgramError as exc:
            scope.end(exc)
            raise
        finally:
            self._opened.writer().seal()
            if self._forwarder is not None:
                self._forwarder.finish(is_whole=True)
        return code

    def _keep_root(self, span: "Span") -> "Span | None":
        """Count all as the root span ends; keep it, unless all stands in tasks of their own."""
        recording = self._recording
        if recording is None or span.end_ns is None or span.span_id != recording.span_id:
            return span
        with contextlib.suppress(OSError, LightningOtelError):
            counts = self._counts = self._count_spans(recording)
            is_alone = bool(counts["spans"]) and not counts["outside"]
            self._is_divided = is_alone and not _is_named(self._options)
        self._has_root = not self._is_divided
        return span if self._has_root else None

    def _make_environment(self, recording: "Recording") -> dict[str, str]:
        from lightning_otel import config
        from lightning_otel.provider import startup

        options = self._options
        environment = child_environment(
            store=self._opened.name,
            rollout_id=recording.rollout_id,
            attempt_id=recording.attempt_id,
            trace_parent=_trace_parent(recording),
            startup=Path(startup.__path__[0]),
            children=self._children or config.CHILDREN.read(),
            agent=options.get("agent"),
            transforms=self._transforms,
            enable_retokenization_fix=bool(options.get("enable_retokenization_fix")),
            apply=bool(options.get("apply")),
            debug=bool(options.get("debug")),
        )
        # A run around this one may have set it.
        return environment | ({config.RUN_IS_NAMED.name: "1"} if _is_named(options) else {})

    def tell(self, store: str | None, *, is_quiet: bool) -> int:
        """Say what was kept and where; return the number of model calls."""
        from lightning_otel import config

        if self._recording is None:
            if self._problem is not None and not is_quiet:
                print_note(f"⚡ nothing was recorded: {self._problem.what}")
            return 0
        counts = self._counts or self._count_spans(self._recording)
        captured, calls = int(counts["spans"]), self._count_calls(counts)
        ended = int(counts["ended"]) + self._has_root
        is_refused = bool(self._opened.writer().unwritten_counts())
        assert self._opened.layout is not None
        notes = self._opened.layout.root / f"unrecorded-{_trace_parent(self._recording)}"
        unrecorded = take_unrecorded(notes)
        if is_quiet:
            self._tell_forwarding(ended, store, is_quiet=True)
            return calls
        exact = f" ({counts['exact']} with token ids)" if counts["exact"] else ""
        print_note(
            f"⚡ {count_noun(captured, 'span')}, {count_noun(calls, 'call')}{exact}, "
            f"{count_noun(counts['rewards'], 'reward')} → {self._opened.name}"
        )
        if is_refused or not self._is_whole:
            tell_losses(self._opened, self._started_ns)
        if is_refused:
            print_note("  the store refused the last spans; is its disk full?")
        if not config.content().is_kept:
            print_note(f"  messages are not kept, as {config.CONTENT.name} asks")
        self._tell_forwarding(ended, store)
        for line in unrecorded:
            print_note(line)
        self._gate.tell()
        if not captured:
            if self._counts is not None and not is_refused:
                print_note(f"  warning: {_FAILED_FIRST if self._code else _NO_SPAN}")
            suggest("doctor", store)
            return 0
        if not calls:
            print_note(f"  warning: {_NO_CALL}")
        tell_unnamed(counts)
        if self._is_divided:
            suggest("ls", store)
            return calls
        if not counts["rewards"]:
            print_note("  no reward yet: emit_reward(1.0) in the program, or")
            suggest(f"reward {self._recording.rollout_id} 1.0", store)
        suggest(f"show {self._recording.rollout_id}", store)
        return calls

    def _count_calls(self, counts: Mapping[str, Any]) -> int:
        """Count the requests to models; where others recorded some, as the adapter joins them."""
        if not counts["others"]:
            return int(counts["calls"])
        rollouts = counts["rollouts"]
        reports = (self._opened.transitions(rollout_id=rollout).report() for rollout in rollouts)
        return sum(report.calls for report in reports)

    def _count_spans(self, recording: "Recording") -> Mapping[str, Any]:
        from lightning_otel.store.layout import is_settling_due
        from lightning_otel.store.live import read_whole_records
        from lightning_otel.store.sql import attribute_sql
        from lightning_otel.types import conventions as c

        layout = self._opened.layout
        assert layout is not None
        if is_settling_due(layout.list_unsettled(layout.read_manifest())):
            from lightning_otel.store.settle import settle_for_reader

            settle_for_reader(layout)
        with contextlib.suppress(OSError, StoreError):
            if (records := read_whole_records(layout, self._started_ns)) is not None:
                self._is_whole = not self._opened.writer().unwritten_counts()
                return count_records(records, recording, self._started_ns)
        query = f"""
            SELECT trace_id, span_id, rollout_id, operation, reward, start_ns, end_ns, name, scope,
              agent, response_id, {attribute_sql(c.FRAMEWORK)} AS framework,
              left(prompt_token_ids, 1) AS prompt_token_ids,
              left(response_token_ids, 1) AS response_token_ids
            FROM spans WHERE start_ns >= ?"""
        rows = self._opened.sql(query, [self._started_ns])
        return count_records(rows, recording, self._started_ns)

    def _tell_forwarding(self, ended: int, store: str | None, *, is_quiet: bool = False) -> None:
        sent = self._forwarder
        if sent is None or self._recording is None:
            return
        from lightning_otel.cli.destinations import tell_forwarding

        pending = max(0, ended - sent.delivered - sent.withheld - sent.rejected.total())
        tell_forwarding(sent, pending, is_quiet=is_quiet)
        if pending:
            suggest(f"export otlp --rollout {self._recording.rollout_id}", store)


def _trace_parent(recording: "Recording") -> str:
    return f"00-{recording.trace_id}-{recording.span_id}-01"


def _find_problem(opened: "Store") -> LightningOtelError | None:
    from lightning_otel import config

    assert opened.layout is not None
    if not config.is_enabled():
        return ConfigError(
            "recording is switched off by LIGHTNING_OTEL or OTEL_SDK_DISABLED; "
            f"unset {config.ENABLED.name} OTEL_SDK_DISABLED"
        )
    try:
        opened.layout.create()
    except StoreError as exc:
        return exc
    for folder in (opened.layout.new, opened.layout.live):
        if not os.access(folder, os.W_OK):
            return StoreError(
                f"{folder} is not writable; name another place with --store, or chmod u+rwx it"
            )
    return None


def _is_named(options: "Options") -> bool:
    """Return whether the run is one rollout, whatever tasks the program records in it."""
    names = ("rollout_id", "task", "reward_evaluator")
    return any(options.get(name) is not None for name in names)

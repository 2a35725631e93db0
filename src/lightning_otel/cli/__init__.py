"""The command line: thin commands over the store, each imported when it is run.

Data goes to stdout, notes to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 3
nothing matched, 4 the store cannot be used; ``run`` gives back its program's own.
"""

import logging
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from lightning_otel.errors import (
    ConfigError,
    LightningOtelError,
    NotFoundError,
    QueryError,
    StoreError,
    disk_remedy,
)
from lightning_otel.types.text import visible

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_GROUPS = {
    "Record": {
        "demo": ("demo:demo", "Watch an agent learn: offline, in seconds."),
        "run": ("run:run", "Run a program with recording on: run -- python app.py"),
        "proxy": ("proxy:proxy", "Record programs that were not started here, by a proxy."),
        "serve": ("serve:serve", "Serve the viewer, and receive spans by OTLP."),
        "import": (
            "imports:import_files",
            "Read files of spans: OTLP, ATIF, LangSmith and others.",
        ),
    },
    "Look": {
        "ls": ("look:ls", "List rollouts or traces."),
        "show": ("show:show", "Show a rollout, trace or span; or compare two."),
        "stats": ("look:stats", "Count spans, rewards and transitions."),
        "plot": ("look:plot", "Draw curves: reward, success, length, tokens, loss."),
        "tail": ("tail:tail", "Watch agents live: messages, tools, rewards."),
        "sql": ("look:sql", "Run one read-only SQL query."),
        "mcp": ("mcp:mcp", "Give assistants read-only tools for the store (MCP)."),
    },
    "Learn": {
        "reward": ("rewards:reward", "Add a reward to a rollout, trace, span or response."),
        "apply-rewards": ("rewards:apply_rewards", "Score stored rollouts with a function."),
        "export": ("export:export", "Write training data, spans, or the whole store."),
        "selections": ("selections:selections", "Save filters as data sets, and compare versions."),
        "verify": ("verify:verify", "Compare exported files with their certificate."),
        "train": ("train:train", "Run a training algorithm on recorded or new rollouts."),
        "resources": ("resources:resources", "Publish, promote and roll back prompts and models."),
        "queue": ("queue:queue", "Count, pause, resume and cancel queued rollouts."),
    },
    "Operate": {
        "doctor": ("doctor:doctor", "Check versions, instrumentors, settings and the store."),
        "compact": ("maintain:compact", "Merge the store's files; drop old rollouts."),
        "redact": ("maintain:redact", "Remove content from stored spans for good."),
        "facts": ("maintain:facts", "Compute anew what the store tells of attempts."),
        "completion": ("doctor:completion", "Print a shell completion script."),
    },
}
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "analyze": ("show", "--findings"),
    "config": ("doctor", "--settings"),
    "config check": ("doctor",),
    "diff": ("show",),
    "drift": ("doctor",),
    "follow": ("tail", "--consumer"),
    "forward": ("export", "otlp"),
    "pack": ("export", "duckdb"),
    "publish": ("export", "lake"),
    "ui": ("serve", "--link"),
}
"""The words that each older spelling stands for; help does not list them."""
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}


# Exit code and usual remedy of each kind of error. The text of a query is ours but in ``sql``,
# which answers for its own: elsewhere the store is at fault.
_FAILURES: tuple[tuple[type[LightningOtelError], int, str], ...] = (
    (ConfigError, 2, "lightning-otel --help"),
    (NotFoundError, 3, "lightning-otel ls"),
    (StoreError, 4, "lightning-otel doctor"),
    (QueryError, 4, "lightning-otel doctor"),
    (LightningOtelError, 1, "lightning-otel doctor"),
)


def _replace_alias(args: list[str]) -> list[str]:
    for count in (2, 1):
        words = _ALIASES.get(" ".join(args[:count]))
        if words is not None:
            return [*words, *args[count:]]
    return args


class SuggestingGroup(click.Group):
    """A group that suggests the command a misspelt one may have meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named first."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            from lightning_otel.types.values import suggest_name

            advice = suggest_name(args[0], names)
            raise click.UsageError(f"no such command {args[0]!r}; {advice}", ctx)
        return super().resolve_command(ctx, args)


class _Lazy(SuggestingGroup):
    """A group that knows its commands' names and help without importing them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, _replace_alias(args))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        matches = [
            CompletionItem(name, help=text)
            for name, (_, text) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*matches, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(widest), text) for name, (_, text) in commands.items()]
                )


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightning-otel", message="lightning-otel %(version)s")
@click.option(
    "--store", metavar="PATH", envvar="LIGHTNING_OTEL_STORE",
    help="Store to use [default: .lightning/traces.duckdb]; every command takes it, too.",
)  # fmt: skip
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(store: str | None, debug: bool) -> None:
    """Every agent you already run is training data: spans in, RL transitions out."""


def main() -> None:
    """Run the command line; every error becomes a few lines and an exit code."""
    _speak_utf8(sys.stdout)
    _speak_utf8(sys.stderr)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())
    try:
        with ExitStack() as bar:
            if sys.stderr.isatty():
                from lightning_otel.cli.output import show_facts_bar

                bar.enter_context(show_facts_bar())
            code = _run_command()
        sys.stdout.flush()
    except BrokenPipeError:
        code = 0
        silence_stream(sys.stdout)
    sys.exit(code)


def _run_command() -> int:
    try:
        code: Any = cli.main(prog_name="lightning-otel", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return 130
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        return exc.exit_code
    except click.ClickException as exc:
        _explain_usage(exc)
        return exc.exit_code
    except SystemExit:
        # So Click ends when whoever read stdout has gone: they have what they wanted.
        return 0
    except Exception as exc:  # noqa: BLE001  # the last boundary: a person reads this
        if sys.argv[1:2] == ["--debug"]:
            import traceback

            traceback.print_exc()
        return report_error(exc)
    return code if isinstance(code, int) else 0


class _VisibleFormatter(logging.Formatter):
    """Formats what is logged for a terminal, which it can neither colour nor fool."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _speak_utf8(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if stream is not None and reconfigure is not None:
        if stream.isatty():
            reconfigure(errors="replace")
        else:
            reconfigure(encoding="utf-8", errors="replace")


def silence_stream(stream: TextIO) -> None:
    """Let a stream whose reader has gone end in nothing, so that Python's own exit is silent."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, stream.fileno())
    os.close(silence)


def report_error(exc: Exception) -> int:
    """Say what failed, why, and what to do; gives the exit code."""
    if isinstance(exc, LightningOtelError):
        _, code, usual = next(failure for failure in _FAILURES if isinstance(exc, failure[0]))
        # A query's own text may hold the mark that divides what failed from what to do.
        is_query = isinstance(exc, QueryError)
        what, remedy = (str(exc), "") if is_query else (exc.what, exc.remedy)
        print_error(what, exc.why, remedy or usual)
        return code
    if isinstance(exc, OSError):
        what = f"{exc.filename or 'a file'}: {exc.strerror or exc}"
        print_error(what, remedy=disk_remedy(exc, "check the path"))
        return 1
    arguments = sys.argv[1:] if sys.argv[1:2] == ["--debug"] else ["--debug", *sys.argv[1:]]
    command_line = shlex.join(["lightning-otel", *arguments])
    print_error(f"{type(exc).__name__}: {exc}", "this is a bug in lightning-otel", command_line)
    return 1


def print_error(what: str, why: str = "", remedy: str = "", *, usage: str = "") -> None:
    """Print the failure, its reason where there is one to tell, and the remedy, on stderr."""
    from lightning_otel.cli.output import print_note

    # DuckDB draws the place in the query on further lines.
    print_note(f"error: {' '.join(what.partition(chr(10) + 'LINE ')[0].split())}")
    if why:
        print_note(f"why:   {' '.join(why.split())}")
    if usage:
        print_note(f"usage: {usage}")
    print_note(f"try:   {remedy or 'lightning-otel --help'}")


def _explain_usage(exc: click.ClickException) -> None:
    context = getattr(exc, "ctx", None)
    path = context.command_path if context is not None else "lightning-otel"
    usage = " ".join(context.get_usage().split()[1:]) if context is not None else ""
    print_error(exc.format_message(), remedy=f"{path} --help", usage=usage)

"""The command line: thin commands over the store, each imported when it is run.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 3
nothing matched, 4 the store cannot be used; ``run`` gives back its program's own.
"""

import sys
from importlib import import_module
from typing import Any

import click

from lightning_otel.errors import (
    ConfigError,
    LightningOtelError,
    NotFoundError,
    StoreError,
)

_COMMANDS = {
    "demo": ("demo:demo", "Run the offline demo: agent, spans, DuckDB, transitions, rewards."),
    "run": ("run:run", "Run a program with recording on: run -- python app.py"),
    "ls": ("look:ls", "List traces or rollouts."),
    "show": ("look:show", "Show one trace or rollout as a tree."),
    "stats": ("look:stats", "Count what was kept, from spans to transitions."),
    "export": ("export:export", "Write spans or triplets as JSON lines or Parquet."),
    "reward": ("reward:reward", "Give a reward to a rollout, trace, span or response."),
    "sql": ("look:sql", "Run one read-only SQL statement."),
    "pack": ("export:pack", "Write everything into one self-contained DuckDB file."),
    "doctor": ("doctor:doctor", "Check versions, instrumentors, settings and the store."),
}
_EXIT_CODES: tuple[tuple[type[LightningOtelError], int], ...] = (
    (ConfigError, 2),
    (NotFoundError, 3),
    (StoreError, 4),
)


class _Lazy(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        near = get_close_matches(args[0], _COMMANDS, n=1)
        if args[0] not in _COMMANDS and near and not args[0].startswith("-"):
            raise click.UsageError(f"no such command {args[0]!r}; did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightning-otel")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Every agent you already run is training data: spans in, RL transitions out."""
    ctx.obj = debug


def main() -> None:
    """Run the command line; every error becomes three lines and an exit code."""
    try:
        code: Any = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read stdout has gone; Python would say so once more
        sys.exit(0)
    except LightningOtelError as exc:
        _fail(exc.what, exc.why, exc.remedy)
        sys.exit(next((code for kind, code in _EXIT_CODES if isinstance(exc, kind)), 1))
    except Exception as exc:  # noqa: BLE001  # the last boundary: a person reads this
        if "--debug" in sys.argv:
            raise
        _fail(f"{type(exc).__name__}: {exc}", "a fault of lightning-otel", "again with --debug")
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(what: str, why: str, remedy: str) -> None:
    click.echo(f"error: {what}", err=True)
    if why:
        click.echo(f"why:   {why}", err=True)
    if remedy:
        click.echo(f"try:   {remedy}", err=True)

"""``verify``: exported files against their certificate, and against the store they came from."""

from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from lightning_otel.cli.output import print_line

_SIGNS: Final = {True: "✓", False: "✗", None: "?"}
_WRONG: Final = 1
_UNKNOWN: Final = 3


def _inherit_stated(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the store of the command line; a setting names no store to compare with."""
    group = ctx.parent
    is_stated = group and group.get_parameter_source("store") is ParameterSource.COMMANDLINE
    return group.params["store"] if not value and group and is_stated else value


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--store",
    metavar="PATH",
    callback=_inherit_stated,
    help="Compare with this store, too: it holds the spans and accounts for each step.",
)
def verify(path: Path, store: str | None) -> int:
    """Compare exported files with their certificate: export FORMAT OUT --certificate.

    PATH is the file or folder that was exported. Exit code 0: as certified; 1: not; 3: there is no
    certificate, or something cannot be told.
    """
    from lightning_otel.dataset import Store, certificate

    opened = Store(store) if store else None
    verdicts = certificate.verify(path, opened)
    for verdict in verdicts:
        print_line(f"{_SIGNS[verdict.is_right]} {verdict.name}: {verdict.text}")
    signs = {verdict.is_right for verdict in verdicts}
    return _WRONG if False in signs else _UNKNOWN if None in signs else 0

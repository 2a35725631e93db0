"""``doctor``: is everything in place, and what to do if not."""

from dataclasses import asdict

import click

from lightning_otel.cli.output import counted, print_json, shown, store_option

_SIGNS = {"ok": "✓", "note": "!", "problem": "✗"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def doctor(as_json: bool, store: str | None) -> int:
    """Check versions, instrumentors, settings and the store; exit 1 if something is wrong."""
    from lightning_otel.doctor import examine
    from lightning_otel.store import Store

    findings = examine(Store(store))
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return 1 if problems else 0
    for finding in findings:
        click.echo(f"{_SIGNS[finding.level]} {shown(finding.text)}")
        if finding.remedy:
            click.echo(f"    {shown(finding.remedy)}")
    click.echo(counted(problems, "problem") if problems else "nothing wrong")
    return 1 if problems else 0

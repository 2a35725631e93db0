"""``doctor``: is everything in place, and what to do if not."""

from dataclasses import asdict

import click

from lightning_otel.cli.output import counted, print_json, shown, store_option, talk

_SIGNS = {"ok": "✓", "note": "!", "problem": "✗"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--repair", "is_repair", is_flag=True, help="First get back what can be of damage.")
@store_option
def doctor(as_json: bool, is_repair: bool, store: str | None) -> int:
    """Check versions, instrumentors, settings and the store; exit 1 if something is wrong."""
    from lightning_otel.doctor import examine
    from lightning_otel.store import Store

    opened = Store(store)
    if is_repair:
        for note in opened.repair():
            there = note.rows - note.gone
            talk(f"{note.name}: {there} of {note.rows} spans are there, {note.gone} are gone")
    findings = examine(opened)
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

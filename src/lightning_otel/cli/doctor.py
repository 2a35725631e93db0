"""``doctor``: is everything in place, and what to do if not."""

from dataclasses import asdict

import click

from lightning_otel.cli.options import Form, rows_options
from lightning_otel.cli.output import count_noun, print_rows, shown, store_option, talk

_SIGNS = {"ok": "✓", "note": "!", "problem": "✗"}


@click.command()
@rows_options
@click.option("--repair", "is_repair", is_flag=True, help="First get back what can be of damage.")
@store_option
def doctor(form: Form | None, is_repair: bool, store: str | None) -> int:
    """Check versions, instrumentors, settings and the store; exit 1 if something is wrong."""
    from lightning_otel.dataset import Store
    from lightning_otel.doctor import examine

    opened = Store(store)
    gone = 0
    if is_repair:
        for note in opened.repair():
            gone += note.gone
            there = note.rows - note.gone
            talk(f"{note.name}: {there} of {note.rows} spans are there, {note.gone} are gone")
    findings = examine(opened)
    problems = sum(finding.level == "problem" for finding in findings)
    if form is not None:
        rows = [asdict(finding) for finding in findings]
        print_rows(rows, list(rows[0]), form=form)
        return 1 if problems or gone else 0
    for finding in findings:
        click.echo(f"{_SIGNS[finding.level]} {shown(finding.text)} [{finding.code}]")
        if finding.remedy:
            click.echo(f"    {shown(finding.remedy)}")
    if problems or not gone:
        click.echo(count_noun(problems, "problem") if problems else "nothing wrong")
    if gone:
        click.echo(f"repaired, but {count_noun(gone, 'span')} could not be got back")
    if any(finding.level != "ok" for finding in findings):
        talk("what each [code] means: docs/settings.md")
    return 1 if problems or gone else 0

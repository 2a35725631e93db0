"""HTML and SVG of texts that anybody may have written: escaped, on one line each. Pure."""

from collections.abc import Iterable, Sequence
from html import escape as escape_html

from lightning_otel.types.text import one_line


def escape(text: object, cells: int | None = None) -> str:
    """Return text for XML and HTML: escaped, on one line, cut to ``cells``, widths of a letter."""
    return escape_html(one_line(text, cells))


def render_link_page(address: str) -> str:
    """Return a page that holds nothing but an address, and leads on to it."""
    where = escape(address)
    return (
        '<!doctype html><meta charset="utf-8"><title>lightning-otel</title>'
        f'<meta http-equiv="refresh" content="0;url={where}"><a href="{where}">lightning-otel</a>\n'
    )


def render_svg_text(
    x: float, y: float, text: str, style: str = "", cells: int = 100, *, anchor: str = "start"
) -> str:
    """Return a text of an SVG at a place, cut to a number of cells."""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{placed}>{escape(text, cells)}</text>'


def render_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    note: str = "",
    *,
    title: str = "",
    cells: int = 80,
) -> str:
    """Return rows as an HTML table of texts, each cut to a line of ``cells``, with a note below."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:left">{"" if value is None else escape(value, cells)}</td>'
            for value in row
        )
        + "</tr>"
        for row in rows
    )
    footer = f"<p>{escape(note)}</p>" if note else ""
    above = f"<p><b>{escape(title, 200)}</b></p>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"


def render_facts(title: str, pairs: Iterable[tuple[str, object]]) -> str:
    """Render facts about one thing as an HTML table; leave out None and empty texts."""
    facts = [pair for pair in pairs if pair[1] is not None and pair[1] != ""]
    return render_table(("", ""), facts, title=title, cells=200)


def render_block(text: str) -> str:
    """Render text as an HTML block with its lines as they are; of a long one the beginning."""
    lines = "\n".join(escape(line) for line in text[:4000].split("\n"))
    cut = f"<p>the first 4,000 of {len(text):,} characters</p>" if len(text) > 4000 else ""
    return f'<pre style="white-space:pre-wrap;text-align:left">{lines}</pre>{cut}'

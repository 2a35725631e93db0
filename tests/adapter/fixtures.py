"""The recorded conversation as each source told it: `tests/data/make_spans.py` made the files."""

import json
from pathlib import Path

from lightning_otel.types import Event, Link, Span

SPANS = Path(__file__).resolve().parent.parent / "data" / "spans"


def recorded(source: str) -> list[Span]:
    """The spans of one source, exactly as it made them."""
    found = []
    for line in (SPANS / f"{source}.jsonl").read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        fields["events"] = tuple(Event(**event) for event in fields["events"])
        fields["links"] = tuple(Link(**link) for link in fields["links"])
        found.append(Span(**fields))
    return found

"""The card of an exported folder: what its rows are, with nothing guessed.

Source: Hugging Face Hub, dataset cards: ``configs`` and ``dataset_info`` in YAML.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_otel.dataset.census import Census, Split
from lightning_otel.types import Report
from lightning_otel.types.instants import utc_text
from lightning_otel.types.text import visible

_MOST: Final = 20
_NOUNS: Final = {
    "agents": "Agents", "models": "Models", "versions": "Versions of prompts and models",
    "modes": "Modes", "judges": "Rewards were given by", "origins": "Calls came by",
    "masks": "Masked after it was recorded",
}  # fmt: skip
_NOT_STATED: Final = """
Licence: not stated. Personal data: not stated. Masking finds secrets of known shapes and what it
was told to mask; it does not find names, addresses or what else people wrote.
"""


class RowFile(NamedTuple):
    """A file of rows; ``path`` is where it is while it is written."""

    side: str
    name: str
    path: Path
    rows: int


class Facts(NamedTuple):
    """What card and certificate tell of an export."""

    format: str
    parts: Sequence[RowFile]
    census: Census
    split: Split
    options: Mapping[str, Any]


def write_card(facts: Facts, columns: Mapping[str, str]) -> bytes:
    """Return the card, in Markdown with a head in YAML that says where the rows are."""
    files, sizes = [], []
    for side, name, path, rows in facts.parts:
        files += [f"  - split: {side}", f"    path: {name}"]
        sizes += [f"  - name: {side}", f"    num_bytes: {path.stat().st_size}",
                  f"    num_examples: {rows}"]  # fmt: skip
    head = ["---", "configs:", "- config_name: default", "  data_files:", *files,
            "dataset_info:", "  splits:", *sizes, "---", ""]  # fmt: skip
    written = f"Written by lightning-otel {version('lightning-otel')}: `{_command(facts)}`"
    floor = "4.7" if "JSON" in columns.values() else "3.6"
    names = f"- Columns: {', '.join(columns)}; loads with datasets {floor} or newer"
    return "\n".join([*head, written, "", names, *_list_facts(facts), _NOT_STATED]).encode()


def _list_facts(facts: Facts) -> Iterator[str]:
    census, report = facts.census, Report.total(facts.census.reports)
    for side, tasks in facts.split.tasks.items():
        rows = sum(part.rows for part in facts.parts if part.side == side)
        yield f"- {side}: {rows} rows of {len(tasks)} tasks, by id or first prompt"
    if census.steps:
        first, last = (utc_text(time_ns)[:19] for time_ns in census.times_ns)
        yield f"- Time of the steps: {first} to {last}, UTC"
    reasons = census.list_reasons()
    in_rows = "an unknown number" if census.in_rows is None else census.in_rows
    yield f"- Steps: {census.steps} = {in_rows} in rows + {sum(reasons.values())} left out"
    yield from _list_counts("left out", reasons)
    yield from _list_counts("in a row without", census.list_reasons(is_row_written=True))
    numbers = {"call": report.transitions, "reward": report.rewards_placed}
    for noun, number in numbers.items():
        total = report.calls if noun == "call" else report.rewards
        yield f"- {noun.capitalize()}s of {report.rollouts} rollouts: {total}, {number} used"
        dropped = [entry.reason for entry in report.dropped if entry.noun == noun]
        yield from _list_counts("not used", {name: dropped.count(name) for name in dropped})
    yield f"- Exact token ids: {report.exact} of {report.transitions} steps"
    yield from _list_counts("not exact", report.inexact)
    yield from _list_counts("note", report.notes)
    rewards = census.describe_rewards().items()
    yield f"- Rewards of steps: {', '.join(f'{name} {value:.6g}' for name, value in rewards)}"
    for noun, title in _NOUNS.items():
        names = ", ".join(_name_counts(census.count_names(noun)))
        yield f"- {title}: {names or 'none'}"


def _list_counts(title: str, counts: Mapping[str, int]) -> Iterator[str]:
    return (f"  - {title}: {text}" for text in _name_counts(counts))


def _name_counts(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the most frequent names; others' text is no Markdown here."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for name, number in ranked[:_MOST]:
        yield f"{number} × `{_plain(name)[:200]}`"
    if others := ranked[_MOST:]:
        yield f"{sum(number for _, number in others)} of {len(others)} others"


def _command(facts: Facts) -> str:
    options = {**facts.options, "split": facts.split.share, "seed": facts.split.seed or None}
    words = ["lightning-otel", "export", facts.format, "OUT"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for item in values for word in (f"--{flag}", str(item))]
    return _plain(shlex.join(words))


def _plain(text: str) -> str:
    return " ".join(visible(text).replace("`", "'").split())

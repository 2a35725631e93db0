"""The card of an exported folder: what its rows are, with nothing guessed.

Source: Hugging Face Hub, dataset cards: ``configs`` and ``dataset_info`` in YAML.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.dataset.census import Census, Split, count_calls_left_out
from lightning_otel.dataset.files import Part
from lightning_otel.types.instants import utc_text
from lightning_otel.types.text import visible

if TYPE_CHECKING:
    from lightning_otel.dataset.export import Exported

_MOST: Final = 20
_SECOND: Final = len("2026-11-24T12:00:00")
_COUNTS: Final = {
    "agents": "Agents", "models": "Models", "versions": "Prompt and model versions",
    "modes": "Modes", "judges": "Rewards were given by",
    "origins": "Calls were recorded or received", "masks": "Masked after recording",
}  # fmt: skip
_NOT_STATED: Final = """
Licence: not stated. Personal data: not stated. Masking finds secrets of known shapes and what it
was told to mask; it does not find names, addresses or what else people wrote."""


class Card(NamedTuple):
    """What a card tells: the funnel, the files of rows, and what was counted."""

    done: "Exported"
    parts: Sequence[Part]
    columns: Sequence[str]
    census: Census
    split: Split
    options: Mapping[str, Any]

    def write(self) -> str:
        """Return the card, in Markdown with a head in YAML that says where the rows are."""
        head = ["---", "configs:", "- config_name: default", "  data_files:"]
        sizes = ["dataset_info:", "  splits:"]
        for part in self.parts:
            head += [f"  - split: {part.side}", f"    path: {part.name}"]
            size = part.path.stat().st_size
            sizes += [f"  - name: {part.side}", f"    num_bytes: {size}"]
            sizes += [f"    num_examples: {part.rows}"]
        return "\n".join([*head, *sizes, "---", "", *self._lines(), _NOT_STATED]) + "\n"

    def _lines(self) -> Iterator[str]:
        done, census, report = self.done, self.census, self.done.report
        yield f"Written by lightning-otel {version('lightning-otel')}:"
        yield f"`{self._command()}`"
        yield ""
        rows = ", ".join(f"{part.rows} of {part.side}" for part in self.parts)
        yield f"- Rows: {rows}; columns: {', '.join(self.columns)}"
        tasks = ", ".join(f"{len(names)} of {side}" for side, names in self.split.tasks.items())
        yield f"- Rollouts: {census.rollouts}; tasks, by id or first prompt: {tasks}"
        if census.first_ns is not None:
            first, last = (utc_text(ns)[:_SECOND] for ns in (census.first_ns, census.last_ns))
            yield f"- Time of the steps: {first} to {last}, UTC"
        in_rows = "an unknown number" if done.in_rows is None else done.in_rows
        out = sum(done.left_out.values())
        yield f"- Steps: {done.steps} = {in_rows} in rows + {out} left out"
        yield from _list_counts("left out", done.left_out)
        yield from _list_counts("in a row without", done.partial)
        yield f"- Calls: {report.calls}: {report.transitions} are steps, the others left out"
        yield from _list_counts("left out", count_calls_left_out(report))
        yield f"- Exact token ids: {report.exact} of {report.transitions} steps"
        yield from _list_counts("not exact", report.inexact)
        numbers = census.describe_rewards().items()
        yield f"- Rewards of steps: {', '.join(f'{name} {value:.6g}' for name, value in numbers)}"
        nouns = {**census.count_kinds(), **census.counts}
        for noun, title in _COUNTS.items():
            if counts := nouns.get(noun):
                yield f"- {title}: {', '.join(_name_counts(counts))}"
            elif noun == "masks":
                yield f"- {title}: nothing"

    def _command(self) -> str:
        words = ["lightning-otel", "export", self.done.format, "OUT"]
        options = {**self.options, "split": self.split.share, "seed": self.split.seed or None}
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
                continue
            values = value if isinstance(value, list | tuple) else [value]
            for text in () if value is None else map(str, values):
                words += [flag, text]
        return visible(shlex.join(words)).replace("`", "'")


def _list_counts(title: str, counts: Mapping[str, int]) -> Iterator[str]:
    for text in _name_counts(counts):
        yield f"  - {title}: {text}"


def _name_counts(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the most frequent names with their number; text of others' is no Markdown here."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for name, number in ranked[:_MOST]:
        text = visible(name).replace("`", "'")
        yield f"{number} × `{' '.join(text.split())[:200]}`"
    if len(ranked) > _MOST:
        others = ranked[_MOST:]
        yield f"{sum(number for _, number in others)} of {len(others)} others"

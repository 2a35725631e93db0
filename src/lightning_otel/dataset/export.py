"""Exports: the rows of a format to a place, with a reason for every step that is in none."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.selection import Selection
from lightning_otel.dataset import formats
from lightning_otel.dataset.card import Card
from lightning_otel.dataset.census import Account, Census, Split
from lightning_otel.dataset.certificate import (
    IN_FOLDER,
    Files,
    find_certificate,
    write_certificate,
)
from lightning_otel.dataset.files import (
    FileKind,
    Part,
    Place,
    is_stream,
    kind_of,
    save_parts,
    save_rows,
)
from lightning_otel.dataset.formats.format import LeftOut, Row, distinct
from lightning_otel.errors import ConfigError
from lightning_otel.types import Report, Trajectory


@dataclass(frozen=True, slots=True)
class Exported:
    """The funnel of an export, with every reason.

    Attributes:
        format: The format's name.
        report: From spans to transitions, of every agent.
        rows: How many rows were made.
        left_out: How many steps are in no row, by reason, the most frequent first.
        partial: How many steps are in a row without something, by what it is.
        span_ids: The first step's span, by each of these reasons.
        steps: How many distinct steps came: those in rows and those left out.
        in_rows: How many of them are in rows; None if the format does not tell.
        tasks: How many tasks fell on each side of a split.
        certificate: Where the certificate stands; None without one.
    """

    format: str
    report: Report
    rows: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, int] = field(default_factory=dict)
    span_ids: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    in_rows: int | None = 0
    tasks: Mapping[str, int] = field(default_factory=dict)
    certificate: Path | None = None


class Output(NamedTuple):
    """Where rows go, and what goes with them.

    Attributes:
        place: As :meth:`Store.export` takes it, as the following ones.
        kind: Likewise.
        is_certified: Whether a certificate is written.
        split: The share of tasks for validation; None for one side alone.
        seed: Whatever divides the tasks otherwise.
        source: The store's name.
    """

    place: Place
    kind: FileKind | None = None
    is_certified: bool = False
    split: float | None = None
    seed: int = 0
    source: str = ""

    @property
    def path(self) -> Path | None:
        """The file or folder; None where rows go to a function, or nowhere."""
        return None if self.place is None or callable(self.place) else Path(self.place)


class _Export:
    """An export in the making: its rows, side by side, and what is counted meanwhile."""

    def __init__(
        self, adaptations: Callable[[], Iterable[Adaptation]], name: str, output: Output,
        wanted: Selection, note: Callable[[LeftOut], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self._adaptations, self._wanted, self._progress = adaptations, wanted, progress
        self._name, self._output, self._note = name, output, note
        self.format = formats.get(name)
        self.split = Split(output.split, output.seed)
        self._account, self._census = Account(), Census()
        self._reports: list[Report] = []
        self._reasons: Counter[tuple[str, bool]] = Counter()
        self._span_ids: dict[str, str] = {}
        path = output.path
        self._is_folder = path is not None and kind_of(path, output.kind) == "folder"
        self._is_described = self._is_folder or output.is_certified

    def rows(self, side: str, options: Mapping[str, Any]) -> Iterator[Row]:
        """Yield the rows of a side; those of each are read and adapted by themselves."""
        rows = formats.rows(self._name, self._read(side), left_out=self._leave_out, **options)

        def counted() -> Iterator[Row]:
            for row in rows:
                self._account.add_row(self.format.steps_of(row))
                yield row

        return counted()

    def _read(self, side: str) -> Iterator[Trajectory]:
        is_first, rollouts = side == self.split.sides[0], 0
        is_divided = self._is_described or self._output.split is not None
        for part in self._adaptations():
            names = self.split.list_rollouts(part, side) if is_divided else None
            paths = [
                path
                for path in map(self._wanted.part_of, part.trajectories)
                if path is not None and (names is None or path.rollout_id in names)
            ]
            for step, _ in distinct(paths):
                self._account.add_step(step)
                if self._is_described:
                    self._census.add_step(step)
            yield from paths
            if not is_first:
                continue
            self._reports.append(part.report)
            rollouts += part.report.rollouts
            if self._is_described:
                self._census.add_spans(part)
            if self._progress is not None:
                self._progress(rollouts)

    def _leave_out(self, part: LeftOut) -> None:
        if not part.is_row_written:
            self._account.add_left_out(part.step, part.reason)
            self._census.add_left_out(part.step)
        self._reasons[part.reason, part.is_row_written] += 1
        self._span_ids.setdefault(part.reason, part.step.span_id)
        if self._note is not None:
            self._note(part)

    def describe(self, rows: int, certificate: Path | None = None) -> Exported:
        """Return the funnel, once all rows are made."""
        reasons = self._reasons.most_common()
        tasks = {} if self.split.share is None else self.split.tasks
        return Exported(
            format=self._name,
            report=Report.total(self._reports),
            rows=rows,
            left_out={reason: number for (reason, is_row), number in reasons if not is_row},
            partial={reason: number for (reason, is_row), number in reasons if is_row},
            span_ids=self._span_ids,
            steps=self._account.steps,
            in_rows=self._account.in_rows,
            tasks={side: len(names) for side, names in tasks.items()},
            certificate=certificate,
        )

    def write_texts(self, parts: Sequence[Part], options: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the texts that go with files of rows, by name: a card, a certificate."""
        texts: dict[str, bytes] = {}
        if self._is_folder:
            card = Card(
                self.describe(sum(part.rows for part in parts)), parts, list(self.format.columns),
                self._census, self.split, options,
            )  # fmt: skip
            texts["README.md"] = card.write().encode()
        if self._output.is_certified:
            assert self._output.path is not None
            place = find_certificate(self._output.path).name
            texts[IN_FOLDER if self._is_folder else place] = write_certificate(
                Files({part.name: (part.path, part.rows) for part in parts}, dict(texts)),
                self._name,
                account=self._account,
                census=self._census,
                split=self.split,
                report=Report.total(self._reports),
                options=options,
                source=self._output.source,
            )
        return texts


def export(
    adaptations: Callable[[], Iterable[Adaptation]],
    name: str,
    output: Output,
    *,
    wanted: Selection,
    left_out: Callable[[LeftOut], None] | None = None,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, Any],
    query: Mapping[str, Any],
) -> Exported:
    """Write the rows of a format; arguments as ``Store.export`` takes them.

    ``adaptations`` begins to read; ``options`` are those of the format, and ``query`` those of
    transitions, which card and certificate name.
    """
    path = output.path
    if output.is_certified and (path is None or is_stream(path)):
        raise ConfigError("a certificate tells of files; name a file or folder for the rows")
    if output.split is not None and callable(output.place):
        raise ConfigError("a split writes two files; name a file or folder for the rows")
    work = _Export(adaptations, name, output, wanted, left_out, progress)
    columns = work.format.columns
    sides = {side: work.rows(side, options) for side in work.split.sides}
    if path is None:
        counts = (save_rows(rows, output.place, None, columns) for rows in sides.values())
        return work.describe(sum(counts))
    parts = save_parts(
        sides, path, kind_of(path, output.kind), columns,
        lambda parts: work.write_texts(parts, {**query, **options}),
    )  # fmt: skip
    certificate = find_certificate(path) if output.is_certified else None
    return work.describe(sum(part.rows for part in parts), certificate)


def rows(
    adaptations: Callable[[], Iterable[Adaptation]],
    name: str,
    *,
    wanted: Selection,
    options: Mapping[str, Any],
) -> Iterator[Row]:
    """Return the rows of a format as they are made; ``adaptations`` begins to read.

    Raises:
        ConfigError: There is no such format or option; said before anything is read.
    """

    def trajectories() -> Iterator[Trajectory]:
        for each in adaptations():
            yield from filter(None, map(wanted.part_of, each.trajectories))

    return formats.rows(name, trajectories(), **options)

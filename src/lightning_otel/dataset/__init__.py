"""The data set: a store with the transitions, trajectories and conversations of its spans."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from lightning_otel.store import SpanStore
from lightning_otel.store.layout import Layout, is_settling_due

if TYPE_CHECKING:
    from lightning_otel.adapter import Adaptation
    from lightning_otel.dataset.export import Exported, FileKind, Place
    from lightning_otel.dataset.formats.format import LeftOut, Row
    from lightning_otel.dataset.query import Asked, Keywords, Part
    from lightning_otel.store.table import Table, Transitions
    from lightning_otel.types import Conversation, Report, Span, Trajectory, Transition


class StepCount(NamedTuple):
    """Transitions of a rollout that were made with the same resources.

    Attributes:
        rollout_id: The rollout.
        resources: Version of each resource, by its name.
        steps: How many they are.
        rewarded: How many of them have a reward.
    """

    rollout_id: str
    resources: Mapping[str, str]
    steps: int
    rewarded: int


class Store(SpanStore):
    """A place that holds spans, written and read by any number of processes at once.

    What it adds to :class:`SpanStore` is made by an adapter: transitions and trajectories.
    """

    def spans(self, *, rollout_id: str | None = None, trace_id: str | None = None) -> "Table[Span]":
        """Spans in order of their start.

        Args:
            rollout_id: Only this rollout's: with the rewards given to it elsewhere or later, and
                without those given here to another.
            trace_id: Only this trace's.
        """
        from lightning_otel.dataset.batches import whole
        from lightning_otel.store.source import Selection
        from lightning_otel.store.table import Query, Spans

        selection = Selection(
            rollout_ids=(rollout_id,) if rollout_id else (),
            trace_ids=(trace_id,) if trace_id else (),
            is_ordered=True,
        )

        def query() -> Query:
            return whole(self.source, selection) if rollout_id else self.source.fetch(selection)

        return Spans(query, is_one=rollout_id is not None or trace_id is not None)

    def transitions(self, *, bodies: bool = True, **keywords: "Unpack[Keywords]") -> "Transitions":
        """Transitions, one row each; one that several branches share appears once.

        Its ``report()`` is the funnel behind the rows, without adapting the spans once more.

        Args:
            bodies: Whether to read messages, tools, token ids and logprobs. Without, the
                transitions are the same ones, and much sooner there.
            **keywords: How rewards reach calls, as :class:`TripletAdapter` says, which has the
                defaults: ``credit``, ``gamma``, ``compose``, ``advantage`` (each rollout is
                compared with all others of its task, in a pass of its own over the spans),
                ``is_call``, ``is_reward``.

                ``adapter``: Another adapter than that: an object with ``adapt(spans)``, a
                function, or the name of one that a package registers under
                ``lightning_otel.adapters``.

                ``include_incomplete``: Also what rollouts did that broke off, as their process
                died.

                Which transitions, as :class:`Selection` says: ``agents``, ``rollout_id``,
                ``since``, ``until``, ``mode``, ``resource_version``, ``rewarded``, ``min_reward``,
                ``max_reward``, ``capture``, ``received``.

        Raises:
            ConfigError: A keyword is unknown, or cannot be understood.
            AdapterError: The other adapter cannot be loaded.
        """
        from lightning_otel.dataset.formats.transition_rows import COLUMNS, NARROW_COLUMNS, row
        from lightning_otel.dataset.query import Asked
        from lightning_otel.dataset.tables import query_of
        from lightning_otel.store.table import Query, Transitions
        from lightning_otel.types import Report

        asked = Asked.of(keywords)
        columns = COLUMNS if bodies else NARROW_COLUMNS
        is_all = asked.wanted.wants_all

        def is_wanted(step: "tuple[Transition, int]") -> bool:
            return asked.wanted.wants(step[0])

        def steps() -> "Iterator[tuple[Transition, int]]":
            report = Report()

            def told(part: "Part") -> "Iterable[tuple[Transition, int]]":
                nonlocal report
                report = Report.total([report, part.report])
                return part.steps if is_all else filter(is_wanted, part.steps)

            # No part has a name here: it would be held while the next one is read.
            yield from chain.from_iterable(map(told, self._read_parts(asked, bodies=bodies)))
            table.keep(report)

        def query() -> Query:
            if not bodies and self._linear_layout(asked) is not None:
                from lightning_otel.dataset import linear

                rest = partial(self._adapt_named, asked)
                return linear.query(self.source, asked.wanted, rest, table.keep)
            return query_of(records(), columns)

        def records() -> Iterator[dict[str, Any]]:
            return (row(step, branch, columns) for step, branch in steps())

        def counts() -> Iterator[int]:
            for part in self._read_parts(asked, bodies=False):
                yield sum(1 for step in part.steps if is_all or is_wanted(step))

        table = Transitions(query, lambda: map(itemgetter(0), steps()), records, counts=counts)
        return table

    def trajectories(self, **keywords: "Unpack[Keywords]") -> "Iterator[Trajectory]":
        """Trajectories, read and adapted a group of rollouts at a time.

        Those of rollouts that broke off, as their process died, are not among them unless asked
        for. A trajectory is whole: it is given if one of its transitions is wanted.

        Args:
            **keywords: As :meth:`transitions` takes them.
        """
        from lightning_otel.dataset.query import Asked

        asked = Asked.of(keywords)
        for found in self._adapt(asked):
            for trajectory in found.trajectories:
                if any(map(asked.wanted.wants, trajectory.transitions)):
                    yield trajectory

    def messages(self, **keywords: "Unpack[Keywords]") -> "Table[Conversation]":
        """Conversations of chat messages with their tools and rewards, one row each.

        For supervised training and the search for prompts: a trajectory is one row, and every
        answer of it stands once; where its history was cut or begun anew, it is several.

        Args:
            **keywords: As :meth:`transitions` takes them; a conversation is whole, and given if
                one of its steps is wanted.
        """
        from lightning_otel.adapter.conversation_rows import conversations
        from lightning_otel.dataset.tables import MESSAGE_COLUMNS, message_row, query_of
        from lightning_otel.store.table import Query, Table

        def rows() -> "Iterator[Conversation]":
            return conversations(self.trajectories(**keywords))

        def query() -> Query:
            return query_of(map(message_row, rows()), MESSAGE_COLUMNS)

        return Table(query, rows, "conversations")

    def report(self, **keywords: "Unpack[Keywords]") -> "Report":
        """The funnel from spans to transitions, with every reason for a loss.

        It is that of the rollouts that had to be looked at, of all their agents; no bodies are read
        where that changes nothing.

        Args:
            **keywords: As :meth:`transitions` takes them.
        """
        from lightning_otel.dataset.query import Asked
        from lightning_otel.types import Report

        found = self._read_parts(Asked.of(keywords), bodies=False)
        return Report.total(part.report for part in found)

    def step_counts(self) -> Iterator[StepCount]:
        """Count each rollout's transitions, and those with a reward.

        There may be several counts of a rollout, which add up.
        """
        for step in self.transitions(bodies=False):
            yield StepCount(step.rollout_id, step.resources, 1, int(step.reward is not None))

    def export(
        self,
        format: str,
        place: "Place",
        *,
        kind: "FileKind | None" = None,
        left_out: "Callable[[LeftOut], None] | None" = None,
        progress: "Callable[[int], None] | None" = None,
        **options: Any,
    ) -> "Exported":
        """Write rows that a trainer reads: ``store.export("sft", "sft.jsonl")``.

        The file appears once it is whole, readable by the user alone. Without a row it is empty.

        Args:
            format: ``triplets``, ``sft``, ``prompt-completion``, ``tokens``, ``kto``, ``dpo``,
                ``grpo``, ``verl``, ``openai-sft``, ``openai-dpo``, ``agentlightning``, ``atif``, or
                one that is registered.
            place: A file or folder; or a function that is given each row; or None to count only.
            kind: ``jsonl``, ``parquet`` or ``folder``; by default what the name says. A folder is
                one that Hugging Face's ``datasets.load_dataset`` reads.
            left_out: Told of everything that the format cannot hold, with the reason.
            progress: Told how many rollouts are done.
            **options: Those of the format, such as ``threshold`` of ``kto``; and how spans become
                which steps, as :meth:`transitions` takes them, such as ``agents``. ``advantage``
                says what the groups are.

        Raises:
            ConfigError: There is no such format or option, or nothing can be written there.
            AdapterError: The other adapter cannot be loaded.
            StoreMissingError: There is no store.
        """
        from lightning_otel.dataset.export import export

        asked, rest = _split_options(options, format)
        return export(
            lambda: self._adapt(asked),
            format,
            place,
            kind=kind,
            wanted=asked.wanted,
            left_out=left_out,
            progress=progress,
            options=rest,
        )

    def rows(self, format: str, **options: Any) -> "Iterator[Row]":
        """The rows of a format, one after the other as they are made; nothing is written.

        Args:
            format: As :meth:`export` takes it.
            **options: Likewise.

        Raises:
            ConfigError: There is no such format or option.
            AdapterError: The other adapter cannot be loaded.
        """
        from lightning_otel.dataset.export import rows

        asked, rest = _split_options(options, format)
        return rows(lambda: self._adapt(asked), format, wanted=asked.wanted, options=rest)

    def adapt(self, **keywords: "Unpack[Keywords]") -> "Iterator[Adaptation]":
        """Adapt a group of rollouts at a time, and yield the credit with the result.

        Args:
            **keywords: As :meth:`transitions` takes them; of what is wanted, rollouts, times and
                agents choose the rollouts, and all of their steps are there.
        """
        from lightning_otel.dataset.query import Asked

        return self._adapt(Asked.of(keywords))

    def _adapt(self, asked: "Asked") -> "Iterator[Adaptation]":
        from lightning_otel.adapter import TripletAdapter
        from lightning_otel.dataset.batches import batches, incomplete, with_moved

        self._settle_if_worthwhile()
        adapter, wanted, include_incomplete = asked
        con = with_moved(self.source)
        out = frozenset() if include_incomplete else incomplete(self.source, con)
        told: dict[str, Any] = {}
        if isinstance(adapter, TripletAdapter) and adapter.advantage is not None:
            # A rollout is compared with those that are not asked for, too.
            every = (
                adapter.outcomes(wanted.spans(spans), incomplete=out)
                for spans in batches(self.source)
            )
            told["estimates"] = adapter.estimate(outcome for each in every for outcome in each)
        return (
            adapter.explain(wanted.spans(spans), incomplete=out, **told)
            for spans in batches(self.source, wanted, con)
        )

    def _read_parts(self, asked: "Asked", *, bodies: bool) -> "Iterator[Part]":
        """Each transition once with its branch, and the report, of some rollouts at a time."""
        from lightning_otel.dataset.query import part_of
        from lightning_otel.store.snapshot import Snapshot

        layout = self._linear_layout(asked)
        # To plan a walk over a small store costs more than it saves.
        if layout is not None and not Snapshot.take(layout).is_small:
            from lightning_otel.dataset import linear

            rest = partial(self._adapt_named, asked)
            return linear.parts(self.source, asked.wanted, rest, bodies=bodies)
        return map(partial(part_of, bodies=bodies), self._adapt(asked))

    def _adapt_named(self, asked: "Asked", names: Sequence[str]) -> "Iterator[Adaptation]":
        """Adapt the rollouts of these names alone."""
        return self._adapt(asked._replace(wanted=replace(asked.wanted, rollout_ids=tuple(names))))

    def _linear_layout(self, asked: "Asked") -> Layout | None:
        """The store's paths, if the linear walk serves what is asked for; it is settled then."""
        from lightning_otel.dataset.query import supports

        if self.layout is None or not supports(asked.adapter):
            return None
        self.layout.require()
        self._settle_if_worthwhile()
        return self.layout

    def _settle_if_worthwhile(self) -> None:
        from lightning_otel.store.catalogue import ensure_catalogue
        from lightning_otel.store.damage import ensure_manifest

        if self.layout is not None and self.layout.exists():
            ensure_manifest(self.layout)
            ensure_catalogue(self.layout)
            # A few small segments read as fast where they are.
            if is_settling_due(self.layout.list_unsettled(self.layout.read_manifest())):
                from lightning_otel.store.settle import settle_for_reader

                settle_for_reader(self.layout)


def _split_options(options: Mapping[str, Any], name: str) -> "tuple[Asked, dict[str, Any]]":
    """Split the options into the store's and the format's."""
    from lightning_otel.adapter import Advantage, TripletAdapter
    from lightning_otel.dataset import formats
    from lightning_otel.dataset.query import Asked, Keywords

    known = Keywords.__annotations__
    asked = {name: value for name, value in options.items() if name in known}
    rest = {name: value for name, value in options.items() if name not in known}
    found = Asked.of(cast("Keywords", asked))
    if formats.get(name).is_by_task and isinstance(found.adapter, TripletAdapter):
        how = found.adapter.advantage or Advantage()
        found = found._replace(adapter=replace(found.adapter, advantage=how))
    return found, rest

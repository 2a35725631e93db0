"""The data set: a store with the transitions, trajectories and conversations of its spans."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Unpack

from lightning_otel.dataset import selections
from lightning_otel.store import SpanStore
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from lightning_otel.adapter import Adaptation
    from lightning_otel.dataset.export import Exported, FileKind, Place
    from lightning_otel.dataset.facts import FactReader
    from lightning_otel.dataset.formats.format import LeftOut, Row
    from lightning_otel.dataset.query import QueryKeywords, TransitionQuery
    from lightning_otel.dataset.selections import SelectionVersion
    from lightning_otel.store.table import Query, Table, Transitions
    from lightning_otel.types import Conversation, Report, Span, Trajectory, Transition
    from lightning_otel.types.instants import Instant


class Store(SpanStore):
    """A place that holds spans, written and read by any number of processes at once."""

    def spans(self, *, rollout_id: str | None = None, trace_id: str | None = None) -> "Table[Span]":
        """Spans in order of their start.

        Args:
            rollout_id: Only this rollout's: with the rewards given to it elsewhere or later, and
                without those given here to another.
            trace_id: Only this trace's.

        Raises:
            ConfigError: An id is no text.
        """
        check_types(locals(), Store.spans.__annotations__)
        from lightning_otel.store.selection import Selection, read_rollouts
        from lightning_otel.store.table import Spans

        selection = Selection(
            rollout_ids=() if rollout_id is None else (rollout_id,),
            trace_ids=() if trace_id is None else (trace_id,),
            is_ordered=True,
        )

        def open_query() -> "Query":
            if rollout_id is None:
                return self.source.fetch(selection)
            return read_rollouts(self.source, selection)

        return Spans(open_query, is_one=rollout_id is not None or trace_id is not None)

    def transitions(
        self, *, bodies: bool = True, **keywords: "Unpack[QueryKeywords]"
    ) -> "Transitions":
        """Transitions, one row each; one that several branches share appears once.

        Its ``report()`` is the funnel behind the rows, without adapting the spans once more.

        Args:
            bodies: Whether transitions have messages, tools, token ids and logprobs.
            **keywords: Which transitions, and how rewards reach them:
                :class:`~lightning_otel.dataset.query.QueryKeywords`, docs/transitions.md.

        Raises:
            ConfigError: A keyword is unknown, or cannot be understood.
            AdapterError: The other adapter cannot be loaded.
        """
        from lightning_otel.dataset.formats.transition_rows import row
        from lightning_otel.dataset.query import TransitionQuery, strip_bodies
        from lightning_otel.dataset.tables import query_rows
        from lightning_otel.store.table import Transitions
        from lightning_otel.types import Report
        from lightning_otel.types.transitions import STEP_COLUMNS, TRANSITION_COLUMNS, distinct

        check_types({"bodies": bodies}, {"bodies": bool})
        query = TransitionQuery.of(keywords, self)
        if not bodies and (facts := self._read_facts(query)) is not None:
            return Transitions(
                facts.query_steps,
                facts.read_steps,
                facts.read_records,
                counts=facts.count_steps,
                report=facts.read_report,
            )
        columns = TRANSITION_COLUMNS if bodies else STEP_COLUMNS
        is_all = query.wanted.wants_all

        def list_steps(part: "Adaptation") -> "Iterator[tuple[Transition, int]]":
            return (
                (step, path.branch)
                for step, path in distinct(part.trajectories)
                if is_all or query.wanted.wants(step)
            )

        def steps() -> "Iterator[tuple[Transition, int]]":
            report = Report()

            def add_report(part: "Adaptation") -> "Iterator[tuple[Transition, int]]":
                nonlocal report
                report = Report.total([report, part.report])
                return list_steps(part)

            # No part has a name here: it would be held while the next one is read.
            for step, branch in chain.from_iterable(map(add_report, self._adapt(query))):
                yield (step if bodies else strip_bodies(step)), branch
            table.keep(report)

        def records() -> Iterator[dict[str, Any]]:
            return (row(step, branch, columns) for step, branch in steps())

        def counts() -> Iterator[int]:
            for part in self._adapt(query):
                yield sum(1 for _ in list_steps(part))

        table = Transitions(
            lambda: query_rows(records(), columns),
            lambda: map(itemgetter(0), steps()),
            records,
            counts=counts,
        )
        return table

    def trajectories(self, **keywords: "Unpack[QueryKeywords]") -> "Iterator[Trajectory]":
        """Trajectories, read and adapted a group of rollouts at a time.

        A trajectory is whole: it is given if one of its transitions is wanted. The keywords are
        those of :meth:`transitions`.
        """
        from lightning_otel.dataset.query import TransitionQuery

        query = TransitionQuery.of(keywords, self)
        for part in self._adapt(query):
            for trajectory in part.trajectories:
                if any(map(query.wanted.wants, trajectory.transitions)):
                    yield trajectory

    def messages(self, **keywords: "Unpack[QueryKeywords]") -> "Table[Conversation]":
        """Conversations of chat messages with their tools and rewards, one row each.

        For supervised training and the search for prompts: a trajectory is one row, and every
        answer of it stands once; where its history was cut or begun anew, it is several. A
        conversation is given if one of its steps is wanted, by keywords of :meth:`transitions`.
        """
        from lightning_otel.adapter.conversations import make_conversations
        from lightning_otel.dataset.tables import MESSAGE_COLUMNS, message_row, query_rows
        from lightning_otel.store.table import Table

        def rows() -> "Iterator[Conversation]":
            return make_conversations(self.trajectories(**keywords))

        return Table(
            lambda: query_rows(map(message_row, rows()), MESSAGE_COLUMNS), rows, "conversations"
        )

    def report(self, **keywords: "Unpack[QueryKeywords]") -> "Report":
        """The funnel from spans to transitions, with every reason for a loss.

        It is that of the rollouts that had to be looked at, of all their agents; the keywords are
        those of :meth:`transitions`.
        """
        from lightning_otel.dataset.query import TransitionQuery
        from lightning_otel.types import Report

        query = TransitionQuery.of(keywords, self)
        if (facts := self._read_facts(query)) is not None:
            return facts.read_report()
        return Report.total(part.report for part in self._adapt(query))

    def breakdown(
        self, by: str = "agent", *, since: "Instant | None" = None, until: "Instant | None" = None
    ) -> "Table[dict[str, Any]]":
        """Break rewards, errors, latency, tokens and cost down, one row a name.

        Rewards are those of the rollouts that it took part in. ``error_rate``, ``p50_s`` and
        ``p95_s`` are of an agent's and a version's attempts (``uses``), of a model's calls, of a
        tool's executions; tokens and cost are those of calls.

        Args:
            by: ``agent``, ``model``, ``version`` (of a resource) or ``tool``.
            since: Only attempts that began at this time or later, as :meth:`transitions` takes it.
            until: Only attempts that began before.

        Raises:
            ConfigError: It is none of the four, or a time cannot be read.
        """
        from lightning_otel.errors import ConfigError
        from lightning_otel.store.views import DIMENSIONS, breakdown_sql
        from lightning_otel.types.instants import instant_ns

        if by not in DIMENSIONS:
            raise ConfigError(f"by is {by!r}; it must be one of {', '.join(DIMENSIONS)}")
        first_ns = 0 if since is None else instant_ns(since, "since")
        end_ns = 1 << 63 if until is None else instant_ns(until, "until")
        rollouts = f"(FROM rollouts WHERE start_ns >= {first_ns} AND start_ns < {end_ns})"
        query = f"FROM ({breakdown_sql(by, rollouts)}) ORDER BY rollouts DESC, uses DESC, name"
        return self.sql(query)

    def export(
        self,
        format: str,
        place: "Place",
        *,
        kind: "FileKind | None" = None,
        left_out: "Callable[[LeftOut], None] | None" = None,
        progress: "Callable[[int], None] | None" = None,
        certificate: bool = False,
        split: float | None = None,
        seed: int = 0,
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
            left_out: Callback for each step that the format cannot represent, with the reason.
            progress: Told how many rollouts are done.
            certificate: Whether a certificate is written beside the file, or into the folder.
            split: The share of tasks, between 0 and 1, whose rows go to a file of validation.
            seed: Divides the tasks otherwise.
            **options: Those of the format, such as ``threshold`` of ``kto``, and those of
                :meth:`transitions`. ``advantage`` says what the groups are.

        Raises:
            ConfigError: There is no such format or option, or nothing can be written there.
            AdapterError: The other adapter cannot be loaded.
            CertificateError: The rows do not account for every step.
            StoreMissingError: There is no store.
        """
        from lightning_otel.dataset.census import Split
        from lightning_otel.dataset.export import export
        from lightning_otel.dataset.query import split_options

        check_types({"split": split, "seed": seed}, {"split": float | None, "seed": int})
        options = selections.freeze_options(self, options)
        query, settings = split_options(self, options, format)
        # "2h" is another time tomorrow.
        times = {"since": query.wanted.since_ns, "until": query.wanted.until_ns}
        stated = {k: times.get(k) or v for k, v in options.items() if k not in settings}
        exported = export(
            lambda: self._adapt(query),
            format,
            place,
            kind=kind,
            wanted=query.wanted,
            split=Split(split, seed),
            source=self.name if certificate else None,
            left_out=left_out,
            progress=progress,
            options=settings,
            query=stated,
        )
        if isinstance(place, (str, os.PathLike)) and options.get("selection") is not None:
            selections.note_export(self, options["selection"], os.path.abspath(place))
        return exported

    def rows(self, format: str, **options: Any) -> "Iterator[Row]":
        """The rows of a format as :meth:`export` makes them, one by one; nothing is written.

        Raises:
            ConfigError: There is no such format or option.
            AdapterError: The other adapter cannot be loaded.
        """
        from lightning_otel.dataset import formats
        from lightning_otel.dataset.query import split_options

        options = selections.freeze_options(self, options)
        query, settings = split_options(self, options, format)
        read = formats.get(format).trajectories_of

        def paths() -> "Iterator[Trajectory]":
            for part in map(read, self._adapt(query)):
                yield from filter(None, map(query.wanted.part_of, part))

        return formats.rows(format, paths(), **settings)

    def adapt(
        self, *, bodies: bool = True, **keywords: "Unpack[QueryKeywords]"
    ) -> "Iterator[Adaptation]":
        """Adapt a group of rollouts at a time, and yield the credit with the result.

        Of the keywords of :meth:`transitions`, rollouts, times and agents choose the rollouts; all
        of their steps are there.
        """
        from lightning_otel.dataset.query import TransitionQuery, strip_adaptation

        adaptations = self._adapt(TransitionQuery.of(keywords, self))
        return adaptations if bodies else map(strip_adaptation, adaptations)

    def _adapt(self, query: "TransitionQuery") -> "Iterator[Adaptation]":
        from lightning_otel.adapter import TripletAdapter
        from lightning_otel.adapter.continuations import find_references
        from lightning_otel.store.selection import (
            connect_with_moved,
            list_incomplete,
            read_batches,
            read_origins,
        )

        adapter, selection, include_incomplete = query
        source = self.source.at_moment()
        con = connect_with_moved(source)
        reader = source.make_reader(con)
        out = frozenset() if include_incomplete else list_incomplete(source, con)
        extra: dict[str, Any] = {}
        if isinstance(adapter, TripletAdapter) and adapter.advantage is not None:
            # A rollout is compared with those that are not asked for, too.
            parts = (
                adapter.outcomes(selection.spans(spans), incomplete=out)
                for spans in read_batches(source)
            )
            extra["estimates"] = adapter.estimate(outcome for part in parts for outcome in part)

        def explain(batch: "Iterable[Span]") -> "Adaptation":
            if not isinstance(adapter, TripletAdapter):
                return adapter.explain(batch, incomplete=out)
            spans = list(batch)
            origins = read_origins(reader, *find_references(spans))
            return adapter.explain(spans, incomplete=out, origins=origins, **extra)

        return (explain(selection.spans(spans)) for spans in read_batches(source, selection, con))

    def save_selection(
        self, name: str, *, source: str = "", **keywords: "Unpack[QueryKeywords]"
    ) -> "SelectionVersion":
        """Freeze the steps that a filter selects now, and their rewards, as the next version.

        What :meth:`transitions`, :meth:`export` and the like give for ``selection="NAME@2"`` stays
        the same, whatever is recorded, rewarded or retracted later.

        Args:
            name: Letters, digits, ``_``, ``.`` and ``-``.
            source: The page that it comes from.
            **keywords: As :meth:`transitions` takes them, in plain values.

        Raises:
            ConfigError: Nothing matches, or labels leave open which ``reward`` counts.
        """
        return selections.save_version(self, name, keywords, source)

    def _read_facts(self, query: "TransitionQuery") -> "FactReader | None":
        from lightning_otel.dataset.facts import FactReader, can_answer

        if self.layout is None or not can_answer(query):
            return None
        self.layout.require()
        return FactReader(self.source, query)

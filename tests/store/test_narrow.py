"""Transitions without their bodies are the same transitions."""

import gc
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.adapter.forest import Forest, reward_attributes, said, token_attributes
from tests.adapter.forests import forests

from lightning_otel import Store, TripletAdapter
from lightning_otel import conventions as c
from lightning_otel.adapter.linear import Walk
from lightning_otel.dataset import linear
from lightning_otel.dataset.linear import without_bodies
from lightning_otel.formats.transition_rows import NARROW_COLUMNS
from lightning_otel.store import settle
from lightning_otel.store.gist import GIST
from lightning_otel.store.parquet import describe_file
from lightning_otel.store.sql import quoted
from lightning_otel.types import Message, Report, Span, Transition


class Agent:
    """Random work of agents as our own instrumentors tell of it, mostly call after call."""

    def __init__(self, number: int, oddness: float) -> None:
        self._random = random.Random(number)
        self._oddness = oddness
        self._number = number
        self._calls = 0
        self.forest = Forest(
            rollout_id=f"r{number}", trace_id=f"{number + 1:032x}", process=f"p{number:03}"
        )

    def _may(self, chance: float = 1.0) -> bool:
        return self._random.random() < self._oddness * chance

    def work(self) -> list[Span]:
        """The spans of a rollout."""
        with self.forest.inside(c.SPAN_ROLLOUT):
            for _ in range(self._random.randint(1, 2)):
                if self._random.random() < 0.3:
                    self._converse(self._random.choice(["planner", "writer"]))
                else:
                    with self.forest.agent(self._random.choice(["planner", "writer"])):
                        self._converse(None)
                if self._random.random() < 0.7:
                    self._reward()
        return [
            replace(span, scope=c.SCOPE) if not self._may(0.02) else span
            for span in self.forest.spans
        ]

    def _converse(self, agent: str | None) -> None:
        history: list[Message] = [said("system", 'You are an "assistant"'), said("user", "go ü")]
        if self._may(0.2):
            history.append(said("assistant", "as an example"))
            history.append(said("user", "like that"))
        for _ in range(self._random.randint(1, 4)):
            answer = self._call(history, agent)
            if self._may(0.2):
                history = history[: self._random.randint(1, len(history))]
            elif self._random.random() < 0.9:
                history = [*history, answer, self._tool()]
            if self._may(0.3):
                self._reward()

    def _tool(self) -> Message:
        opened = self.forest.open("execute_tool search", {c.OPERATION: c.EXECUTE_TOOL})
        beside = self.forest.open("work") if self._random.random() < 0.3 else None
        if self._may(0.2):
            self._call([said("user", "inside a tool")], None, parent=opened)
        self.forest.close(opened)
        if beside:
            self.forest.close(beside)
        response = {
            "messages": [{"role": "assistant", "parts": []}],
            "n": self._random.randint(0, 9),
        }
        part = {"type": "tool_call_response", "id": "x", "response": response}
        return {
            "role": "tool",
            "parts": [part if self._may(0.3) else {**part, "response": "found"}],
        }

    def _answer(self) -> Message:
        if self._random.random() < 0.5:
            part = {
                "type": "tool_call",
                "id": f"{self._calls}",
                "name": "f",
                "arguments": {"a": [1]},
            }
            return {"role": "assistant", "parts": [part]}
        text = "again" if self._may(0.3) else f"answer {self._calls}"
        if self._may(0.2):
            thought = {"type": "reasoning", "content": "hm"}
            return {"role": "assistant", "parts": [thought, {"type": "text", "content": text}]}
        return said("assistant", text)

    def _call(self, history: list[Message], agent: str | None, **extra: Any) -> Message:
        self._calls += 1
        answer = self._answer()
        told = [{**answer, "finish_reason": "stop"}]
        if self._may(0.1):
            told.append(said("assistant", "another choice"))
        attributes: dict[str, Any] = {
            c.OPERATION: c.CHAT,
            c.INPUT_MESSAGES: orjson.dumps(history).decode(),
            c.OUTPUT_MESSAGES: orjson.dumps(told if not self._may(0.1) else [answer]).decode(),
            c.RESPONSE_ID: f"reply-{self._number}-{0 if self._may(0.1) else self._calls}",
            c.REQUEST_MODEL: "m",
            c.FINISH_REASONS: ["stop"],
            c.OUTPUT_TOKENS: 3,
        }
        odd: list[dict[str, Any]] = [
            {c.ABANDONED: True},
            {c.TRACK_ONLY: ["planner"]},
            {c.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text"'},
            {c.INPUT_MESSAGES: None},
            {c.OPERATION: c.EMBEDDINGS},
            {c.RESPONSE_ID: None},
            {c.RECEIVED: "otlp:127.0.0.1"},
            {c.SYSTEM_INSTRUCTIONS: f'[{{"type":"text","content":"{self._calls}"}}]'},
            reward_attributes(0.3),
        ]
        if self._may(0.3):
            attributes |= self._random.choice(odd)
        if self._random.random() < 0.3:
            attributes |= token_attributes([1, 2], [3, 4], [-0.5, -0.25])
            if self._may(0.3):
                attributes[c.PROMPT_TOKEN_IDS] = "damaged"
        if agent:
            attributes[c.AGENT_NAME] = agent
        attributes = {key: value for key, value in attributes.items() if value is not None}
        status = {"status": "ERROR"} if self._may(0.1) else {}
        opened = self.forest.open("chat m", attributes, **extra, **status)
        if self._may(0.1):
            self._call(history, agent)
        if self._may(0.1):
            self.forest.make(c.SPAN_ANNOTATION, reward_attributes(0.1), parent=opened)
        if not self._may(0.03):
            self.forest.close(opened)
        return answer

    def _reward(self) -> None:
        value = self._random.choice([0.0, 0.5, 1])
        if self._may(0.3):
            self.forest.reward(("a", value), ("b", 2.0))
        elif self._may(0.3):
            self.forest.reward(value, response_id=f"reply-{self._number}-1")
        elif self._may(0.1):
            self.forest.make(c.SPAN_ANNOTATION, {c.REWARD_VALUE: "much"})
        elif self._may(0.1):
            self.forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: "act"})
        else:
            self.forest.reward(value)


def _rows(steps: list[Transition]) -> Counter[str]:
    return Counter(repr(without_bodies(step)) for step in steps)


def _funnel(report: Report) -> Report:
    return replace(
        report,
        dropped=tuple(sorted(report.dropped, key=repr)),
        repairs=tuple(sorted(report.repairs, key=repr)),
    )


def _same(store: Store, **options: Any) -> None:
    whole = store.transitions(**options)
    thin = store.transitions(**options, bodies=False)

    steps, others = whole.rows(), thin.rows()

    assert _rows(steps) == Counter(map(repr, others))
    assert _funnel(thin.report()) == _funnel(whole.report())
    assert _funnel(store.report(**options)) == _funnel(whole.report())
    assert sorted(map(repr, map(_told, thin.dicts()))) == sorted(
        repr(_told({name: row[name] for name in NARROW_COLUMNS})) for row in whole.dicts()
    )


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its JSON parsed."""
    objects = {name for name, kind in NARROW_COLUMNS.items() if kind == "JSON"}
    return {name: orjson.loads(row[name]) if name in objects else row[name] for name in row}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rollouts take which way."""
    counts: Counter[str] = Counter()
    add, adapt = Walk.add, TripletAdapter.explain

    def walk(*given: Any) -> bool:
        is_linear = add(*given)
        counts["linear"] += is_linear
        return is_linear

    def whole(self: TripletAdapter, *given: Any, **options: Any) -> Any:
        found = adapt(self, *given, **options)
        counts["general"] += found.report.rollouts
        return found

    monkeypatch.setattr(Walk, "add", walk)
    monkeypatch.setattr(TripletAdapter, "explain", whole)
    return counts


@pytest.mark.parametrize("oddness", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("received", [True, False])
def test_transitions_without_bodies_are_the_same(
    store: Store, oddness: float, received: bool, taken: Counter[str]
) -> None:
    """Rows, branches, rewards and funnel are those of the general way, whichever way they took."""
    for number in range(60):
        store.add(Agent(number, oddness).work())

    _same(store, received=received)

    # Each rollout is adapted twice with its bodies and three times without.
    passes = Counter({way: count / 60 for way, count in taken.items()})
    passes["general"] -= 2
    assert passes.total() == pytest.approx(3)
    assert passes["linear"] > (1 if oddness < 0.5 else 0.05)


def _settle(store: Store) -> str:
    """Settle all there is; the name of the file it stands in."""
    assert store.layout is not None
    store.writer().seal()
    store.settle()
    return store.layout.read_manifest().live_files[-1].name


def _rewrite(store: Store, name: str, change: str) -> None:
    """Have other columns in a file."""
    assert store.layout is not None
    layout, manifest = store.layout, store.layout.read_manifest()
    path = layout.data / name
    made = path.with_suffix(".made")
    duckdb.execute(
        f"COPY (SELECT * {change} FROM {quoted(str(path))}) TO {quoted(str(made))} "
        "(FORMAT parquet, KV_METADATA {schema: '1'})"
    )
    made.replace(path)
    files = [
        replace(
            describe_file(duckdb.connect(), path),
            added_us=file.added_us,
        )
        if file.name == name
        else file
        for file in manifest.files
    ]
    layout.write_manifest(replace(manifest, files=tuple(files)))


_WITHOUT = f"EXCLUDE ({', '.join(GIST)})"
_EMPTY = "REPLACE (NULL::TINYINT AS gist_kind)"
_OTHERWISE = "REPLACE (gist_before + 1 AS gist_before, gist_after - 1 AS gist_after)"


@pytest.mark.parametrize("changes", [("",), (_WITHOUT,), (_EMPTY, ""), (_OTHERWISE, "")])
def test_transitions_come_from_files_of_all_kinds(
    store: Store, changes: tuple[str, ...], taken: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that lie in files with their gist, without, with another one, and in segments."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)
    spans = [Agent(number, 0.1).work() for number in range(12)]
    parts = len(changes) + 1
    for number, change in enumerate([*changes, None]):
        for own in spans:
            share = -(-len(own) // parts)
            store.add(own[number * share : (number + 1) * share])
        if change is not None:
            name = _settle(store)
            if change:
                _rewrite(store, name, change)

    _same(store)

    if not {_EMPTY, _OTHERWISE} & {*changes}:
        assert taken["linear"] > 12


@pytest.mark.parametrize(
    "wanted",
    [{"agents": "planner", "rewarded": True}, {"rollout_id": ["r1", "r3"]}],
)
def test_tables_without_bodies_hold_what_is_wanted(store: Store, wanted: dict[str, Any]) -> None:
    """What is selected by its steps is selected in tables too."""
    for number in range(12):
        store.add(Agent(number, 0.1).work())

    _same(store, **wanted)


@settings(max_examples=10, deadline=None, phases=[Phase.generate])  # each makes a store
@given(st.lists(forests, min_size=1, max_size=3))
def test_transitions_of_any_forest_without_bodies_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, found: list[list[Span]]
) -> None:
    """So are those of whatever broken tracers leave behind."""
    store = Store(tmp_path_factory.mktemp("narrow") / "t.duckdb")
    for number, spans in enumerate(found):
        store.add(replace(s, trace_id=f"{number}{s.trace_id[1:]}", scope=c.SCOPE) for s in spans)

    _same(store, include_incomplete=True)


def test_batches_do_not_matter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that are read a few at a time come out as those that are read at once."""
    for number in range(20):
        store.add(Agent(number, 0.1).work())
    at_once = list(map(repr, store.transitions(bodies=False)))
    monkeypatch.setattr(linear, "_PLAN", linear._PLAN.replace(str(linear.ROWS), "30"))

    assert sorted(map(repr, store.transitions(bodies=False))) == sorted(at_once)


def test_no_folder_is_left_behind(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What spills to the disk is gone with whoever read it, also of a pass that was broken off."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store.add(Agent(1, 0.0).work())
    table = store.transitions(bodies=False)

    next(iter(table))
    table.to_parquet(tmp_path / "t.parquet")
    assert store.report().transitions

    gc.collect()
    assert not list(tmp_path.glob("lightning-otel-*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of one's own."""
    return Store(tmp_path / "t.duckdb")

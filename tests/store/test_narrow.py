"""Transitions by the linear walk, with bodies or without, are those of the general adapter."""

import gc
import random
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.adapter.forest import draw, reward_attributes, said
from tests.adapter.forests import forests

from lightning_otel import Store, TripletAdapter
from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.call_facts import Walk
from lightning_otel.dataset import linear
from lightning_otel.dataset.formats.format import distinct
from lightning_otel.dataset.formats.transition_rows import COLUMNS, NARROW_COLUMNS, row
from lightning_otel.dataset.query import TransitionQuery, strip_adaptation, strip_bodies
from lightning_otel.store import settle, snapshot
from lightning_otel.store.parquet import describe_file
from lightning_otel.store.sql import quote_text
from lightning_otel.types import Report, Span
from lightning_otel.types import conventions as c

PARTS = {
    "call": '{"type":"tool_call","id":"1","name":"f","arguments":{"a":[1]}}',
    "thought": '{"type":"reasoning","content":"hm"},{"type":"text","content":"so"}',
    "system": '{"type":"text","content":"You are an \\"assistant\\" ü"}',
    "found": '{"type":"tool_call_response","id":"x","response":"found"}',
    "listed": '{"type":"tool_call_response","id":"x","response":{"messages":'
    '[{"role":"assistant","parts":[]}],"n":3}}',
}
"""What stands for a text of a drawing."""
REWARDS = [
    "!0",
    "!.5",
    "!1",
    "!a=.5,b=2",
    "!.5@id=answer1",
    "!1@agentlightning.reward.0.value=much",
]
ODD: list[dict[str, Any]] = [
    {c.ABANDONED: True},
    {c.TRACK_ONLY: ["planner"]},
    {c.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text"'},
    {
        c.OUTPUT_MESSAGES: orjson.dumps(
            [said("assistant", "one"), said("assistant", "two")]
        ).decode()
    },
    {c.INPUT_MESSAGES: None},
    {c.OPERATION: c.EMBEDDINGS},
    {c.RESPONSE_ID: None},
    {c.RESPONSE_ID: "r1-1"},
    {c.RECEIVED: "otlp:127.0.0.1"},
    {c.SYSTEM_INSTRUCTIONS: '[{"type":"text","content":"be brief"}]'},
    {c.PROMPT_TOKEN_IDS: "damaged"},
    reward_attributes(0.3),
]


def work(number: int, oddness: float) -> list[Span]:
    """A random rollout as our own instrumentors tell of it, mostly call after call."""
    chance = random.Random(number)
    words, calls = [f"{c.SPAN_ROLLOUT}("], 0

    def may(share: float) -> bool:
        return chance.random() < oddness * share

    for _ in range(chance.randint(1, 2)):
        agent, is_block = chance.choice(["planner", "writer"]), chance.random() < 0.7
        own = "" if is_block else f"@{c.AGENT_NAME}={agent}"
        words.append(f"{agent}[" if is_block else "work(")
        history = ["s:system", "u:go", *(["a:so", "u:on"] if may(0.2) else [])]
        for _ in range(chance.randint(1, 4)):
            calls += 1
            answer = chance.choice(["call", "thought", "again", f"answer{calls}"])
            flags = "@exact" * (chance.random() < 0.3) + "@error" * may(0.1)
            talk = f"{own}@as=n{calls}@id=r{number}-{calls}{flags}<{'|'.join(history)}"
            inside = [f"n{calls}/{chance.choice(['!.1', 'within<u:x'])}"] * may(0.2)
            words += [f"+{answer}{talk}", *inside, *([] if may(0.03) else [f"-n{calls}"])]
            if may(0.2):
                history = history[: chance.randint(1, len(history))]
            elif chance.random() < 0.9:
                history += [f"a:{answer}", f"t:{'listed' if may(0.3) else 'found'}"]
                words += ["tool(", *["beside<u:x"] * may(0.2), ")"]
            words += [chance.choice([*REWARDS, "do:act"])] * may(0.3)
        words.append("]" if is_block else ")")
        words += [chance.choice(REWARDS if may(1) else REWARDS[:3])] * (chance.random() < 0.7)
    ids = {"rollout_id": f"r{number}", "trace_id": f"{number + 1:032x}", "process": f"p{number:03}"}
    found = []
    for span in draw(" ".join([*words, ")"]).replace("@id=ID", f"@id=r{number}-1"), **ids).spans:
        attributes = dict(span.attributes)
        if c.INPUT_MESSAGES in attributes:
            for key, (name, part) in product((c.INPUT_MESSAGES, c.OUTPUT_MESSAGES), PARTS.items()):
                text = f'{{"type":"text","content":"{name}"}}'
                attributes[key] = attributes[key].replace(text, part)
            attributes |= chance.choice(ODD) if may(0.3) else {}
        attributes = {key: value for key, value in attributes.items() if value is not None}
        found.append(replace(span, attributes=attributes, scope="" if may(0.02) else c.SCOPE))
    return found


def _funnel(report: Report) -> Report:
    return replace(
        report,
        dropped=tuple(sorted(report.dropped, key=repr)),
        repairs=tuple(sorted(report.repairs, key=repr)),
    )


def assert_same(store: Store, **options: Any) -> None:
    """Compare what the walk makes with what the general adapter makes of whole rollouts."""
    wanted = TransitionQuery.of(options).wanted
    found = list(store.adapt(**options))
    report = _funnel(Report.total(each.report for each in found))
    paths = [path for each in found for path in each.trajectories]
    steps = [(step, path.branch) for step, path in distinct(paths) if wanted.wants(step)]

    for bodies in (True, False):
        table = store.transitions(**options, bodies=bodies)
        told = [step if bodies else strip_bodies(step) for step, _ in steps]
        columns = COLUMNS if bodies else NARROW_COLUMNS
        assert sorted(map(repr, table)) == sorted(map(repr, told))
        assert _funnel(table.report()) == report
        assert sorted(repr(_told(each)) for each in table.dicts()) == sorted(
            repr(_plain(row(step, branch, columns))) for step, branch in steps
        )
    assert _funnel(store.report(**options)) == report
    narrow = list(store.adapt(**options, bodies=False))
    assert _describe(narrow) == _describe([*map(strip_adaptation, found)])


def _describe(found: list[Adaptation]) -> list[str]:
    paths = [path for each in found for path in each.trajectories]
    credited = [each for one in found for each in one.credited]
    return sorted(map(repr, [*paths, *(path.transitions for path in paths), *credited]))


def _plain(row: dict[str, Any]) -> Any:
    return orjson.loads(orjson.dumps(row))


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its JSON parsed."""
    objects = {name for name, kind in COLUMNS.items() if kind == "JSON"}
    return {
        name: orjson.loads(value) if name in objects and value is not None else value
        for name, value in row.items()
    }


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
def test_transitions_are_those_of_the_general_adapter(
    store: Store, oddness: float, received: bool, taken: Counter[str]
) -> None:
    """Rows, branches, rewards and funnel are those of the general way, whichever way they took."""
    for number in range(60):
        store.add(work(number, oddness))

    assert_same(store, received=received)

    # Each rollout is adapted once by the general adapter alone, and six times by either.
    passes = Counter({way: count / 60 for way, count in taken.items()})
    passes["general"] -= 1
    assert passes.total() == pytest.approx(6)
    # Of a small store the walk makes only the rows without bodies.
    share = 0.3 if snapshot._SMALL_BYTES else 1
    assert passes["linear"] > share * (1 if oddness < 0.5 else 0.05)


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
        f"COPY (SELECT * {change} FROM {quote_text(str(path))}) TO {quote_text(str(made))} "
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


_OTHERWISE = "REPLACE (gist_before + 1 AS gist_before, gist_after - 1 AS gist_after)"


@pytest.mark.parametrize("changes", [("",), (_OTHERWISE, "")])
def test_transitions_come_from_files_of_all_kinds(
    store: Store, changes: tuple[str, ...], taken: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that lie in files with their digest, with another one, and in segments."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)
    spans = [work(number, 0.1) for number in range(12)]
    parts = len(changes) + 1
    for number, change in enumerate([*changes, None]):
        for own in spans:
            share = -(-len(own) // parts)
            store.add(own[number * share : (number + 1) * share])
        if change is not None:
            name = _settle(store)
            if change:
                _rewrite(store, name, change)

    assert_same(store)

    if changes == ("",):
        assert taken["linear"] > (6 if snapshot._SMALL_BYTES else 12)


@settings(max_examples=10, deadline=None, phases=[Phase.generate])  # each makes a store
@given(st.lists(forests, min_size=1, max_size=3))
def test_transitions_of_any_forest_are_those_of_the_general_adapter(
    tmp_path_factory: pytest.TempPathFactory, found: list[list[Span]]
) -> None:
    """So are those of whatever broken tracers leave behind."""
    store = Store(tmp_path_factory.mktemp("narrow") / "t.duckdb")
    for number, spans in enumerate(found):
        store.add(replace(s, trace_id=f"{number}{s.trace_id[1:]}", scope=c.SCOPE) for s in spans)

    assert_same(store, include_incomplete=True)


def test_a_file_with_damaged_bodies_is_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its narrow columns read well: the walk goes over rollouts whose bodies then are not there."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)
    assert store.layout is not None
    names = []
    for number in range(2):
        store.add(work(number, 0.0))
        names.append(_settle(store))
    for segment in store.layout.live.iterdir():  # from which they would be read again
        segment.unlink()
    path = store.layout.data / names[0]
    ((start, size),) = duckdb.execute(
        "SELECT coalesce(dictionary_page_offset, data_page_offset), total_compressed_size "
        "FROM parquet_metadata(?) WHERE path_in_schema = 'input_messages'",
        [str(path)],
    ).fetchall()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * size)

    steps = store.transitions().rows()

    assert {step.rollout_id for step in steps} == {"r1"}
    assert all(step.observation for step in steps)


def test_batches_do_not_matter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that are read a few at a time come out as those that are read at once."""
    for number in range(20):
        store.add(work(number, 0.1))
    at_once = list(map(repr, store.transitions(bodies=False)))
    whole = list(map(repr, store.transitions()))
    monkeypatch.setattr(linear, "ROWS", 30)
    monkeypatch.setattr(linear, "ROWS_WITH_BODIES", 30)
    monkeypatch.setattr(linear, "BATCH_SPANS", 10)

    assert sorted(map(repr, store.transitions(bodies=False))) == sorted(at_once)
    assert sorted(map(repr, store.transitions())) == sorted(whole)


def test_no_folder_is_left_behind(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What spills to the disk is gone with whoever read it, also of a pass that was broken off."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store.add(work(1, 0.0))
    table = store.transitions(bodies=False)

    next(iter(table))
    table.to_parquet(tmp_path / "t.parquet")
    assert store.report().transitions

    gc.collect()
    assert not list(tmp_path.glob("lightning-otel-*"))


@pytest.fixture(params=[snapshot._SMALL_BYTES, 0], ids=["small", "large"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of one's own; of a small one only rows without bodies are walked over."""
    monkeypatch.setattr(snapshot, "_SMALL_BYTES", request.param)
    return Store(tmp_path / "t.duckdb")

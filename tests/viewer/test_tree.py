"""A trace as rows: whatever its spans say of each other, each stands in it once."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.emitters import reward_span
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.viewer import tree
from lightning_otel.serve.viewer.span import detail, read_span, shown_tokens, text_of
from lightning_otel.serve.viewer.talk import talks
from lightning_otel.serve.viewer.trace import bar
from lightning_otel.serve.viewer.tree import fold, held_trace, let_go, read_trace
from lightning_otel.types import Span
from lightning_otel.views.outlines import outline_of

TRACE = "a" * 32


def span(number: int, parent: int | None = None, **changes: Any) -> Span:
    """A span of the one trace, by number."""
    fields: dict[str, Any] = {
        "name": f"work {number}",
        "start_ns": 1_000 * number,
        "end_ns": 1_000 * number + 500,
        "scope": c.SCOPE,
        **changes,
    }
    parent_id = None if parent is None else f"{parent:016x}"
    return Span(trace_id=TRACE, span_id=f"{number:016x}", parent_span_id=parent_id, **fields)


def said(*turns: tuple[str, str]) -> str:
    """Messages as spans hold them."""
    return orjson.dumps(
        [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in turns]
    ).decode()


def call(number: int, parent: int, given: str, answered: str, **changes: Any) -> Span:
    """A request to a model."""
    attributes = {c.OPERATION: c.CHAT, c.INPUT_MESSAGES: given, c.OUTPUT_MESSAGES: answered}
    return span(number, parent, attributes=attributes, **changes)


def test_rows_stand_below_their_parents(store: Store) -> None:
    """With their depth, and how many stand below them."""
    store.add([span(1), span(2, 1), span(3, 2), span(4, 1)])

    rows = read_trace(store, TRACE).rows

    assert [(row.depth, row.parent, row.size) for row in rows] == [
        (0, -1, 3), (1, 0, 1), (2, 1, 0), (1, 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "spans",
    [
        [span(1, 2), span(2, 3), span(3, 1)],
        [span(1, 1), span(2, 1)],
        [span(1, 99), span(2, 98)],
        [span(1, end_ns=None), span(2, 1, end_ns=None)],
        [span(1, end_ns=1_000), span(2, 1, end_ns=1), span(3, 1, start_ns=0, end_ns=0)],
        [span(1), span(1), span(2, 1)],
        [span(number, number - 1 or None) for number in range(1, 1_001)],
    ],
    ids=["loop", "own parent", "orphans", "unended", "clocks", "twice", "deep"],
)
def test_rows_hold_every_span_once(store: Store, spans: list[Span]) -> None:
    """Each after what is above it, with a bar within bounds, whatever the spans say."""
    store.add(spans)

    trace = read_trace(store, TRACE)

    assert sorted(row.span_id for row in trace.rows) == sorted({each.span_id for each in spans})
    assert all(row.parent < at for at, row in enumerate(trace.rows))
    assert len(fold(trace.rows).shown) == len(trace.rows)
    for row in trace.rows:
        begin, width = bar(trace.start_ns, trace.end_ns, row)
        assert 0 <= begin <= 1000
        assert 0 < width <= 1000


def test_no_trace_is_an_error(store: Store) -> None:
    """It says what was looked for."""
    store.add([span(1)])

    with pytest.raises(NotFoundError, match="no trace 'b'"):
        read_trace(store, "b")


@pytest.mark.pain(14)
def test_http_and_db_spans_are_folded_away_and_counted(store: Store) -> None:
    """Only where nothing else lies below them; all of them, if there is nothing else."""
    http, db = {"http.request.method": "GET"}, {"db.system.name": "postgresql"}
    store.add(
        [
            span(1, attributes={"http.method": "POST"}),
            span(2, 1),
            span(3, 2, attributes=http),
            span(4, 3, attributes=db),
            span(5, 2, attributes={"note": '"db.system": is text here'}),
        ]
    )
    rows = read_trace(store, TRACE).rows

    shown, others = fold(rows)

    assert [each.row.name for each in shown] == ["work 1", "work 2", "work 5"]
    assert [each.folded for each in shown] == [0, 2, 0]
    assert others == 2
    assert len(fold(rows, others=True).shown) == 5
    alone = [replace(row, parent=-1) for row in rows if row.name == "work 3"]
    assert (len(fold(alone).shown), fold(alone).others) == (1, 0)


def test_what_is_closed_is_hidden(store: Store) -> None:
    """With everything below it; the row says so."""
    store.add([span(1), span(2, 1), span(3, 2), span(4, 1)])

    shown, _ = fold(read_trace(store, TRACE).rows, [f"{2:016x}", "unknown"])

    assert [(each.row.name, each.is_closed) for each in shown] == [
        ("work 1", False), ("work 2", True), ("work 4", False),
    ]  # fmt: skip


def test_rewards_given_later_stand_below_what_they_judge(store: Store) -> None:
    """By link to a span or response; those for the rollout at the end; others' not at all."""
    given, answered = said(("user", "hi")), said(("assistant", "ho"))
    first = call(2, 1, given, answered)
    first.attributes[c.RESPONSE_ID] = "r-2"  # type: ignore[index]  # a dict, in this test
    store.add([span(1), first, call(3, 1, given, answered)])
    store.add(
        [
            reward_span({"by span": 1.0}, span_id=f"{3:016x}"),
            reward_span({"by response": 0.5}, response_id="r-2"),
            reward_span({"of the rollout": 0.25}, rollout_id=TRACE),
            reward_span({"of another": 9.0}, rollout_id="b" * 32),
        ]
    )

    rows = read_trace(store, TRACE).rows

    below = {row.facts["reward_name"]: row.parent for row in rows if row.is_later}
    names = [row.name for row in rows]
    assert below == {
        "by span": names.index("work 3"),
        "by response": names.index("work 2"),
        "of the rollout": -1,
    }
    steps = {row.name: row.step.reward for row in rows if row.step is not None}
    assert steps == {"work 2": 0.5, "work 3": 1.0}


def test_parts_of_a_page_are_of_the_trace_as_the_page_showed_it(store: Store) -> None:
    """A trace of thousands of spans is not read anew for each of them."""
    store.add([span(1)])
    page = read_trace(store, TRACE)
    store.add([span(2, 1)])

    assert held_trace(store, TRACE) is page
    assert len(read_trace(store, TRACE).rows) == 2


def test_trace_is_not_held_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only as long as the page may still ask for its parts."""
    store.add([span(1)])
    page = read_trace(store, TRACE)
    let_go()
    assert held_trace(store, TRACE) is page
    monkeypatch.setattr(tree, "_KEPT_S", 0.0)

    let_go()

    monkeypatch.undo()
    assert held_trace(store, TRACE) is not page


def test_a_talk_says_every_message_once(store: Store) -> None:
    """A growing history does not repeat itself; another history is said to be one."""
    store.add(
        [
            span(1, end_ns=9_000),
            call(2, 1, said(("user", "one")), said(("assistant", "1"))),
            call(
                3, 1, said(("user", "one"), ("assistant", "1"), ("user", "two")),
                said(("assistant", "2")),
            ),
        ]
    )  # fmt: skip

    (talk,) = talks(outline_of(store.source, "trace", TRACE))

    assert [(each.role, each.parts[0].text) for each in talk.messages] == [
        ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"),
    ]  # fmt: skip
    assert [each.label for each in talk.messages] == ["", "#0", "", "#1"]


@pytest.mark.pain(13)
def test_a_long_message_is_cut_and_can_be_seen_whole(store: Store) -> None:
    """Its length is told; the whole text is had by its place."""
    long = "x" * 5_000_000 + "end"
    store.add([span(1), call(2, 1, said(("user", long)), said(("assistant", "ho")))])
    found = read_span(store, TRACE, f"{2:016x}")

    (part,) = detail(found).given[0].parts

    assert part.is_cut
    assert (part.length, len(part.text)) == (5_000_003, 8_000)
    assert text_of(found, {"side": "input", "message": "0", "part": "0"}) == long


def test_messages_too_large_to_be_kept_whole_are_shown_as_what_is_left(store: Store) -> None:
    """Of 10 MB the store keeps a part, which is no JSON; it is there, with what was cut."""
    store.add([span(1), call(2, 1, said(("user", "x" * 10_000_000)), said(("assistant", "ho")))])

    found = detail(read_span(store, TRACE, f"{2:016x}"))

    values = {value.key: value.part for value in found.values}
    assert found.given == []
    assert values[c.INPUT_MESSAGES].is_cut
    assert values[c.INPUT_MESSAGES].length > 1_000_000
    assert "10000" in values[c.CUT].text


@pytest.mark.parametrize(
    "query",
    [{}, {"key": "none"}, {"side": "input", "message": "9", "part": "0"},
     {"side": "input", "message": "x", "part": "0"}, {"side": "y", "message": "0", "part": "7"}],
)  # fmt: skip
def test_a_text_that_is_not_there_is_an_error(store: Store, query: dict[str, str]) -> None:
    """Whatever is asked for."""
    store.add([span(1), call(2, 1, said(("user", "hi")), said(("assistant", "ho")))])

    with pytest.raises(NotFoundError):
        text_of(read_span(store, TRACE, f"{2:016x}"), query)


def test_parts_are_named_and_media_are_not_fetched(store: Store) -> None:
    """Reasoning, calls and answers of tools, media and what nobody knows, each as text."""
    parts: list[Any] = [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c", "name": "search", "arguments": {"q": 1}},
        {"type": "tool_call_response", "id": "c", "response": ["found"]},
        {"type": "uri", "modality": "image", "uri": "https://example.com/x.png"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"},
        {"type": "new kind", "x": 1},
        "bare",
        7,
    ]
    message = orjson.dumps([{"role": "user", "parts": parts}]).decode()
    store.add([span(1), call(2, 1, message, said(("assistant", "ho")))])

    found = detail(read_span(store, TRACE, f"{2:016x}")).given[0].parts

    assert [(each.kind, each.title) for each in found] == [
        ("reasoning", "reasoning"), ("tool_call", "calls search"), ("tool_result", "tool answered"),
        ("media", "image"), ("media", "image, image/png"), ("other", "new kind"), ("text", ""),
        ("text", ""),
    ]  # fmt: skip
    assert found[4].text == "4 characters of base64, not shown"
    assert found[3].text == "https://example.com/x.png"


def test_tokens_are_told_with_their_probability() -> None:
    """Five classes; a token without a logprob has none, and what is not shown is counted."""
    found = shown_tokens([1, 2, 3, 4, 5, 6], [-0.01, -0.5, -1.0, -3.0, -9.0])

    assert [(each.id, each.level) for each in found] == [
        (1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, None),
    ]  # fmt: skip
    assert len(shown_tokens(range(9_999))) == 2_000

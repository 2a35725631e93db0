"""What a redaction does to one span: nothing of what was named is left, all else is as it was."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError
from lightning_otel.redact import (
    IN_ID,
    KEY,
    MASK,
    PATTERN,
    SECRET,
    TOKENS,
    WHOLE,
    Redactor,
    Rules,
)
from lightning_otel.store.schema import record_of_span, span_of
from lightning_otel.types import Event, Link, Span

MakeSpan = Callable[..., Span]
WHO = "alice@example.org"
_ALICE = Rules(patterns=(r"alice@example\.org",))


def _mask(rules: Rules, span: Span) -> tuple[Span, dict[str, int]]:
    found = Redactor(rules, "redaction-1").mask(span)
    return found.span, {reason: count for reason, count in found.counts.items() if count}


def _said(text: str, role: str = "user") -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


def test_pattern_is_masked_in_messages_attributes_events_links_and_status(
    make_span: MakeSpan,
) -> None:
    """A text that matches is masked wherever a span has texts, and counted."""
    span = make_span(
        name=f"mail {WHO}",
        status_message=f"no such user {WHO}",
        attributes={c.INPUT_MESSAGES: _said(f"write to {WHO}"), "who": WHO, "many": [WHO, "b"]},
        events=(Event("sent", 5, {"to": WHO}),),
        links=(Link("1" * 32, "2" * 16, {"for": WHO}),),
        otel_resource={"owner": WHO},
    )

    masked, counts = _mask(_ALICE, span)

    assert WHO not in json.dumps(record_of_span(masked))
    assert masked.attributes["many"] == [MASK, "b"]
    assert json.loads(masked.attributes[c.INPUT_MESSAGES])[0]["parts"][0]["content"] == (
        f"write to {MASK}"
    )
    assert counts == {PATTERN: 8}


def test_span_without_a_match_is_the_very_same(make_span: MakeSpan) -> None:
    """What no rule concerns is not even copied."""
    span = make_span(attributes={c.INPUT_MESSAGES: _said("hello"), "n": 5})

    assert Redactor(_ALICE, "r").mask(span).span is span


def test_json_within_json_is_looked_into(make_span: MakeSpan) -> None:
    """A tool's arguments are a text that is JSON: what hides behind its escapes is found."""
    arguments = json.dumps({"to": 'Jürgen "J" Müller', "n": {"deep": json.dumps(["Müller"])}})
    span = make_span(attributes={c.TOOL_ARGUMENTS: arguments})

    masked, _ = _mask(Rules(patterns=('"J" Müller|Müller',)), span)

    found = json.loads(masked.attributes[c.TOOL_ARGUMENTS])
    assert found["to"] == f"Jürgen {MASK}"
    assert json.loads(found["n"]["deep"]) == [MASK]


def test_token_ids_of_a_masked_text_go(make_span: MakeSpan) -> None:
    """Token ids spell the text: those of a prompt go with it, those of an answer that stays not."""
    attributes = {
        c.INPUT_MESSAGES: _said(WHO),
        c.OUTPUT_MESSAGES: _said("fine", "assistant"),
        c.PROMPT_TOKEN_IDS: "AAAA",
        c.RESPONSE_TOKEN_IDS: "BBBB",
        c.RESPONSE_LOGPROBS: "CCCC",
    }

    masked, counts = _mask(_ALICE, make_span(attributes=attributes))

    assert c.PROMPT_TOKEN_IDS not in masked.attributes
    assert masked.attributes[c.RESPONSE_TOKEN_IDS] == "BBBB"
    assert counts == {PATTERN: 1, TOKENS: 1}


def test_key_goes_at_any_depth(make_span: MakeSpan) -> None:
    """A key's value is masked on the span, in an event and within a message; a glob names some."""
    message = json.dumps([{"role": "user", "parts": [{"type": "data", "mail": {"a": 1}}]}])
    span = make_span(
        attributes={"user.mail": "x", "user.phone": 7, c.INPUT_MESSAGES: message},
        events=(Event("e", 5, {"mail": "y"}),),
    )

    masked, counts = _mask(Rules(keys=("mail", "user.*")), span)

    assert masked.attributes["user.mail"] == masked.attributes["user.phone"] == MASK
    assert json.loads(masked.attributes[c.INPUT_MESSAGES])[0]["parts"][0]["mail"] == MASK
    assert masked.events[0].attributes["mail"] == MASK
    assert counts == {KEY: 4}


def test_hot_columns_follow_the_attributes(make_span: MakeSpan) -> None:
    """A masked agent's name stands in no column either."""
    span = make_span(attributes={c.AGENT_NAME: "alice", c.OPERATION: "chat"}, scope=c.SCOPE)

    masked, _ = _mask(Rules(keys=(c.AGENT_NAME,)), span)

    assert record_of_span(masked)["agent"] == MASK


def test_numbers_are_masked_but_not_those_that_are_ours(make_span: MakeSpan) -> None:
    """A card number kept as a number goes; counts of tokens are no content."""
    span = make_span(attributes={"card": 4111111111111111, c.INPUT_TOKENS: 4111111111111111})

    masked, _ = _mask(Rules(patterns=(r"\d{16}",)), span)

    assert masked.attributes["card"] == MASK
    assert masked.attributes[c.INPUT_TOKENS] == 4111111111111111


def test_match_in_an_id_stays_and_is_counted(make_span: MakeSpan) -> None:
    """Ids hold the rollout together: what matches in one is told of, not masked in silence."""
    span = make_span(attributes={c.ROLLOUT_ID: WHO, "who": "bob"})

    masked, counts = _mask(_ALICE, span)

    assert masked is span
    assert counts == {IN_ID: 1}


def test_without_a_rule_all_that_was_said_goes(make_span: MakeSpan) -> None:
    """Roles, models, counts and ids stay; texts, the task, errors and token ids go."""
    attributes = {
        c.OPERATION: "chat", c.REQUEST_MODEL: "toy", c.INPUT_TOKENS: 3, c.ROLLOUT_ID: "r1",
        c.INPUT_MESSAGES: _said("hello"), c.PROMPT_TOKEN_IDS: "AAAA", c.TASK: '{"q": 1}',
        "custom.note": "private", "llm.model_name": "toy",
    }  # fmt: skip
    event = Event("exception", 5, {c.EXCEPTION_MESSAGE: "private", c.EXCEPTION_TYPE: "E"})

    masked, counts = _mask(Rules(), make_span(attributes=attributes, events=(event,)))

    found = masked.attributes
    assert json.loads(found[c.INPUT_MESSAGES]) == [
        {"role": "user", "parts": [{"type": "text", "content": MASK}]}
    ]
    assert found[c.TASK] == found["custom.note"] == MASK
    assert c.PROMPT_TOKEN_IDS not in found
    kept = (c.OPERATION, c.REQUEST_MODEL, c.INPUT_TOKENS, c.ROLLOUT_ID, "llm.model_name")
    assert {key: found[key] for key in kept} == {key: attributes[key] for key in kept}
    assert masked.events[0].attributes == {c.EXCEPTION_MESSAGE: MASK, c.EXCEPTION_TYPE: "E"}
    assert counts[WHOLE] == 5
    assert _mask(Rules(), masked)[0] is masked


def test_secrets_go_by_their_shape(make_span: MakeSpan) -> None:
    """What capture would have scrubbed can be masked later."""
    masked, counts = _mask(Rules(secrets=True), make_span(attributes={"k": "sk-" + "a" * 30}))

    assert masked.attributes["k"] == "[redacted:api_key]"
    assert counts == {SECRET: 1}


def test_hashes_of_what_was_cut_go_too(make_span: MakeSpan) -> None:
    """A hash tells whether a guess is right."""
    note = json.dumps({c.INPUT_MESSAGES: {"length": 9, "kept": 3, "sha256": "ab"}})

    masked, _ = _mask(_ALICE, make_span(attributes={c.CUT: note, "who": WHO}))

    assert json.loads(masked.attributes[c.CUT]) == {c.INPUT_MESSAGES: {"length": 9, "kept": 3}}


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({"patterns": ("(",)}, "no regular expression"),
        ({"patterns": ("a*",)}, "matches the empty text"),
        ({"keys": (c.ROLLOUT_ID,)}, "tells which spans belong together"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, Any], what: str) -> None:
    """The message says why, without repeating the pattern."""
    with pytest.raises(ConfigError, match=what):
        Rules(**rules)


_TEXTS = st.text(st.sampled_from('aB7é"\\\n{[\U0001f600 '), max_size=6)
_VALUES = st.recursive(
    st.one_of(_TEXTS, st.integers(-5, 5), st.booleans(), st.just("@@SECRET@@")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(_TEXTS, st.just("@@SECRET@@")), inner, max_size=3),
        # JSON in JSON, with every letter beyond ASCII behind an escape.
        st.lists(inner, max_size=2).map(json.dumps),
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b.c", c.TASK, c.AGENT_NAME, c.TOOL_RESULT]), _VALUES),
    st.lists(_VALUES, max_size=2),
)
def test_nothing_of_a_secret_is_left_and_a_second_time_changes_nothing(
    attributes: dict[str, Any], parts: list[Any]
) -> None:
    """Wherever in a span it stands, however deep and however escaped."""
    messages = json.dumps([{"role": "user", "parts": parts}])
    span = Span(
        trace_id="1" * 32, span_id="2" * 16, parent_span_id=None, name="work", start_ns=1, end_ns=2,
        attributes={**attributes, c.INPUT_MESSAGES: messages},
        events=(Event("e", 1, {"v": attributes.get("a", "")}),),
    )  # fmt: skip
    masker = Redactor(Rules(patterns=("@@SECRET@@",)), "r")

    found = masker.mask(span)

    assert "SECRET" not in json.dumps(record_of_span(found.span), default=str)
    assert found.is_changed == ("SECRET" in json.dumps([attributes, messages]))
    assert masker.mask(found.span).span is found.span
    assert span_of(record_of_span(found.span)) == found.span

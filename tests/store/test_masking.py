"""What a redaction does to one span: nothing of what was named is left, all else is as it was."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.conftest import MakeSpan

from lightning_otel.errors import ConfigError
from lightning_otel.redact import MASK, Redactor, Rules
from lightning_otel.store.schema import build_record, build_span
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

WHO = "alice@example.org"
_ALICE = Rules(patterns=(r"alice@example\.org",))
_MULLER = Rules(patterns=('"J" Müller|Müller',))


def _mask(rules: Rules, span: Span) -> tuple[Span, dict[str, int]]:
    found, counts = Redactor(rules, "redaction-1").mask(span)
    return found, {reason: count for reason, count in counts.items() if count}


def _said(text: str, role: str = "user") -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


def _parse(value: Any) -> Any:
    """Return a text that is JSON, or JSON in JSON, as what it stands for."""
    if isinstance(value, dict):
        return {key: _parse(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_parse(each) for each in value]
    return (
        _parse(json.loads(value))
        if isinstance(value, str) and value[:2] in ('{"', "[{", '["')
        else value
    )


CASES: dict[str, tuple[Rules, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "JSON within JSON": (
        _MULLER,
        {c.TOOL_ARGUMENTS: json.dumps(
            {"to": 'Jürgen "J" Müller', "n": {"deep": json.dumps(["Müller"])}}
        )},
        {c.TOOL_ARGUMENTS: {"to": f"Jürgen {MASK}", "n": {"deep": [MASK]}}},
        {"pattern": 2},
    ),
    "token ids spell the prompt, not the answer that stays": (
        _ALICE,
        {c.INPUT_MESSAGES: _said(WHO), c.OUTPUT_MESSAGES: _said("fine", "assistant"),
         c.PROMPT_TOKEN_IDS: "AAAA", c.RESPONSE_TOKEN_IDS: "BBBB"},
        {c.INPUT_MESSAGES: json.loads(_said(MASK)),
         c.OUTPUT_MESSAGES: json.loads(_said("fine", "assistant")), c.RESPONSE_TOKEN_IDS: "BBBB"},
        {"pattern": 1, "tokens": 1},
    ),
    "a key at any depth, and a glob": (
        Rules(keys=("mail", "user.*")),
        {"user.mail": "x", "user.phone": 7, "deep": [{"mail": {"a": 1}}]},
        {"user.mail": MASK, "user.phone": MASK, "deep": [{"mail": MASK}]},
        {"key": 3},
    ),
    "numbers, but not those that are ours": (
        Rules(patterns=(r"\d{16}",)),
        {"card": 4111111111111111, c.INPUT_TOKENS: 4111111111111111},
        {"card": MASK, c.INPUT_TOKENS: 4111111111111111},
        {"pattern": 1},
    ),
    "ids hold the rollout together": (
        _ALICE, {c.ROLLOUT_ID: WHO, "who": "bob"}, {c.ROLLOUT_ID: WHO, "who": "bob"}, {"in_id": 1},
    ),
    "secrets by their shape": (
        Rules(secrets=True),
        {"k": "sk-" + "a" * 30}, {"k": "[redacted:api_key]"}, {"secret": 1},
    ),
    "a hash tells whether a guess is right": (
        _ALICE,
        {c.CUT: json.dumps({"x": {"length": 9, "kept": 3, "sha256": "ab"}}), "who": WHO},
        {c.CUT: {"x": {"length": 9, "kept": 3}}, "who": MASK},
        {"pattern": 1},
    ),
    "without a rule all that was said goes": (
        Rules(),
        {c.OPERATION: "chat", c.REQUEST_MODEL: "toy", c.INPUT_TOKENS: 3, c.ROLLOUT_ID: "r1",
         c.INPUT_MESSAGES: _said("hello"), c.PROMPT_TOKEN_IDS: "AAAA", c.TASK: '{"q": 1}',
         "custom.note": "private", "llm.model_name": "toy"},
        {c.OPERATION: "chat", c.REQUEST_MODEL: "toy", c.INPUT_TOKENS: 3, c.ROLLOUT_ID: "r1",
         c.INPUT_MESSAGES: json.loads(_said(MASK)), c.TASK: MASK, "custom.note": MASK,
         "llm.model_name": "toy"},
        {"whole": 4, "tokens": 1},
    ),
    "what no rule concerns": (
        _ALICE, {c.INPUT_MESSAGES: "hello", "n": 5}, {c.INPUT_MESSAGES: "hello", "n": 5}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_attributes_are_masked_and_counted(make_span: MakeSpan, case: str) -> None:
    """A span without a match is the very same one; a second time changes nothing."""
    rules, attributes, expected, counts = CASES[case]
    span = make_span(attributes=attributes)

    masked, found = _mask(rules, span)

    assert found == counts
    assert (masked is span) == (not counts or "in_id" in counts)
    left = {key: value for key, value in masked.attributes.items() if key != c.REDACTED}
    assert {key: _parse(value) for key, value in left.items()} == expected
    assert _mask(rules, masked)[0] is masked


def test_pattern_is_masked_wherever_a_span_has_texts(make_span: MakeSpan) -> None:
    """Its name, status, events, links, resource and hot columns hold it no more."""
    span = make_span(
        name=f"mail {WHO}",
        status_message=f"no such user {WHO}",
        attributes={c.INPUT_MESSAGES: _said(WHO), c.AGENT_NAME: WHO, "many": [WHO, "b"]},
        events=(Event("sent", 5, {"to": WHO}),),
        links=(Link("1" * 32, "2" * 16, {"for": WHO}),),
        otel_resource={"owner": WHO},
        scope=c.SCOPE,
    )

    masked, counts = _mask(_ALICE, span)

    assert WHO not in json.dumps(build_record(masked))
    assert build_record(masked)["agent"] == MASK
    assert masked.attributes["many"] == [MASK, "b"]
    assert counts == {"pattern": 8}


def test_errors_go_with_all_that_was_said(make_span: MakeSpan) -> None:
    """Their message goes, their type stays."""
    event = Event("exception", 5, {c.EXCEPTION_MESSAGE: "private", c.EXCEPTION_TYPE: "E"})

    masked, _ = _mask(Rules(), make_span(events=(event,)))

    assert masked.events[0].attributes == {c.EXCEPTION_MESSAGE: MASK, c.EXCEPTION_TYPE: "E"}


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

    found, _ = masker.mask(span)

    assert "SECRET" not in json.dumps(build_record(found), default=str)
    assert (found is not span) == ("SECRET" in json.dumps([attributes, messages]))
    assert masker.mask(found)[0] is found
    assert build_span(build_record(found)) == found

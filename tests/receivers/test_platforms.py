"""Exports of other tools: each record of a fixture is taken or named, and calls become steps."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from tests.command import invoke
from tests.receivers.frameworks import FORMS, observe

from lightning_otel import Store
from lightning_otel.errors import ReceiveError
from lightning_otel.messages import plain_text
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

IMPORTS = Path(__file__).parent.parent / "data" / "imports"


@dataclass(frozen=True)
class Case:
    """A file, and what is made of it."""

    name: str
    spans: int
    named: dict[int, str]
    steps: list[tuple[Any, ...]]
    tokens: tuple[int, int]
    kept: dict[str, str]


CASES = [
    Case(
        "langsmith.jsonl", 7,
        {7: "score 'tone' is None, no number", 8: "time is 'yesterday', not ISO 8601",
         9: "the id of the span or of its trace is no text",
         10: "a count of tokens is no 64-bit integer", 11: "neither OTLP JSON nor a span of"},
        [("gpt-5-mini", "What is 6*7?", 'multiply({"a": 6, "b": 7})', None),
         ("gpt-5-mini", "42", "It is 42.", 1.0)],
        (21, 9), {"langsmith.tags": '["nightly"]'},
    ),
    Case(
        "langfuse.jsonl", 9,
        {4: "score 'tone' is CATEGORICAL, no number",
         6: "the id of the span or of its trace is no text", 7: "a time is missing",
         8: "a count of tokens is no 64-bit integer"},
        [("gpt-5-mini", "What is 6*7?", 'multiply({"a": 6, "b": 7})', None),
         ("gpt-5-mini", "42", "It is 42.", 1.0)],
        (21, 9), {"langfuse.tags": '["nightly"]'},
    ),
    Case(
        "mlflow.jsonl", 7,
        {1: "score 'tone' is 'polite', no number", 2: "time is 'soon', not ISO 8601",
         3: "the id of the span or of its trace is no text"},
        [("gpt-5-mini", "What is 6*7?", 'multiply({"a": 6, "b": 7})', None),
         ("gpt-5-mini", "42", "It is 42.", 1.0)],
        (21, 9), {c.CONVERSATION_ID: "s-1"},
    ),
    Case(
        "phoenix.jsonl", 8,
        {2: "score 'tone' is None, no number", 4: "time is 'soon', not ISO 8601",
         5: "the id of the span or of its trace is no text"},
        [("gpt-5-mini", "What is 6*7?", 'multiply({"a": 6, "b": 7})', None),
         ("gpt-5-mini", "42", "It is 42.", 1.0)],
        (21, 9), {"session.id": "s-1"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_record_is_taken_or_named(case: Case, tmp_path: Path) -> None:
    """Calls are transitions with their messages, tools and rewards; again, nothing is new."""
    store = Store(tmp_path / "s.duckdb")

    first = invoke("import", IMPORTS / case.name, "--store", store.name)
    again = invoke("import", IMPORTS / case.name, "--store", store.name)

    assert (first.returncode, again.returncode) == (int(bool(case.named)),) * 2, first.stderr
    assert f"{case.spans} spans read, {case.spans} new" in first.stderr
    assert f"{case.spans} spans read, 0 new" in again.stderr
    for number, reason in case.named.items():
        assert f"line {number}: {reason}" in first.stderr
    steps = list(store.transitions())
    told = [
        (step.model, plain_text(step.observation[-1:]), plain_text(step.action), step.reward)
        for step in steps
    ]
    assert told == case.steps
    assert (steps[0].input_tokens, steps[0].output_tokens) == case.tokens
    root, *_ = [each for each in store.spans() if each.parent_span_id is None]
    assert {key: root.attributes[key] for key in case.kept} == case.kept
    assert {each.attributes[c.RECEIVED] for each in store.spans()} == {"import"}
    (tool,) = (each for each in store.spans() if each.name == "multiply")
    assert any("42" in str(tool.attributes.get(key)) for key in (c.TOOL_RESULT, "output.value"))
    query = "SELECT operation FROM spans WHERE name = 'multiply'"
    assert list(store.sql(query).dicts()) == [{"operation": "execute_tool"}]


WRONG = [None, True, -7, 1.5, "", "x", [], [[1]], {}, {"role": []}, [{}], "[" * 99]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_field_of_any_type_breaks_nothing(case: Case) -> None:
    """Each field in turn absent, or of each other type: the record is a span or a reason."""
    for line in (IMPORTS / case.name).read_bytes().splitlines():
        record = orjson.loads(line)
        for field, value in product(record, WRONG):
            found = list(_read({**record, field: value}))
            assert found or value == []  # a page of nothing
            assert all(isinstance(each, Span | Rejected) for each in found)


def test_a_record_that_no_span_can_hold_is_named() -> None:
    """It is not cut, as the spans of a sender are, which cannot be asked again."""
    record = orjson.loads((IMPORTS / "langsmith.jsonl").read_bytes().splitlines()[0])

    (found,) = _read({**record, "inputs": {"text": "x" * (8 << 20)}})

    assert isinstance(found, Rejected)
    assert "takes more than 7340032 bytes" in found.reason


def _read(record: Any) -> Any:
    try:
        yield from documents.decode_spans(orjson.dumps([record]))
    except ValueError as exc:
        pytest.fail(f"{record}: {exc}")


def _bulk_export(record: dict[str, Any]) -> dict[str, Any]:
    """A run as LangSmith's bulk export writes it: what is nested is JSON text."""
    nested = {name: orjson.dumps(value).decode() for name, value in record.items()
              if isinstance(value, dict | list)}  # fmt: skip
    return {**record, **nested}


def _frame_row(record: dict[str, Any]) -> dict[str, Any]:
    """A span as a row of Phoenix's data frame: a column for each part of its name."""
    inner = {f"{name}.{key}": value for name in ("context", "attributes")
             for key, value in record[name].items()}  # fmt: skip
    return {name: value for name, value in {**record, **inner}.items()
            if name not in ("context", "attributes")}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mark", "to_row"),
    [("langsmith", "run_type", _bulk_export), ("phoenix", "span_kind", _frame_row)],
)
def test_parquet_is_read_as_the_lines_are(
    name: str, mark: str, to_row: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    """The same spans, whether their records are lines of JSON or rows of Parquet."""
    records = [orjson.loads(line) for line in (IMPORTS / f"{name}.jsonl").read_bytes().splitlines()]
    records = [item for each in records for item in each.get("data", [each])]
    good = [each for each in records if mark in each and not _is_damaged(each)]
    lines, rows, parquet = (tmp_path / f"{name}.{end}" for end in ("jsonl", "rows", "parquet"))
    lines.write_bytes(b"\n".join(map(orjson.dumps, good)))
    rows.write_bytes(b"\n".join(orjson.dumps(to_row(each)) for each in good))
    duckdb.sql(f"COPY (FROM read_json('{rows}', format='newline_delimited')) TO '{parquet}'")

    stores = []
    for file in (lines, parquet):
        store = tmp_path / f"{file.name}.duckdb"
        done = invoke("import", file, "--store", store)
        assert done.returncode == 0, done.stderr
        keys = ("span_id", "name", "parent_span_id", "start_ns", "end_ns")
        stores.append(sorted(
            (*(getattr(span, key) for key in keys), span.attributes.get(c.OUTPUT_MESSAGES))
            for span in Store(store).spans()
        ))  # fmt: skip
    assert len(stores[0]) >= len(good) > 2
    assert stores[0] == stores[1]


def _is_damaged(record: dict[str, Any]) -> bool:
    try:
        found = list(documents.decode_spans(orjson.dumps(record)))
    except ReceiveError:
        return True
    return any(isinstance(each, Rejected) for each in found)


SCORES: dict[str, tuple[dict[str, Any], tuple[str | None, str]]] = {
    "langfuse": (
        {"id": "s", "traceId": "t", "name": "n", "value": 1, "dataType": "NUMERIC",
         "timestamp": "2026-11-01T12:00:20Z", "source": "ANNOTATION", "authorUserId": "u1"},
        ("u1", "ANNOTATION"),
    ),
    "langsmith": (
        {"id": "s", "run_id": "r", "key": "n", "score": 1, "created_at": "2026-11-01T12:00:20",
         "feedback_source": {"type": "app", "user_id": "u1", "metadata": {}}},
        ("u1", "app"),
    ),
    "mlflow": (
        {"assessment_id": "s", "assessment_name": "n", "trace_id": "tr-1", "span_id": "p",
         "create_time": "2026-11-01T12:00:20Z", "feedback": {"value": 1},
         "source": {"source_type": "LLM_JUDGE", "source_id": "judge-1"}},
        ("judge-1", "LLM_JUDGE"),
    ),
    "phoenix": (
        {"id": "s", "span_id": "p", "name": "n", "annotator_kind": "HUMAN",
         "created_at": "2026-11-01T12:00:20Z", "result": {"score": 1, "explanation": "good"}},
        (None, "HUMAN"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", SCORES)
def test_who_gave_a_score_is_kept(tool: str) -> None:
    """By the platform's own names, with what else it says."""
    record, author = SCORES[tool]

    (span,) = _read(record)

    get = span.attributes.get
    assert (get(c.REWARD_AUTHOR), get(c.REWARD_AUTHOR_KIND)) == author
    assert get(c.REWARD_VALUE) == 1
    if tool == "phoenix":
        assert "good" in get("phoenix.result")


def test_scores_of_several_judges_keep_who_gave_them(tmp_path: Path) -> None:
    """Under one name, too: a further judge stands behind it, and can be chosen."""
    call = observe(f"{1:032x}", FORMS["OpenAI"])[2]
    score = {**SCORES["langfuse"][0], "traceId": call["traceId"], "observationId": call["id"]}
    scores = [{**score, "id": judge, "value": value, "authorUserId": judge,
               "timestamp": f"2026-11-01T12:00:2{value}Z"}
              for value, judge in enumerate(("ann", "bob"))]  # fmt: skip
    file, place = tmp_path / "scores.json", tmp_path / "s.duckdb"
    file.write_bytes(orjson.dumps([call, *scores]))
    assert invoke("import", file, "--store", place).returncode == 0

    (step,) = Store(place).transitions()
    (chosen,) = Store(place).transitions(reward="n (bob)")

    assert step.rewards == {"n": 0.0, "n (bob)": 1.0}
    assert (step.reward, chosen.reward) == (0.0, 1.0)


def test_which_of_several_scores_counts_is_told(tmp_path: Path) -> None:
    """The report names them, and an option the one that counts."""
    call = observe(f"{1:032x}", FORMS["OpenAI"])[2]
    score = {**SCORES["langfuse"][0], "traceId": call["traceId"], "observationId": call["id"]}
    scores = [{**score, "id": name, "name": name, "value": value, "timestamp": time}
              for name, value, time in (("hallucination", 1, "2026-11-01T12:01:00Z"),
                                        ("correctness", 0, "2026-11-01T12:02:00Z"))]  # fmt: skip
    file, store = tmp_path / "scores.json", tmp_path / "s.duckdb"
    file.write_bytes(orjson.dumps([call, *scores]))
    assert invoke("import", file, "--store", store).returncode == 0

    usual = invoke("export", "kto", "--store", store)
    chosen = invoke("export", "kto", "--reward", "correctness", "--store", store)

    assert "1 × the first of several rewards counts (hallucination, correctness)" in usual.stderr
    assert "several" not in chosen.stderr
    rows = [orjson.loads(each.stdout) for each in (usual, chosen)]
    assert [(row["reward"], row["label"]) for row in rows] == [(1.0, True), (0.0, False)]


_TIMES = {"startTime": "2026-02-01T10:00:00Z", "endTime": "2026-02-01T10:00:09Z"}
_CALL = {"id": "o1", "traceId": "t1", "type": "GENERATION", "name": "call", **_TIMES,
         "input": [{"role": "user", "content": "q"}], "output": "a"}  # fmt: skip
_RUN = {"id": "r1", "trace_id": "r1", "run_type": "llm", "name": "call",
        "start_time": "2026-02-01T10:00:00", "end_time": "2026-02-01T10:00:09",
        "inputs": {"prompt": "q"}, "outputs": {"output": "a"}}  # fmt: skip
_ANSWERS = [[{"text": text, "type": "Generation"}] for text in "ab"]
_ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
NAMED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a call that goes on": (
        {**_CALL, "output": None, "endTime": None}, 0, "the call was not over yet"),
    "several prompts": (
        {**_RUN, "outputs": {"generations": _ANSWERS}}, 0, "answers to 2 prompts; a call has one"),
    "a score of a session": (
        {"id": "s1", "name": "ok", "value": 1, "dataType": "NUMERIC", "sessionId": "c",
         "timestamp": "2026-02-01T10:00:00Z", "traceId": None}, 0, "but of session 'c'"),
    "a reward in a list": ({**_ROW, "reward": [1.0]}, 1, "reward is [1.0], no number"),
    "a preference": (
        {**_ROW, "chosen": _ROW["messages"], "rejected": _ROW["messages"]}, 0, "preferences"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_kept_is_named(name: str) -> None:
    """A record that is no whole call, score or reward has a reason, and the rest of it stays."""
    record, count, reason = NAMED[name]

    *spans, rejected = _read(record)

    assert len(spans) == count
    assert isinstance(rejected, Rejected)
    assert reason in rejected.reason


@pytest.mark.parametrize(("reward", "number"), [("0.5", 0.5), (True, 1.0), (2, 2.0)])
def test_a_reward_is_a_number_however_it_is_written(reward: Any, number: float) -> None:
    """A text that is a number is one, and true is 1."""
    _, made = _read({**_ROW, "reward": reward})

    assert made.attributes[f"{c.REWARD_PREFIX}.0.value"] == number


_SDK_TOOL = {"ai.toolCall.name": "w", "ai.toolCall.id": "c1"}
_SDK_CALL = [{"toolCallType": "function", "toolCallId": "c1", "toolName": "w", "args": "{}"}]


def test_a_loop_of_the_vercel_ai_sdk_is_no_call(tmp_path: Path) -> None:
    """Langfuse calls it a generation, as it does the calls below it; tools have their names."""
    below = {**_CALL, "parentObservationId": "o1"}
    records = [
        {**_CALL, "name": "ai.generateText"},
        {**below, "id": "o2", "name": "ai.generateText.doGenerate", "output": _SDK_CALL},
        {**below, "id": "o3", "name": "ai.toolCall", "type": "TOOL", "input": "{}",
         "output": "rain", "metadata": {"attributes": _SDK_TOOL}},
    ]  # fmt: skip
    file, store = tmp_path / "t.jsonl", Store(tmp_path / "s.duckdb")
    file.write_bytes(b"\n".join(map(orjson.dumps, records)))

    assert invoke("import", file, "--store", store.name).returncode == 0

    assert [plain_text(step.action) for step in store.transitions()] == ["w({})"]
    (tool,) = [span for span in store.spans() if span.name == "ai.toolCall"]
    assert (tool.attributes[c.TOOL_NAME], tool.attributes[c.TOOL_CALL_ID]) == ("w", "c1")


def test_a_call_that_a_callback_and_a_wrapper_record_is_one(tmp_path: Path) -> None:
    """Langfuse's callback of LangChain holds the call that its wrapper of OpenAI records."""
    wrapped = {"messages": _CALL["input"]}
    names = {"id": "o2", "name": "OpenAI-generation", "parentObservationId": "o1"}
    file, store = tmp_path / "t.jsonl", Store(tmp_path / "s.duckdb")
    file.write_bytes(orjson.dumps([_CALL, {**_CALL, **names, "input": wrapped}]))

    assert invoke("import", file, "--store", store.name).returncode == 0

    assert [plain_text(step.action) for step in store.transitions()] == ["a"]


def test_an_output_is_what_the_platform_was_given() -> None:
    """MLflow writes each value as JSON, and LangSmith puts one that is no object into one."""
    (run,) = _read({**_RUN, "outputs": {"output": {"answer": "A", "score": 1}}})
    record = orjson.loads((IMPORTS / "mlflow.jsonl").read_bytes().splitlines()[0])
    for span in record["data"]["spans"]:
        span["attributes"] |= {"mlflow.spanOutputs": '"3.10"', "mlflow.spanType": '"LLM"'}
    spans = [each for each in _read(record) if isinstance(each, Span)]
    made = [each for each in spans if c.OUTPUT_MESSAGES in each.attributes]

    texts = [plain_text(orjson.loads(each.attributes[c.OUTPUT_MESSAGES])) for each in (run, *made)]

    (tool,) = _read({**_CALL, "type": "TOOL", "input": '{"a":  1}', "output": "3.10"})
    (call,) = _read({**_CALL, "input": "7.50"})

    assert (tool.attributes[c.TOOL_ARGUMENTS], tool.attributes[c.TOOL_RESULT]) == (
        '{"a":  1}', "3.10",
    )  # fmt: skip
    assert call.attributes[c.TASK] == '"7.50"'
    assert len(made) > 1
    assert texts == ['{"answer": "A", "score": 1}', *["3.10"] * len(made)]

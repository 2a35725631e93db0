"""Files of an older schema beside those of ours: what they lack is rebuilt, or empty."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel.store import snapshot
from lightning_otel.store.layout import SCHEMA_VERSION, Layout, Manifest
from lightning_otel.store.parquet import describe_file
from lightning_otel.store.sql import quote_text
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

LACKING = (
    "agent", "model", "provider", "operation", "response_id", "input_tokens", "output_tokens",
    "rollout_id", "reward", "sequence", "end_sequence", "kind", "status_message", "scope",
    "input_messages", "links",
)  # fmt: skip
ATTRIBUTES: dict[str, Any] = {
    c.OPERATION: "chat",
    c.AGENT_NAME: "planner",
    c.PROVIDER: "openai",
    c.REQUEST_MODEL: "m-0",
    c.RESPONSE_ID: "resp-1",
    c.INPUT_TOKENS: 7,
    c.OUTPUT_TOKENS: 3,
    c.ROLLOUT_ID: "old",
    c.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
    c.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"ho"}]}]',
}


@pytest.fixture
def layout(
    store: Store, settled: Callable[[Iterable[Span]], Path], make_span: Callable[..., Span]
) -> Layout:
    """A store of one old file with a call and a reward, and a new one with the same of today."""
    layout = store.layout
    assert layout is not None
    for rollout in ("old", "new"):
        call = make_span(attributes={**ATTRIBUTES, c.ROLLOUT_ID: rollout})
        judged = {c.ROLLOUT_ID: rollout, c.REWARD_VALUE: 0.5}
        reward = make_span(trace_id=call.trace_id, name=c.SPAN_ANNOTATION, attributes=judged)
        new = settled([call, reward])
    old = _aged(layout.data / layout.read_manifest().live_files[0].name)
    entry = describe_file(duckdb.connect(), old, 0)
    for path in layout.segments():
        path.unlink()
    layout.write_manifest(Manifest((entry, describe_file(duckdb.connect(), new))))
    return layout


def _aged(path: Path) -> Path:
    """The file as a version without some columns wrote it: what they hold stands in attributes."""
    made = path.with_name(path.name.replace("spans-", "spans-0"))
    duckdb.connect().execute(
        f"""
        COPY (
          SELECT * EXCLUDE ({", ".join(LACKING)}) REPLACE (
            CASE WHEN input_messages IS NULL THEN attributes ELSE
              json_merge_patch(attributes,
                json_object({quote_text(c.INPUT_MESSAGES)}, input_messages))
            END AS attributes)
          FROM {quote_text(str(path))}
        ) TO {quote_text(str(made))} (FORMAT parquet, COMPRESSION zstd, KV_METADATA {{schema: '0'}})
        """
    )
    path.unlink()
    return made


@pytest.mark.pain(18)
def test_old_and_new_read_side_by_side(store: Store, layout: Layout) -> None:
    """A column that has an attribute is rebuilt from it; the others say that they do not know."""
    rows = {row["rollout_id"]: row for row in store.sql("SELECT * FROM spans WHERE reward IS NULL")}
    rewards = dict(store.sql("SELECT rollout_id, reward FROM spans WHERE reward > 0").df().values)

    rebuilt = [name for name in LACKING if name in ("agent", "model", "provider", "operation")]
    rebuilt += ["response_id", "input_tokens", "output_tokens", "input_messages"]
    assert {name: rows["old"][name] for name in rebuilt} == {
        name: rows["new"][name] for name in rebuilt
    }
    assert rewards == {"old": 0.5, "new": 0.5}
    with duckdb.connect(str(layout.catalogue), read_only=True) as con:
        assert con.sql("SELECT model, count(*) FROM calls GROUP BY 1").fetchall() == [("m-0", 2)]
    unknown = ("sequence", "end_sequence", "kind", "status_message", "scope", "links")
    assert [rows["old"][name] for name in unknown] == [-1, -1, "INTERNAL", None, None, None]


@pytest.mark.parametrize("small_bytes", [snapshot._SMALL_BYTES, 0])
@pytest.mark.parametrize("bodies", [True, False])
def test_old_spans_become_transitions_as_new_ones_do(
    store: Store,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    bodies: object,
    small_bytes: int,
) -> None:
    """What is trained on is the same, whichever version kept it, in a store of any size."""
    monkeypatch.setattr(snapshot, "_SMALL_BYTES", small_bytes)
    old, new = sorted(store.transitions(bodies=bool(bodies)), key=lambda step: step.start_ns)

    assert (old.rollout_id, new.rollout_id) == ("old", "new")
    for name in ("observation", "action", "reward", "model", "response_id", "agent", "done"):
        assert getattr(old, name) == getattr(new, name)

    (layout.data / layout.read_manifest().live_files[1].name).unlink()
    assert store.find("resp-1") == ("response", "resp-1")
    assert store.rollout_of("response", "resp-1") == "old"


def test_settling_beside_an_old_file_keeps_each_span_once(
    store: Store,
    layout: Layout,
    settled: Callable[[Iterable[Span]], Path],
    make_span: Callable[..., Span],
) -> None:
    """A span that the old file holds is not settled a second time."""
    old = next(iter(store.spans(rollout_id="old")))

    settled([old, make_span(start_ns=old.start_ns + 5)])

    assert len(store.spans().rows()) == 5
    made = layout.read_manifest().live_files[-1]
    assert (made.schema, made.rows) == (SCHEMA_VERSION, 1)

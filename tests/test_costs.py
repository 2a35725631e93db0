"""What calls cost: one number at every door, counted when it is read."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import Forest
from tests.viewer.client import AskingOf

from lightning_otel import Store, analyze_episode
from lightning_otel.types import conventions as c

OWN_PRICES = """\
# what we agreed on
model,input,output,cached,above
long-*,4,8,,200000
long-*,2,4,,
gpt-4o,1,1,0.5,
[sx]mall,0.1,0.3,,
"""
KEYS = (
    c.RESPONSE_MODEL, c.REQUEST_MODEL, c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.CACHED_TOKENS,
    c.CACHE_CREATION_TOKENS, c.ERROR_TYPE, c.OPERATION,
)  # fmt: skip
CASES: dict[str, tuple[list[tuple[Any, ...]], float | None]] = {
    "long": ([("long-1", None, 200_000, 0)], 0.4),
    "longer": ([("long-1", None, 200_001, 1_000_000)], 8.800004),
    "above-ours": ([("gpt-4o", None, 1_000_000, 0, 400_000)], 0.8),
    "cached": ([("o3", None, 1_000_000, 0, 1_000_000)], 0.5),
    "no-more-cached-than-given": ([("o3", None, 1_000_000, 0, 3_000_000)], 0.5),
    "cache-made": ([("claude-sonnet-4-5-20250929", None, 100_000, 0, 50_000, 10_000)], 0.1725),
    "tiers-of-ours": ([("gemini-2.5-pro", None, 300_000, 100_000)], 2.25),
    "embeddings": (
        [("text-embedding-3-small", None, 1_000_000, None, 0, 0, None, "embeddings")],
        0.02,
    ),
    "unknown": ([("my-own-model", None, 1_000, 1_000)], None),
    "no-model": ([(None, None, 1_000, 1_000)], None),
    "asked-for": ([("deployment-7", "gpt-4o", 1_000_000, 1_000_000)], 2.0),
    "uncounted": ([("gpt-4o", None, None, None)], None),
    "failed": ([("gpt-4o", None, 500_000, None, 0, 0, "timeout"), ("gpt-4o", None, 5)], 0.500005),
    "two-models": ([("small", None, 1, 1), ("xmall", None, 1, 1), ("own", None, 9, 9)], 8e-07),
}


def test_every_door_says_the_same_cost(
    store: Store,
    served: Callable[..., str],
    asking: AskingOf,
    spawn: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's table counts first, then ours; a changed one counts at once; unknown is not 0."""
    prices = tmp_path / "prices.csv"
    prices.write_text(OWN_PRICES)
    monkeypatch.setenv("LIGHTNING_OTEL_PRICES", str(prices))
    for number, (name, (calls, _)) in enumerate(CASES.items()):
        forest = Forest(rollout_id=name, trace_id=f"{number + 1:032x}", process=f"{number:02x}")
        for values in calls:
            known = zip(KEYS, values, strict=False)
            status = "ERROR" if "timeout" in values else "OK"
            span = forest.call("a", status=status)
            forest.tag(span, **{key: value for key, value in known if value is not None})
        store.add(forest.spans)
    expected = {name: cost for name, (_, cost) in CASES.items() if cost is not None}
    total = sum(expected.values())
    asked = asking(store)

    def run(*args: str) -> Any:
        return json.loads(spawn(*args, "--json", "--store", store.name).stdout)

    doors: dict[str, Iterable[Mapping[str, Any]]] = {
        "SQL": store.sql("SELECT rollout_id, cost FROM rollouts"),
        "SQL of calls": store.sql("SELECT rollout_id, sum(cost) AS cost FROM calls GROUP BY 1"),
        "Python": [
            {"rollout_id": name, "cost": analyze_episode(name, store).totals.cost} for name in CASES
        ],
        "ls": run("ls"),
        "ls traces": run("ls", "traces"),
        "HTTP": json.loads(asked.get("/v1/rollouts?limit=100").body)["rollouts"],
        "server": Store(served(store)).rollouts(),
    }
    for door, rows in doors.items():
        costs = {row["rollout_id"]: row["cost"] for row in rows}
        assert costs.keys() == CASES.keys(), door
        known_costs = {name: cost for name, cost in costs.items() if cost is not None}
        assert known_costs == pytest.approx(expected), door
    documents = {row["session_id"]: row["final_metrics"] for row in store.rows("atif")}
    for name in expected.keys() - {"embeddings", "failed"}:  # a document holds no call but steps
        assert documents[name]["total_cost_usd"] == pytest.approx(expected[name])
    assert "total_cost_usd" not in documents["unknown"]
    assert documents["cached"]["total_cached_tokens"] == 1_000_000
    counted = run("stats")
    assert (counted["cost"], counted["unpriced"]) == (pytest.approx(total), 4)
    for page in ("/rollouts", "/traces"):
        words = asked.get(page).words.split()
        assert sum(word == "$8.80" for word in words) == 1, page
        assert sum(word == "$0.5000" for word in words) == 3, page
    assert "Cost" in asked.get("/rollouts/longer").words
    assert "$8.80" in asked.get("/rollouts/longer").words
    assert "$8.80" in asked.get(f"/traces/{2:032x}").words
    assert "cost in dollars 0.4 8.8 " in asked.get("/traces/long/diff?with=longer").words
    assert str(8.800004) in asked.get("/sql?q=SELECT+max(cost)+FROM+rollouts").words

    prices.write_text("model,input,output\nlong-*,1,0\n")
    (row,) = store.sql("SELECT cost FROM rollouts WHERE rollout_id = 'long'")
    assert row == {"cost": 0.2}
    prices.write_text("model,input,output\nlong-*,free,0\n")
    assert [row["cost"] for row in store.rollouts()] == [None] * len(CASES)

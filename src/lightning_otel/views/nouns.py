"""Views: rollouts and their attempts, the newest first."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.prices import SUM_COSTS
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.views.previews import read_texts, task_words
from lightning_otel.views.table import SINCE, WHEN, Filter, View

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources

_FACTS: Final = ("rollouts",)
_REWARDED: Final = Filter(
    "(reward IS NOT NULL) = ?", "Only those with, or without, a reward.", bool, views=_FACTS
)
_STATUS: Final = Filter(
    "status = ?", "Only those with this status.",
    choices=("running", "succeeded", "failed", "incomplete"),
)  # fmt: skip
_AGENTS: Final = "contains(coalesce(agents, ''), ?)"
_PREFIX: Final = "prefix"


def _add_contents(store: "Store", rows: list[dict[str, Any]], _: object) -> None:
    ids = [row["rollout_id"] for row in rows]
    texts = read_texts(
        store.sql, rows, "rollout_id", [(rollout_id, rollout_id) for rollout_id in ids]
    )
    for row, (question, row["output"]) in zip(rows, texts, strict=True):
        row["input"] = task_words(row["task"]) or question


ATTEMPTS: Final = View(
    (
        "rollout_id", "attempt_id", "status", "start_ns", "end_ns", "agents", "spans", "calls",
        "rewards", "reward", "input_tokens", "output_tokens", "cost", "task", "error_type",
        "error_message",
    ),
    "SELECT * FROM rollouts",
    {
        "status": _STATUS,
        "agent": Filter(
            "list_contains(string_split(agents, ', '), ?)",
            "Only those of this agent (the whole name).", views=_FACTS,
        ),
        "rewarded": _REWARDED, **WHEN,
    },
    ("start_ns DESC", "rollout_id DESC", "attempt_id DESC"),
    light="SELECT * FROM attempts WHERE is_attempt",
)  # fmt: skip
"""Attempts at rollouts."""

ROLLOUTS: Final = View(
    (
        "rollout_id", "attempts", "status", "start_ns", "end_ns", "agents", "spans", "calls",
        "rewards", "reward", "cost", "task", "mode", "input", "output", "error_type",
        "error_message",
    ),
    f"""SELECT rollout_id, count(*) AS attempts, arg_max(status, start_ns) AS status,
    min(start_ns) AS start_ns, max(end_ns) AS end_ns,
    arg_max(agents, start_ns) AS agents, sum(spans)::BIGINT AS spans, sum(calls)::BIGINT AS calls,
    sum(rewards)::BIGINT AS rewards, {LAST_REWARD} AS reward, {SUM_COSTS} AS cost,
    arg_max_null(error_type, start_ns) AS error_type,
    arg_max_null(error_message, start_ns) AS error_message,
    left(arg_max(task, start_ns), 300) AS task, arg_max_null(mode, start_ns) AS mode
  FROM rollouts GROUP BY rollout_id""",
    {
        "id": Filter(
            "starts_with(rollout_id, ?)", "Only ids with this prefix.", hint=_PREFIX, label="ID"
        ),
        "agent": Filter(_AGENTS, "Only those whose agents' names contain it.", views=_FACTS),
        "status": _STATUS, "since": SINCE,
    },
    ("start_ns DESC", "rollout_id"),
    ("status", "reward", "attempts", "calls", "spans", "cost", "start_ns", "duration"),
    _add_contents,
    light="""SELECT rollout_id, arg_max(status, start_ns) AS status, min(start_ns) AS start_ns
  FROM attempts WHERE is_attempt GROUP BY rollout_id""",
)  # fmt: skip
"""Rollouts, each with its attempts as one."""


FAILURES: Final = View(
    (
        "rollout_id", "attempt_id", "trace_id", "span_id", "start_ns", "end_ns", "error_type",
        "error_message", "tool", "agent", "model", "is_fatal",
    ),
    "SELECT * FROM failures",
    {
        "error": Filter(
            "error_type = ?", "Only errors of this type (the whole name).", hint="KeyError"
        ),
        "tool": Filter("tool = ?", "Only errors of this tool (the whole name)."),
        "agent": Filter("agent = ?", "Only those of this agent (the whole name)."),
        "model": Filter("model = ?", "Only errors of this model, or of what it asked for."),
        "fatal": Filter(
            "is_fatal = ?", "Only errors that ended their rollout, or that it survived.", bool
        ),
        **WHEN,
    },
    ("start_ns DESC", "trace_id", "span_id"),
)  # fmt: skip
"""Errors, each once: of the innermost span that failed of it."""


def word_error(attempt: Mapping[str, Any]) -> str:
    """Return type and message of the error of an attempt that failed; empty if it did not."""
    if attempt.get("status") != "failed":
        return ""
    texts = (attempt["error_type"], attempt["error_message"])
    return ": ".join(filter(None, texts))


def parse_version(text: str) -> int | str:
    """Return the number of a version, or an alias."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number else text


def describe_resource(resources: "Resources", name: str) -> dict[str, Any]:
    """Return a resource as a row: its newest version, and the versions that its aliases mean."""
    newest, aliases = resources.versions(name)[-1], resources.aliases(name)
    return {
        "name": name,
        "kind": newest.kind,
        "newest": newest.version,
        "aliases": aliases,
        "live": aliases.get("live"),
        "canary": aliases.get("canary"),
        "canary_weight": resources.canary_weight(name) if "canary" in aliases else 0.0,
        "withdrawn": next(reversed(resources.withdrawn(name)), None),
        "created_ns": newest.created_ns,
    }

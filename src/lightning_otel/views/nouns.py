"""Views: rollouts and their attempts, conversations and failures, the newest first."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.prices import SUM_COSTS
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.views.table import WHEN, Filter, View
from lightning_otel.views.traces import CONVERSATION, DETAIL_VIEWS, add_details, search_filters

if TYPE_CHECKING:
    from lightning_otel.resources import Resources

_FACTS: Final = ("rollouts",)
_STATUSES: Final = ("running", "succeeded", "failed", "incomplete")

ATTEMPTS: Final = View(
    (
        "rollout_id", "attempt_id", "status", "start_ns", "end_ns", "agents", "spans", "calls",
        "rewards", "reward", "input_tokens", "output_tokens", "cost", "task", "error_type",
        "error_message",
    ),
    "SELECT * FROM rollouts",
    {
        "status": Filter("status = ?", "Only those with this status.", choices=_STATUSES),
        "agent": Filter(
            "list_contains(string_split(agents, ', '), ?)",
            "Only those of this agent (the whole name).", views=_FACTS,
        ),
        "rewarded": Filter(
            "(reward IS NOT NULL) = ?", "Only those with, or without, a reward.", bool,
            views=_FACTS,
        ),
        **WHEN,
    },
    ("start_ns DESC", "rollout_id DESC", "attempt_id DESC"),
    light="SELECT * FROM attempts WHERE is_attempt",
)  # fmt: skip
"""Attempts at rollouts."""

_BY_ROLLOUT: Final = f"""
SELECT rollout_id, count(*) AS attempts, arg_max(status, start_ns) AS status,
  min(start_ns) AS start_ns, max(end_ns) AS end_ns, sum(spans)::BIGINT AS spans,
  sum(calls)::BIGINT AS calls, {LAST_REWARD} AS reward, {SUM_COSTS} AS cost,
  arg_max_null(mode, start_ns) AS mode
FROM rollouts GROUP BY rollout_id"""
_SHARED: Final = (
    "agents", "models", "input", "output", "spans", "calls", "tools", "reward", "input_tokens",
    "output_tokens", "cost", "error_type", "error_message",
)  # fmt: skip
ROLLOUTS: Final = View(
    ("rollout_id", "attempts", "status", "start_ns", "end_ns", "task", "mode", *_SHARED),
    _BY_ROLLOUT,
    search_filters("rollout", _STATUSES),
    ("start_ns DESC", "rollout_id"),
    ("status", "reward", "attempts", "calls", "spans", "cost", "start_ns", "duration"),
    partial(add_details, "rollout"),
    DETAIL_VIEWS,
    """SELECT rollout_id, arg_max(status, start_ns) AS status, min(start_ns) AS start_ns
  FROM attempts WHERE is_attempt GROUP BY rollout_id""",
)
"""Rollouts, each with its attempts as one."""

CONVERSATIONS: Final = View(
    ("conversation_id", "rollouts", "status", "start_ns", "end_ns", *_SHARED),
    f"""SELECT conversation_id, list(rollout_id ORDER BY start_ns) AS rollout_ids,
    count(*) AS rollouts, arg_min(rollout_id, start_ns) AS rollout_id,
    arg_max(rollout_id, start_ns) AS last_id, arg_max(status, start_ns) AS status,
    min(start_ns) AS start_ns, max(end_ns) AS end_ns, sum(spans)::BIGINT AS spans,
    sum(calls)::BIGINT AS calls, avg(reward) AS reward, {SUM_COSTS} AS cost
  FROM ({_BY_ROLLOUT}) JOIN (
    SELECT DISTINCT {ROLLOUT} AS rollout_id, {CONVERSATION} AS conversation_id FROM spans
    WHERE {CONVERSATION} <> ''
  ) USING (rollout_id) GROUP BY conversation_id""",
    search_filters("conversation", _STATUSES),
    ("start_ns DESC", "conversation_id"),
    ("status", "reward", "rollouts", "calls", "spans", "cost", "start_ns", "duration"),
    partial(add_details, "conversation"),
    DETAIL_VIEWS,
)
"""Conversations: the rollouts that name one, as one row; its reward is their mean."""

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

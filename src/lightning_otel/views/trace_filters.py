"""Filters of traces, and their SQL over narrow columns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from lightning_otel import conventions as c
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.gist import RECEIVED
from lightning_otel.store.sql import ROLLOUT, attribute, quoted

Status: TypeAlias = Literal["ended", "failed", "running", "incomplete"]
STATUSES: Final[tuple[Status, ...]] = ("ended", "failed", "running", "incomplete")


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """A filter of traces; by default it holds all.

    Attributes:
        agent: Name or glob of an agent that acts in it.
        model: Name or glob of a model that is called in it.
        status: What became of it.
        rewarded: Whether its rollout has a reward.
        min_reward: The least that may be.
        max_reward: The most.
        has_error: Whether one of its spans failed.
        since_ns: It began at this time or later.
        until_ns: It began before this time.
        resource_version: Name or glob of a version that acted in it; or ``name@version`` of one
            resource.
        received: Whether spans of it came over the network or were imported.
        text: Stands in a message, a task or another attribute; or begins its id.
    """

    agent: str | None = None
    model: str | None = None
    status: Status | None = None
    rewarded: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    has_error: bool | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    resource_version: str | None = None
    received: bool | None = None
    text: str = ""

    @property
    def is_wide(self) -> bool:
        """True if it reads more than narrow columns."""
        return bool(self.text) or self.resource_version is not None or self.received is not None

    @property
    def is_about_rewards(self) -> bool:
        """True if it depends on a reward."""
        return (self.rewarded, self.min_reward, self.max_reward) != (None, None, None)


def matching(wanted: TraceFilter, alive: Sequence[str]) -> tuple[str, list[Any]]:
    """The query for all traces that match by their narrow columns, and its parameters."""
    having = [f"count(*) FILTER (name <> {quoted(c.SPAN_ANNOTATION)}) > 0"]
    where: list[str] = ["true"]
    values: list[Any] = []
    for column, pattern in (("agent", wanted.agent), ("model", wanted.model)):
        if pattern is not None:
            having.append(f"bool_or({column} = ? OR {column} GLOB ?)")
            values += [pattern, pattern]
    if wanted.has_error is not None:
        having.append(f"bool_or(status = 'ERROR') = {wanted.has_error}")
    if wanted.status is not None:
        having.append(f"{status_of(alive)} = {quoted(wanted.status)}")
    for sign, time_ns in ((">=", wanted.since_ns), ("<", wanted.until_ns)):
        if time_ns is not None:
            having.append(f"min(start_ns) {sign} ?")
            values.append(time_ns)
    inner: list[Any] = []
    if wanted.received is not None:
        having.append(f"bool_or(gist_kind & {RECEIVED} > 0) = {wanted.received}")
    if wanted.resource_version is not None:
        condition, inner = _version_condition(wanted.resource_version)
        where.append(f"trace_id IN (SELECT trace_id FROM spans WHERE {condition})")
    matching = f"FROM narrow WHERE {' AND '.join(where)} GROUP BY 1 HAVING {' AND '.join(having)}"
    found = "SELECT trace_id, min(start_ns) AS start_ns, max(start_ns) AS last_ns"
    if not wanted.is_about_rewards:
        return f"{found} {matching}", [*inner, *values]
    rewarded, more = _reward_condition(wanted)
    return (
        f"SELECT trace_id, start_ns, last_ns FROM "
        f"({found}, any_value({ROLLOUT}) AS rollout_id {matching}) LEFT JOIN "
        f"(SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1) "
        f"USING (rollout_id) WHERE {rewarded}",
        [*inner, *values, *more],
    )


def _reward_condition(wanted: TraceFilter) -> tuple[str, list[float]]:
    terms: list[str] = ["true"]
    values: list[float] = []
    if wanted.rewarded is not None:
        terms.append(f"(reward IS NOT NULL) = {wanted.rewarded}")
    for sign, bound in ((">=", wanted.min_reward), ("<=", wanted.max_reward)):
        if bound is not None:
            terms.append(f"reward {sign} ?")
            values.append(bound)
    return " AND ".join(terms), values


def _version_condition(version: str) -> tuple[str, list[Any]]:
    """The condition for spans of a resource's version, which only attributes tell."""
    name, at, number = version.partition("@")
    own = attribute(c.RESOURCE_VERSION)
    condition, values = f"{own} = ? OR {own} GLOB ?", [version, version]
    if at:
        # The object says of agents which version of each resource: {"*": {"prompt": "v3"}}.
        condition += f" OR contains(replace({attribute(c.RESOURCES)}, ' ', ''), ?)"
        values.append(json.dumps({name: number}, separators=(",", ":"))[1:-1])
    return f"contains(attributes::VARCHAR, 'lightning.resource') AND ({condition})", values


def status_of(alive: Sequence[str]) -> str:
    """SQL of what became of a trace."""
    lives = f"process IN ({', '.join(map(quoted, alive))})" if alive else "false"
    is_root, is_open = "parent_span_id IS NULL AND reward IS NULL", "end_ns IS NULL"
    return f"""CASE WHEN bool_or({is_root} AND status = 'ERROR') THEN 'failed'
    WHEN NOT bool_or({is_open}) OR (bool_or({is_root} AND NOT {is_open})
      AND NOT bool_or({is_root} AND {is_open})) THEN 'ended'
    WHEN bool_or({is_open} AND {lives}) THEN 'running' ELSE 'incomplete' END"""

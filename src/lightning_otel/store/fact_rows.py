"""Rows of facts: what the adapter makes of attempts, as a table without content.

A row has a kind, names its attempt, and has the columns of its kind; all others are empty.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.advantages import group_of
from lightning_otel.adapter.attempts import AttemptKey, may_move
from lightning_otel.adapter.attributes import get_text, read_links, to_text
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.rewards import RETRACTED, read_reward
from lightning_otel.adapter.tree import build_tree, find_origins
from lightning_otel.store.prices import read_usage
from lightning_otel.types import Dropped, Report, Reward, Span, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.types.transitions import STEP_COLUMNS

Row = dict[str, Any]
SpanKey = tuple[str, str]
_MESSAGE: Final = 300
"""Cells of an error's message."""
_NO_SPAN: Final = ""
_STEP_NAMES: Final = [name for name in STEP_COLUMNS if name != "branch"]
_read_step: Final = attrgetter(*_STEP_NAMES)


def make_rows(
    explained: Adaptation,
    spans: Iterable[Span],
    fingerprints: Mapping[AttemptKey, int],
    visible: Container[SpanKey],
) -> Iterator[Row]:
    """Yield the rows of attempts.

    Args:
        explained: What the adapter says of the spans.
        spans: Whole rollouts, as they were recorded.
        fingerprints: Of every attempt that was recorded in them.
        visible: The calls by the columns of ``spans``.
    """
    placed = set[SpanKey]()
    parts = {key: (members, part) for key, members, part in explained.parts}
    retractions = _count_retractions(explained, spans)
    for key, fingerprint in fingerprints.items():
        shared = {"rollout_id": key[0], "attempt_id": key[1], "fingerprint": fingerprint}
        if key not in parts:
            yield {"kind": "attempt", **shared, "is_attempt": False}
            continue
        attempt = _AttemptFacts(shared, *parts[key], retractions[key], visible)
        yield from attempt.make_rows()
        placed |= attempt.rewards
    yield from _list_waiting(explained.report, spans, fingerprints, placed)


def _count_retractions(explained: Adaptation, spans: Iterable[Span]) -> Counter[AttemptKey]:
    """Count the retractions of each attempt, which are no members of it."""
    links = [
        (AttemptKey(span.rollout_id, span.attempt_id), read_links(span.attributes))
        for span in spans
        if c.REWARD_RETRACTED in span.attributes and c.REWARD_VALUE not in span.attributes
    ]
    homes = {
        span.span_id: key
        for key, members, _ in (explained.parts if links else ())
        for span in members
        if c.REWARD_VALUE in span.attributes
    }
    return Counter(homes.get(link.get(c.LINK_SPAN_ID, ""), key) for key, link in links)


def _list_waiting(
    report: Report,
    spans: Iterable[Span],
    fingerprints: Mapping[AttemptKey, int],
    placed: set[SpanKey],
) -> Iterator[Row]:
    """Yield the rewards that no attempt has: what they judge is not in the store yet."""
    dropped = {
        (drop.trace_id, drop.span_id): drop for drop in report.dropped if drop.noun == "reward"
    }
    for span in spans if dropped.keys() - placed else ():
        reason = dropped.get((span.trace_id, span.span_id))
        key = AttemptKey(span.rollout_id, span.attempt_id)
        if reason is not None and (span.trace_id, span.span_id) not in placed:
            yield {
                "rollout_id": key[0], "attempt_id": key[1], "fingerprint": fingerprints.get(key),
                **_describe_reward(span, read_reward(span)), "reason": reason.reason,
                "is_waiting": True,
            }  # fmt: skip


class _AttemptFacts:
    """One attempt, its spans, and what the adapter made of them.

    Attributes:
        rewards: The spans of its rewards.
    """

    def __init__(
        self,
        shared: Mapping[str, object],
        members: Sequence[Span],
        part: Adaptation,
        retractions: int,
        visible: Container[SpanKey],
    ) -> None:
        self._shared, self._members, self._part = shared, members, part
        self._retractions, self._visible = retractions, visible
        self._steps: dict[SpanKey, Transition] = {}
        self._branches: dict[SpanKey, int] = {}
        for path in part.trajectories:
            for step in path.transitions:
                self._steps.setdefault((step.trace_id, step.span_id), step)
                self._branches.setdefault((step.trace_id, step.span_id), path.branch)
        self._dropped: dict[SpanKey, list[Dropped]] = {}
        for drop in part.report.dropped:
            self._dropped.setdefault((drop.trace_id, drop.span_id), []).append(drop)
        self._credited = {(credit.trace_id, credit.span_id): credit for credit in part.credited}
        self._by_key = {(span.trace_id, span.span_id): span for span in members}
        self._calls: list[Span] = []
        self._models = set[str]()
        self.rewards = set[SpanKey]()
        self._retracted = 0
        self._swap_hidden()

    def make_rows(self) -> Iterator[Row]:
        """Yield the rows of steps, calls, rewards, tools and faults, and that of the attempt."""
        for key, step in self._steps.items():
            yield {
                "kind": "step", **self._shared,
                **dict(zip(_STEP_NAMES, _read_step(step), strict=True)),
                "branch": self._branches[key], "has_next": step.next_observation is not None,
            }  # fmt: skip
        for span in self._members:
            key = (span.trace_id, span.span_id)
            operation = span.attributes.get(c.OPERATION)
            if operation is not None and is_call(span):
                yield {**self._shared, **self._describe_call(key, span)}
            elif operation == c.EXECUTE_TOOL:
                yield {
                    "kind": "tool", **self._shared, **_name_span(span),
                    "agent": self._find_agent(span), "name": _name_tool(span),
                    "end_ns": span.end_ns, "error_type": _name_error(span),
                    "is_repeated": self._is_within_itself(span),
                }  # fmt: skip
            reward = read_reward(span)
            if reward is not None:
                self.rewards.add(key)
                self._retracted += reward == RETRACTED
                row = _describe_reward(span, reward)
                yield {**self._shared, **row, **self._place_reward(key)}
        yield from self._list_others()
        faults = list(self._list_faults())
        yield from ({"kind": "fault", **self._shared, **fault} for fault in faults)
        reason = min(
            faults, key=lambda fault: (not fault["is_fatal"], fault["start_ns"]), default={}
        )
        error = {name: reason[name] for name in ("error_type", "error_message") if reason}
        summary = self._summarize()
        yield {"kind": "attempt", **self._shared, "is_attempt": True, **summary, **error}

    def _list_faults(self) -> Iterator[Row]:
        """Yield each error once, of the innermost span that failed of it."""
        if not any(span.status == "ERROR" for span in self._members):
            return
        tree = build_tree(self._members)
        spans = [tree.spans[node] for node in tree.order]
        parents = [tree.parents[node] for node in tree.order]
        faults = [read_error(span) if span.status == "ERROR" else None for span in spans]
        errors = [None if error is None else error[1] or error[0] for error in faults]
        origins = find_origins(
            [parent if parent == NO_PARENT else tree.first[parent] for parent in parents], errors
        )
        roots = [at for at, span in enumerate(spans) if span.name == c.SPAN_ROLLOUT]
        ends = {origins.get(at, at) for at in roots}
        calls = self._list_models()
        for at, (span, fault) in enumerate(zip(spans, faults, strict=True)):
            if fault is not None and at not in origins:
                tool, agent = self._find_above(span, _name_tool), self._find_agent(span)
                yield {
                    **_name_span(span), "end_ns": span.end_ns, "agent": agent, "name": tool,
                    "model": _find_model(span, calls.get(agent, ())),
                    "error_type": fault[0] or "error",
                    "error_message": one_line(fault[1], _MESSAGE) or None,
                    "is_fatal": at in ends if roots else None,
                }  # fmt: skip

    def _list_models(self) -> dict[str | None, list[tuple[int, str | None]]]:
        """Return the starts of each agent's calls, in order, and their models."""
        models: dict[str | None, list[tuple[int, str | None]]] = {}
        for span in sorted(self._calls, key=lambda call: call.start_ns):
            models.setdefault(self._find_agent(span), []).append((span.start_ns, _name_model(span)))
        return models

    def _list_others(self) -> Iterator[Row]:
        """Yield what the report says was left out, and repairs."""
        report = self._part.report
        for drop in report.dropped:
            span = self._by_key.get((drop.trace_id, drop.span_id))
            yield {
                "kind": "left_out", **self._shared, "trace_id": drop.trace_id,
                "span_id": drop.span_id, "name": drop.noun, "reason": drop.reason,
                "start_ns": None if span is None else span.start_ns,
            }  # fmt: skip
        for repair in report.repairs:
            yield {
                "kind": "repair", **self._shared, "trace_id": repair.trace_id,
                "span_id": repair.span_id, "name": repair.rule,
            }  # fmt: skip

    def _describe_call(self, key: SpanKey, span: Span) -> Row:
        reasons = self._list_reasons(key, "call", "record")
        is_repeated = any(drop.noun == "record" for drop in reasons)
        models, tokens = read_usage(span, self._steps.get(key))
        if key in self._visible and not is_repeated:
            self._calls.append(span)
            self._models.add(models[0] or models[1] or "")
        return {
            "kind": "call", **_name_span(span), "agent": self._find_agent(span),
            "end_ns": span.end_ns, "error_type": _name_error(span),
            "response_model": models[0], "request_model": models[1], "input_tokens": tokens.input,
            "output_tokens": tokens.output, "cached_tokens": tokens.cached,
            "written_tokens": tokens.written, "is_repeated": is_repeated,
            "reason": reasons[0].reason if reasons else None,
        }  # fmt: skip

    def _is_within_itself(self, span: Span) -> bool:
        """Return whether a tool's span lies in one of the same tool, as that of MCP's server."""
        above = self._by_key.get((span.trace_id, span.parent_span_id or _NO_SPAN))
        return above is not None and _name_tool(above) == _name_tool(span)

    def _swap_hidden(self) -> None:
        """Have a record that the columns show stand for one within it that they do not."""
        for key, span in self._by_key.items() if self._dropped else ():
            if is_call(span) and key not in self._visible and key not in self._dropped:
                above = span.trace_id, span.parent_span_id or _NO_SPAN
                if above in self._visible and above in self._dropped:
                    self._dropped[key] = self._dropped.pop(above)

    def _place_reward(self, key: SpanKey) -> Row:
        if (credited := self._credited.get(key)) is not None:
            return {"placed_by": credited.by, "call_ids": credited.calls}
        reasons = self._list_reasons(key, "reward")
        return {"reason": reasons[0].reason if reasons else None}

    def _list_reasons(self, key: SpanKey, *nouns: str) -> list[Dropped]:
        return [drop for drop in self._dropped.get(key, ()) if drop.noun in nouns]

    def _find_agent(self, span: Span) -> str | None:
        """Return the agent of a step, else that of the span or the nearest one above it."""
        if step := self._steps.get((span.trace_id, span.span_id)):
            return step.agent or None
        return self._find_above(span, lambda above: get_text(above.attributes, c.AGENT_NAME))

    def _find_above(self, span: Span, read: Callable[[Span], str | None]) -> str | None:
        """Return the first text that a function reads of a span or of those above it."""
        above: Span | None = span
        for _ in self._members:
            if above is None:
                break
            if text := read(above):
                return text
            above = self._by_key.get((above.trace_id, above.parent_span_id or _NO_SPAN))
        return None

    def _summarize(self) -> Row:
        members, report = self._members, self._part.report
        # A reward given later, in a trace of its own, does not prolong the rollout.
        lasting = [span for span in members if not may_move(span)] or members
        texts = [span.attributes for span in members]
        agents = {name for values in texts if (name := get_text(values, c.AGENT_NAME))}
        roots = [span for span in members if span.name == c.SPAN_ROLLOUT]
        root = min(roots, key=lambda span: span.start_ns, default=None)
        steps = self._steps.values()
        resources = {name: version for step in steps for name, version in step.resources.items()}
        (outcome,) = self._part.outcomes
        return {
            "start_ns": min(span.start_ns for span in members),
            "end_ns": max(
                span.start_ns if span.end_ns is None else span.end_ns for span in lasting
            ),
            "spans": len(members) + self._retractions,
            "traces": len({span.trace_id for span in lasting}),
            "calls": len(self._calls),
            "reported_spans": report.spans,
            "reported_calls": report.calls,
            "steps": report.transitions,
            "exact": report.exact,
            "rewarded": report.rewarded,
            "reward_spans": report.rewards,
            "retracted": self._retracted,
            "rewards_placed": report.rewards_placed,
            "reward": outcome.value,
            "rewards": outcome.rewards,
            "input_tokens": _sum_tokens(self._calls, c.INPUT_TOKENS),
            "output_tokens": _sum_tokens(self._calls, c.OUTPUT_TOKENS),
            "cached_tokens": _sum_tokens(self._calls, c.CACHED_TOKENS),
            "agents": ", ".join(sorted(agents)) or None,
            "models": ", ".join(sorted(self._models - {""})) or None,
            "resources": resources,
            "task": None if root is None else _read_task(root),
            "group_id": group_of(members, None),
            "task_id": _find_text(texts, c.TASK_ID),
            "mode": _find_text(texts, c.MODE),
            "reasons": report.inexact,
            "notes": report.notes,
        }


def _find_text(attributes: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """Return the text under a key of the first span that has one."""
    texts = (get_text(values, key) for values in attributes if key in values)
    return next(filter(None, texts), None)


def _name_span(span: Span) -> Row:
    return {"trace_id": span.trace_id, "span_id": span.span_id, "start_ns": span.start_ns}


def _describe_reward(span: Span, reward: Reward | str | None) -> Row:
    return {
        "kind": "reward", **_name_span(span), "recorded_in": span.rollout_id,
        "agent": get_text(span.attributes, c.AGENT_NAME),
        "is_retracted": reward == RETRACTED,
        "name": next(iter(reward.values)) if isinstance(reward, Reward) else None,
        "reward": reward.value if isinstance(reward, Reward) else None,
    }  # fmt: skip


def read_error(span: Span) -> tuple[str, str]:
    """Return the type of a span's error and what it says, each empty where nothing tells it."""
    events = [event.attributes for event in span.events if c.EXCEPTION_TYPE in event.attributes]
    raised = events[-1] if events else span.attributes
    kind = get_text(span.attributes, c.ERROR_TYPE) or get_text(raised, c.EXCEPTION_TYPE) or ""
    message = span.status_message or to_text(raised.get(c.EXCEPTION_MESSAGE, ""))
    # OpenTelemetry's SDK writes "KeyError: 'id'" where a block raises.
    return kind, message.removeprefix(f"{kind.rpartition('.')[2]}: ")


def _name_model(call: Span) -> str | None:
    return next(filter(None, read_usage(call)[0]), None)


def _find_model(fault: Span, calls: Sequence[tuple[int, str | None]]) -> str | None:
    """Return the model of a call that failed, else of the last of its agent's calls before it."""
    if is_call(fault):
        return _name_model(fault)
    place = bisect_right(calls, fault.start_ns, key=itemgetter(0))
    return calls[place - 1][1] if place else None


def _name_tool(span: Span) -> str | None:
    is_tool = span.attributes.get(c.OPERATION) == c.EXECUTE_TOOL
    return (get_text(span.attributes, c.TOOL_NAME) or span.name) if is_tool else None


def _name_error(span: Span) -> str | None:
    return read_error(span)[0] or ("error" if span.status == "ERROR" else None)


def _read_task(span: Span) -> str | None:
    task = span.attributes.get(c.TASK)
    return task if task is None or isinstance(task, str) else str(task)


def _sum_tokens(calls: Iterable[Span], key: str) -> int | None:
    counts = [value for span in calls if type(value := span.attributes.get(key)) is int]
    return sum(counts) if counts else None

"""A strategy for what agents really do: several at once, nested, retried, judged and told twice.

``forests.py`` draws spans that no program would make; here a program is drawn, and its spans are
recorded as it runs: so calls overlap, children outlive parents, and links name what was there.
"""

import json
from typing import Any

from hypothesis import strategies as st
from tests.adapter.forest import Forest, call_attributes, said, token_attributes

from lightning_otel import conventions as c
from lightning_otel.types import Span

ACTS = (
    "agent",
    "chain",
    "tool",
    "call",
    "call",
    "open call",
    "retry",
    "close",
    "close",
    "reward",
    "reward",
    "action",
    "seen",
    "twice within",
    "twice beside",
    "attempt",
    "rollout",
)
LINKS = ("none", "span", "response", "gone", "unknown", "inside", "named twice")
_MAKES = ("make.one", "make.two")

Act = tuple[str, int, int]
acts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 7), st.integers(0, 7)), max_size=30)


class _Program:
    """Runs acts one after the other; what is open stays so until it is closed."""

    def __init__(self) -> None:
        self.done: list[Forest] = []
        self._calls = 0
        self._rewards = 0
        self._begin(0, 1)

    def _begin(self, rollout: int, attempt: int) -> None:
        number = len(self.done) + 1
        self._forest = Forest(
            rollout_id=f"rollout-{rollout}",
            attempt_id=str(attempt),
            trace_id=f"{number:032x}",
            process=f"p{number}",
            tick=1000 * number,
        )
        self._rollout, self._attempt = rollout, attempt
        self._open: list[str] = []
        self._told: list[tuple[str, str, dict[str, Any]]] = []
        self.done.append(self._forest)

    def _parent(self, choice: int) -> str | None:
        return self._open[-1 - choice % len(self._open)] if self._open and choice < 6 else None

    def _exchange(self, choice: int) -> dict[str, Any]:
        """A call's attributes; every third asks what another one may have asked as well."""
        self._calls += 1
        turns = [said("user" if n % 2 == 0 else "assistant", "x") for n in range(choice % 4 + 1)]
        found = call_attributes(turns, "x" if choice % 3 == 0 else f"answer {self._calls}")
        if choice % 2:
            found[c.RESPONSE_ID] = f"response-{self._calls}"
        if choice % 4 == 0:
            found |= token_attributes([1, 2], [3], [-0.5])
        return found

    def act(self, kind: str, one: int, two: int) -> None:
        """Do one thing."""
        forest, parent = self._forest, self._parent(one)
        if kind in ("agent", "chain"):
            named = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: f"agent {two % 3}"}
            held = named if kind == "agent" else {}
            self._open.append(forest.open(kind, held, parent=parent))
        elif kind == "tool":
            forest.make("tool", {c.OPERATION: c.EXECUTE_TOOL}, parent=parent)
        elif kind in ("call", "open call"):
            self._call(two, parent, is_open=kind == "open call")
        elif kind == "retry":
            forest.make("chat", self._exchange(two), parent=parent, status="ERROR")
            self._call(two, parent, is_open=False)
        elif kind == "close" and self._open:
            forest.close(self._open.pop(-1 - one % len(self._open)))
        elif kind == "reward":
            self._reward(LINKS[one % len(LINKS)], two, parent)
        elif kind in ("action", "seen"):
            name = c.SPAN_ACTION if kind == "action" else c.SPAN_OBSERVATION
            forest.make(name, {c.OBJECT_LITERAL: kind}, parent=parent)
        elif kind.startswith("twice"):
            self._twice(kind == "twice within", parent, one, two)
        elif kind in ("attempt", "rollout"):
            is_next = kind == "rollout"
            self._begin(self._rollout + is_next, 1 if is_next else self._attempt + 1)

    def _call(self, choice: int, parent: str | None, *, is_open: bool) -> None:
        attributes = self._exchange(choice)
        span_id = self._forest.open("chat", attributes, parent=parent, scope=_MAKES[0])
        self._told.append((span_id, attributes.get(c.RESPONSE_ID, ""), attributes))
        if is_open:
            self._open.append(span_id)
        else:
            self._forest.close(span_id)

    def _twice(self, is_within: bool, parent: str | None, one: int, two: int) -> None:
        """Two instrumentors' records of one request."""
        attributes = self._exchange(two)
        if not is_within:
            attributes[c.OUTPUT_MESSAGES] = json.dumps([said("assistant", f"own {self._calls}")])
        first = self._forest.open("chat", attributes, parent=parent, scope=_MAKES[one % 2])
        second = self._forest.open(
            "chat",
            attributes,
            parent=first if is_within else parent,
            scope=_MAKES[(one + 1) % 2],
        )
        self._forest.close(*([second, first] if is_within else [first, second]))

    def _reward(self, link: str, choice: int, parent: str | None) -> None:
        self._rewards += 1
        value = float(self._rewards)
        told = self._told[choice % len(self._told)] if self._told else ("gone", "gone", {})
        values: list[Any] = [(f"name {choice % 2}", value)]
        links: dict[str, str] = {}
        if link == "span":
            links["span_id"] = told[0]
        elif link == "response":
            links["response_id"] = told[1] or "gone"
        elif link == "gone":
            links["span_id"] = "gone"
        elif link == "named twice":
            values.append(("second", value + 0.5))
        elif link == "inside" and self._told:
            parent = told[0]
        reward = self._forest.reward(*values, parent=parent, **links)
        if link == "unknown":
            held = self._forest._made[reward].attributes
            held[f"{c.LINK_PREFIX}.0.key_match"] = "session"
            held[f"{c.LINK_PREFIX}.0.value_match"] = "s"


def spans_of(given: list[Act]) -> list[Span]:
    """The spans that a program leaves; what it did not close is incomplete."""
    program = _Program()
    for act in given:
        program.act(*act)
    return [span for forest in program.done for span in forest.spans]


programs = acts.map(spans_of)
"""Spans of programs: several agents, attempts and rollouts, each span with an id of its own."""

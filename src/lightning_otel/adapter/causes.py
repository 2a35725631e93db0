"""The cause of each trajectory: why its first step that no earlier one has stands where it does.

The rules, in their order, are those of docs/transitions.md. What follows what is decided in
``branches``; two conversations are compared without instructions, which are each agent's own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.adapter import branches, conversations
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.branches import NONE, Links
from lightning_otel.adapter.calls import observation_of
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import BranchCause, Call

_MOST_ALIKE: Final = 16
"""How many calls that left the same conversation behind are looked at for one."""


class Causes:
    """Names causes in one attempt."""

    def __init__(self, tree: Tree, calls: Mapping[int, Call], failed: Iterable[int]) -> None:
        """Know the attempt.

        Args:
            tree: Its spans.
            calls: What makes transitions, by position, in order.
            failed: Positions of calls that failed, were abandoned or never ended.
        """
        self._tree = tree
        self._calls = calls
        self._failed: dict[tuple[str, int], list[int]] = {}
        for position in sorted(failed):
            if observation := observation_of(tree.spans[position]):
                given = conversations.read_conversation(observation).given
                self._failed.setdefault((tree.agents[position], given), []).append(position)
        self._is_alone = len({*tree.agents, ""}) < 3
        self._has_caller = bytearray(len(tree.spans))  # another agent stands above its own
        self._handed: dict[str, int] = {}
        self._left: dict[int, list[int]] | None = None
        if self._is_alone:
            return
        for node in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
            parent = tree.parents[node]
            if parent != NO_PARENT:
                is_inside = tree.agents[node] == tree.agents[parent]
                self._has_caller[node] = (
                    self._has_caller[parent] if is_inside else tree.agents[parent] != ""
                )
        for position, span in enumerate(tree.spans):
            target = text(span.attributes, c.HANDOFF_TARGET)
            if target is not None and tree.agents[position] != target:
                self._handed.setdefault(target, position)

    def name_each(self, own: Links, paths: Sequence[Sequence[int]]) -> list[BranchCause]:
        """Return the cause of each path of an agent, given in order."""
        asked: Counter[tuple[int, int]] = Counter()
        continued: Counter[int] = Counter()
        for call, previous in enumerate(own.before if len(paths) > 1 else ()):
            if previous != NONE:
                asked[previous, own.talks[call].given] += 1
                continued[previous] += own.is_continued[call]
        seen: set[int] = set()
        found: list[BranchCause] = []
        for path in paths:
            first = next(step for step in path if step not in seen)
            seen.update(path)
            previous, talk = own.before[first], own.talks[first]
            if own.repeats[first] != NONE or self._asks_again(own, first):
                found.append("retry")
            elif previous == NONE:
                found.append(self._first_cause(own, first))
            elif own.is_compacted[first]:
                found.append("compaction")
            elif own.is_beside[first]:
                found.append("parallel")
            elif talk.prefixes and asked[previous, talk.given] > 1:
                found.append("retry")
            elif own.is_continued[first] and continued[previous] > 1:
                found.append("rewind")
            else:
                found.append("parallel")
        return found

    def _first_cause(self, own: Links, first: int) -> BranchCause:
        """Return the cause of a step that follows none of its agent's."""
        position = own.positions[first]
        if not self._is_alone:
            handed = self._handed.get(own.calls[first].agent)
            if handed is not None and handed < position:
                return "hand_off"
            if self._has_caller[position]:
                return "sub_agent"
            if self._takes_on(position):
                return "hand_off"
        return "parallel" if own.is_beside[first] else "start"

    def _asks_again(self, own: Links, call: int) -> bool:
        """Return whether a call repeats a failed one, with a remark at most."""
        observation, position = own.calls[call].observation, own.positions[call]
        for length, given in enumerate(own.talks[call].prefixes if self._failed else (), 1):
            if length < len(observation) and conversations.is_own(observation[length]):
                continue
            for earlier in self._failed.get((own.calls[call].agent, given), ()):
                if earlier < position and self._is_over(earlier, position):
                    return True
        return False

    def _is_over(self, earlier: int, later: int) -> bool:
        """Return whether a call had failed by then; one that never ended may have gone on."""
        one, other = self._tree.spans[earlier], self._tree.spans[later]
        if one.end_ns is None:
            return "" != one.process != other.process != ""
        return branches.is_after(self._tree, earlier, later)

    def _takes_on(self, position: int) -> bool:
        """Return whether a call begins with another agent's history, answer included."""
        if self._left is None:
            self._left = {}
            for at, call in self._calls.items():
                for left in conversations.read_spoken(call).left:
                    self._left.setdefault(left, []).append(at)
        call, tree = self._calls[position], self._tree
        return any(
            self._calls[earlier].agent != call.agent and tree.ends[earlier] <= tree.starts[position]
            for prefix in reversed(conversations.read_spoken(call).prefixes)
            for earlier in self._left.get(prefix, ())[:_MOST_ALIKE]
        )

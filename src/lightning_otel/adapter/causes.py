"""Why each trajectory begins where it does: the cause of its first step that no earlier one has.

The first rule that applies decides. Of a first step that follows none of its agent's:

1. ``retry``: it asks again what an earlier call of its agent was asked, that failed, was abandoned
   or never ended in another process; or one whose answer was thrown away (see ``branches``).
2. ``hand_off``: a span before it names its agent as whom the conversation was handed to.
3. ``sub_agent``: its agent's span lies within the span of another agent, a tool's between or not.
4. ``hand_off``: its messages begin with the whole conversation and answer of another agent's call
   that had ended; instructions are not compared, since they are each agent's own.
5. ``parallel``: another branch of its agent ran beside it or around it, as it does around a tool.
6. ``start``: nothing of that is known.

Of one that follows an earlier step:

1. ``retry``: as above.
2. ``compaction``: it goes on with a shortened conversation (see ``branches``).
3. ``parallel``: it ran beside another branch.
4. ``retry``: another call that followed the same step was asked the same.
5. ``rewind``: its conversation goes back to that step, and another one's went on from there too.
6. ``parallel``: it took turns with another conversation of its agent.

Belongs here: naming. What follows what is decided in ``branches``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter import conversations, siblings
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.branches import Links
from lightning_otel.adapter.calls import observation_of
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.siblings import NONE
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import BranchCause, Call

_MOST_ALIKE: Final = 16
"""How many calls that left the same conversation behind are looked at for one."""


class _Failures:
    """Calls that made no transition because they failed, by what they were asked."""

    def __init__(self, tree: Tree, positions: Iterable[int]) -> None:
        """Read what calls were asked.

        Args:
            tree: The attempt's spans.
            positions: Of calls that failed, were abandoned or never ended.
        """
        self._asked: dict[tuple[str, int], list[int]] = {}
        self._tree = tree
        for position in sorted(positions):
            observation = observation_of(tree.spans[position])
            if observation:
                asked = conversations.given(observation)
                self._asked.setdefault((tree.agents[position], asked), []).append(position)

    def asked_before(self, call: Call, position: int, talk: Conversation) -> bool:
        """Whether a call asks again what an earlier one asked, and perhaps a remark more."""
        if not self._asked:
            return False
        for length, asked in enumerate(talk.prefixes, 1):
            if length < len(call.observation) and conversations.is_own(call.observation[length]):
                continue
            for earlier in self._asked.get((call.agent, asked), ()):
                if earlier < position and self._is_over(earlier, position):
                    return True
        return False

    def _is_over(self, earlier: int, later: int) -> bool:
        """Whether a call had come to nothing by then; one that never ended may have gone on."""
        one, other = self._tree.spans[earlier], self._tree.spans[later]
        if one.end_ns is None:
            return "" != one.process != other.process != ""
        return siblings.is_after(self._tree, earlier, later)


class _Agents:
    """How the agents of an attempt came to act: called by one another, or handed over to."""

    def __init__(self, tree: Tree, calls: Mapping[int, Call]) -> None:
        self._tree = tree
        self._calls = calls
        self._is_alone = len({*tree.agents, ""}) < 3
        self._callers = [] if self._is_alone else _callers(tree)
        self._handed: dict[str, list[int]] = {}
        self._left: dict[int, list[int]] | None = None
        for position, span in enumerate(() if self._is_alone else tree.spans):
            target = text(span.attributes, c.HANDOFF_TARGET)
            if target is not None and tree.agents[position] != target:
                self._handed.setdefault(target, []).append(position)

    def is_called(self, position: int) -> bool:
        """Whether a call's agent works inside another agent's span."""
        return not self._is_alone and self._callers[position] != ""

    def is_handed(self, position: int) -> bool:
        """Whether a span before the call says that the conversation went to its agent."""
        handed = self._handed.get(self._calls[position].agent)
        return handed is not None and handed[0] < position

    def takes_on(self, position: int) -> bool:
        """Whether a call begins with another agent's conversation, answer included."""
        if self._is_alone:
            return False
        if self._left is None:
            self._left = self._all_left()
        call, tree = self._calls[position], self._tree
        for prefix in reversed(conversations.spoken(call)):
            for earlier in self._left.get(prefix, ())[:_MOST_ALIKE]:
                if self._calls[earlier].agent != call.agent and (
                    tree.ends[earlier] <= tree.starts[position]
                ):
                    return True
        return False

    def _all_left(self) -> dict[int, list[int]]:
        """By running hash without instructions the calls that left a conversation behind."""
        found: dict[int, list[int]] = {}
        for position, call in self._calls.items():
            for left in conversations.left_spoken(call):
                found.setdefault(left, []).append(position)
        return found


def _callers(tree: Tree) -> list[str]:
    """For each span the agent above its own; empty where there is none."""
    found = [""] * len(tree.spans)
    for node in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
        parent = tree.parents[node]
        if parent != NO_PARENT:
            is_inside = tree.agents[node] == tree.agents[parent]
            found[node] = found[parent] if is_inside else tree.agents[parent]
    return found


class Own(NamedTuple):
    """One agent's calls, in order.

    Attributes:
        positions: Their positions in the tree.
        calls: The calls.
        talks: Their conversations.
        links: How they hang together.
    """

    positions: Sequence[int]
    calls: Sequence[Call]
    talks: Sequence[Conversation]
    links: Links


class Causes:
    """Names causes in one attempt."""

    def __init__(self, tree: Tree, calls: Mapping[int, Call], failed: Iterable[int]) -> None:
        """Know the attempt.

        Args:
            tree: Its spans.
            calls: What makes transitions, by position, in order.
            failed: Positions of calls that failed, were abandoned or never ended.
        """
        self._agents = _Agents(tree, calls)
        self._failures = _Failures(tree, failed)

    def of(self, own: Own, paths: Sequence[Sequence[int]]) -> list[BranchCause]:
        """The cause of each path of an agent, given in order."""
        asked: Counter[tuple[int, int]] = Counter()
        continued: Counter[int] = Counter()
        for call, previous in enumerate(own.links.before if len(paths) > 1 else ()):
            if previous != NONE:
                asked[previous, own.talks[call].given] += 1
                continued[previous] += own.links.is_continued[call]
        seen: set[int] = set()
        found: list[BranchCause] = []
        for path in paths:
            first = next(step for step in path if step not in seen)
            seen.update(path)
            previous = own.links.before[first]
            if own.links.repeats[first] != NONE or self._failures.asked_before(
                own.calls[first], own.positions[first], own.talks[first]
            ):
                found.append("retry")
            elif previous == NONE:
                found.append(self._begin(own, first))
            elif own.links.is_compacted[first]:
                found.append("compaction")
            elif own.links.is_beside[first]:
                found.append("parallel")
            elif own.talks[first].prefixes and asked[previous, own.talks[first].given] > 1:
                found.append("retry")
            elif own.links.is_continued[first] and continued[previous] > 1:
                found.append("rewind")
            else:
                found.append("parallel")
        return found

    def _begin(self, own: Own, first: int) -> BranchCause:
        """The cause of a step that follows none of its agent's."""
        position = own.positions[first]
        if self._agents.is_handed(position):
            return "hand_off"
        if self._agents.is_called(position):
            return "sub_agent"
        if self._agents.takes_on(position):
            return "hand_off"
        return "parallel" if own.links.is_beside[first] else "start"

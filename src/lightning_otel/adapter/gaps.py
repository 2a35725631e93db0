"""Selection of the nodes of a large outline that are shown, and summaries of the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_otel.adapter.outline import Node
from lightning_otel.adapter.tree import NO_PARENT
from lightning_otel.types.wording import count_noun


class Gap(NamedTuple):
    """Nodes that are not shown, all below one parent and between two of its shown children."""

    nodes: list[Node]

    def told(self) -> str:
        """Word the number of hidden spans, and their kinds."""
        nodes = self.nodes
        counts = [
            (sum(node.kind == "call" for node in nodes), "call"),
            (sum(node.kind == "reward" for node in nodes), "reward"),
            (sum(node.span.status == "ERROR" for node in nodes), "error"),
            (sum(node.span.is_incomplete for node in nodes), "incomplete span"),
        ]
        told = ", ".join(count_noun(count, noun) for count, noun in counts if count)
        return f"⋯ {count_noun(len(nodes), 'more span')}{': ' if told else ''}{told}"


def children_of(
    nodes: Sequence[Node], is_shown: Sequence[bool] | None
) -> dict[int, list[int | Gap]]:
    """Return the children of each shown node: shown ones, and gaps for the hidden.

    Args:
        nodes: Each after its parent.
        is_shown: Which are shown: each with its parent. All, if it is not said.
    """
    found: dict[int, list[int | Gap]] = {}
    above: list[int] = []  # for each node the shown node nearest above or at it
    for position, node in enumerate(nodes):
        nearest = NO_PARENT if node.parent == NO_PARENT else above[node.parent]
        if is_shown is None or is_shown[position]:
            found.setdefault(nearest, []).append(position)
            above.append(position)
            continue
        above.append(nearest)
        row = found.setdefault(nearest, [])
        if row and isinstance(row[-1], Gap):
            row[-1].nodes.append(node)
        else:
            row.append(Gap([node]))
    return found


def salient(nodes: Sequence[Node], limit: int) -> list[bool]:
    """Choose the nodes to show where too many would not fit; they are a tree of their own.

    Those near a root come first, and of many siblings the first and the last ones.

    Args:
        nodes: Each after its parent.
        limit: How many at most.
    """
    if len(nodes) <= limit:
        return [True] * len(nodes)
    siblings: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        siblings.setdefault(node.parent, []).append(position)
    costs = [0] * (len(nodes) + 1)  # the last one, index -1, stands for what is above the roots
    for parent, children in siblings.items():  # in order of the first child: parents come first
        for rank, child in enumerate(children):
            costs[child] = costs[parent] + 1 + min(rank, len(children) - 1 - rank)
    is_shown = [False] * len(nodes)
    for position in sorted(range(len(nodes)), key=costs.__getitem__)[:limit]:
        is_shown[position] = True
    return is_shown

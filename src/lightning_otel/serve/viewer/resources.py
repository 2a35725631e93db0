"""Resources: their versions, who is given which, what each earned, and what changed between two."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.beside import required, state_of
from lightning_otel.serve.viewer.chat import show_value
from lightning_otel.serve.viewer.differing import compared, folded
from lightning_otel.store.source import rollout_rewards
from lightning_otel.types import Resource, Transition

if TYPE_CHECKING:
    from lightning_otel.resources import Resources
    from lightning_otel.resources.comparing import Comparison, Pair

ROWS: Final = 50
"""Versions, and names, on a page."""
PAIRS: Final = 50
"""Tasks listed of a comparison."""
_LINES: Final = 5000
"""Lines of two versions together that are compared."""
_TASK: Final = 160

_TASKS: Final = """
SELECT rollout_id, any_value(task) AS task FROM rollouts
WHERE rollout_id IN (SELECT unnest(?)) GROUP BY 1
"""


class Named(NamedTuple):
    """A resource in the list.

    Attributes:
        share: What part of all is given the canary; 0 where there is none.
    """

    newest: Resource
    live: int | None
    canary: int | None
    share: float


@dataclass(slots=True)
class Use:
    """Use of a version by rollouts.

    Attributes:
        rollouts: How many were made with it and no other version.
        rewards: What those came to that have a reward.
        agents: Who acted with it.
        last_ns: When it last acted.
    """

    rollouts: int = 0
    rewards: list[float] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    last_ns: int = 0

    @property
    def mean(self) -> float | None:
        """The mean reward; None where there is none."""
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None where it is not known."""
        if len(self.rewards) < 2:
            return None
        return statistics.stdev(self.rewards) / math.sqrt(len(self.rewards))


def names(store: Store, number: int) -> Mapping[str, object]:
    """A page of the resources there are."""
    state = state_of(store)
    found: list[Named] = []
    total = 0
    if state is not None:
        opened = _open_resources(store, "resource")
        every = opened.names()
        total = len(every)
        for name in every[(number - 1) * ROWS : number * ROWS]:
            aliases = opened.aliases(name)
            share = opened.canary_weight(name) if "canary" in aliases else 0.0
            newest = opened.versions(name)[-1]
            found.append(Named(newest, aliases.get("live"), aliases.get("canary"), share))
    return {"rows": found, "total": total, "size": ROWS, "number": number}


def read(store: Store, name: str, number: int) -> Mapping[str, object]:
    """One resource: a page of its versions, the newest first, and who uses them.

    Raises:
        NotFoundError: There is none of that name.
    """
    opened = _open_resources(store, f"resource {name!r}")
    last_move = opened.last_move(name)  # first: a form refuses what moves from now on
    versions = opened.versions(name)[::-1]
    aliases = dict(sorted(opened.aliases(name).items(), key=_live_first))
    shown = versions[(number - 1) * ROWS : number * ROWS]
    live = next((each for each in versions if each.version == aliases.get("live")), None)
    return {
        "title": name,
        "name": name,
        "kind": versions[0].kind,
        "versions": shown,
        "total": len(versions),
        "size": ROWS,
        "number": number,
        "aliases": aliases,
        "last_move": last_move,
        "by_version": _by_version(aliases),
        "share": opened.canary_weight(name),
        "previous": opened.previous(name),
        "withdrawn": {each.version: each.reason for each in opened.withdrawals(name)},
        "numbers": [each.version for each in versions],
        "live": live,
        "live_text": show_value("\n".join(lines(live))) if live else None,
        "text": {each.version: show_value("\n".join(lines(each))) for each in shown},
    }


def used(store: Store, name: str) -> Mapping[str, object]:
    """Read the use of each version, the newest first.

    Raises:
        NotFoundError: There is none of that name.
    """
    versions = _open_resources(store, f"resource {name!r}").versions(name)
    rewards = rollout_rewards(store.source)
    found = uses(name, store.transitions(bodies=False), rewards)
    kept = [(each.version, found[each.version]) for each in versions[::-1] if each.version in found]
    return {
        "title": f"Who uses {name}",
        "name": name,
        "rows": kept[:ROWS],
        "total": len(kept),
        "never": len(versions) - len(kept),
    }


def uses(name: str, steps: Iterable[Transition], rewards: Mapping[str, float]) -> dict[int, Use]:
    """Count the use of each version; a rollout made with several counts for none.

    Args:
        name: The resource.
        steps: All there are, or those that are asked for.
        rewards: Of each rollout that has one.
    """
    from lightning_otel.resources.comparing import last_made, version_in

    found: dict[int, Use] = {}

    def note(step: Transition) -> Transition:
        version = version_in(name, step)
        if version is not None:
            use = found.setdefault(version, Use())
            use.agents.add(step.agent)
            use.last_ns = max(use.last_ns, step.start_ns)
        return step

    for rollout_id, made in last_made(name, map(note, steps)).items():
        if len(made.versions) == 1:
            use = found[next(iter(made.versions))]
            use.rollouts += 1
            if rollout_id in rewards:
                use.rewards.append(rewards[rollout_id])
    return found


def lines(resource: Resource) -> list[str]:
    """Return the text of a version in lines."""
    from lightning_otel.resources.bodies import lines_of

    return lines_of(resource)


def difference(
    store: Store, name: str, a: str, b: str, *, is_whole: bool, is_paired: bool
) -> Mapping[str, object]:
    """Two versions beside each other, and what rewards say of them.

    Args:
        store: Where their rollouts are.
        name: The resource.
        a: One version, by number or alias; empty for what is live.
        b: The other; empty for the canary, else the newest.
        is_whole: Whether lines that are the same are all shown.
        is_paired: Whether only tasks done with both count.

    Raises:
        NotFoundError: There is no such version.
    """
    opened = _open_resources(store, f"resource {name!r}")
    last_move = opened.last_move(name)
    versions = opened.versions(name)
    aliases = opened.aliases(name)
    first = opened.get(name, _parse_version(a) if a else aliases.get("live", versions[0].version))
    second = opened.get(
        name, _parse_version(b) if b else aliases.get("canary", versions[-1].version)
    )
    of_a, of_b = lines(first), lines(second)
    left_out = max(0, len(of_a) + len(of_b) - _LINES)
    if left_out:
        of_a, of_b = of_a[: _LINES // 2], of_b[: _LINES // 2]
    found = compared(of_a, of_b)
    comparison, refusal = None, ""
    try:
        comparison = opened.compare(name, first.version, second.version, store, is_paired=is_paired)
    except ConfigError as exc:
        refusal = str(exc)
    return {
        "title": f"{name}: {first.version} and {second.version}",
        "name": name,
        "a": first,
        "b": second,
        "numbers": [each.version for each in versions][::-1],
        "last_move": last_move,
        "by_version": _by_version(aliases),
        "lines": found if is_whole else folded(found),
        "left_out": left_out,
        "is_whole": is_whole,
        "is_paired": is_paired,
        "is_same": of_a == of_b and not left_out,
        "comparison": comparison,
        "refusal": refusal,
        **_pick_pairs(store, comparison),
    }


def _pick_pairs(store: Store, found: "Comparison | None") -> Mapping[str, object]:
    """The tasks that differ most, with what they were, and where all of them lie on a scale."""
    pairs: Sequence[Pair] = sorted(found.pairs, key=lambda pair: pair.difference) if found else ()
    shown = pairs
    if len(pairs) > PAIRS:
        shown = [*pairs[: PAIRS // 2], *pairs[-(PAIRS // 2) :]]
    ids = [pair.rollouts_b[0] for pair in shown]
    tasks = {row["rollout_id"]: row["task"] for row in store.sql(_TASKS, [ids])} if ids else {}
    return {
        "pairs": [(pair, _shorten_task(tasks.get(pair.rollouts_b[0]))) for pair in shown],
        "pairs_total": len(pairs),
        "scale": Scale.of(found) if found else None,
    }


def _shorten_task(task: str | None) -> str:
    try:
        said = json.loads(task) if task else ""
    except (ValueError, RecursionError):
        said = task
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    return text if len(text) <= _TASK else text[: _TASK - 1] + "…"


class Scale(NamedTuple):
    """Differences as places in a picture, in the units of its width.

    Attributes:
        zero: Where nothing differs.
        low: Where the interval begins.
        high: Where it ends.
        mean: Where the mean difference lies.
        dots: Where the tasks lie, and how many at each place.
        least: What the left end stands for.
        most: What the right end stands for.
    """

    zero: float
    low: float
    high: float
    mean: float
    dots: list[tuple[float, int]]
    least: float
    most: float

    @classmethod
    def of(cls, found: "Comparison") -> "Scale":
        """The places of a comparison's differences, 20 to 700."""
        held = [pair.difference for pair in found.pairs]
        least, most = min(0.0, found.low, *held), max(0.0, found.high, *held)
        if least == most:
            least, most = least - 1, most + 1

        def place(value: float) -> float:
            return round(20 + 680 * (value / 2 - least / 2) / (most / 2 - least / 2), 1)

        counts: dict[float, int] = {}
        for each in held:
            at = round(place(each) / 4) * 4
            counts[at] = counts.get(at, 0) + 1
        return cls(
            place(0.0), place(found.low), place(found.high), place(found.difference),
            sorted(counts.items()), least, most,
        )  # fmt: skip


def _by_version(aliases: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for alias, version in sorted(aliases.items(), key=_live_first):
        found.setdefault(version, []).append(alias)
    return found


def _live_first(item: tuple[str, int]) -> tuple[bool, str]:
    return item[0] != "live", item[0]


def _parse_version(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 10 else text


def _open_resources(store: Store, what: str) -> "Resources":
    from lightning_otel.resources import Resources

    return Resources(required(store, what))


async def resources(request: Request) -> Response:
    """The list."""
    number = page.integer(request, "page", 1, 1, 1_000_000)
    return await page.answer(
        request, "resources.html", lambda store: names(store, number), title="Resources"
    )


async def resource(request: Request) -> Response:
    """One of them."""
    name = request.path_params["name"]
    number = page.integer(request, "page", 1, 1, 1_000_000)
    return await page.answer(request, "resource.html", lambda store: read(store, name, number))


async def using(request: Request) -> Response:
    """Show the use of versions, as a part or a page of its own: it reads all steps."""
    name = request.path_params["name"]
    return await page.answer(
        request, "resource_uses.html", lambda store: used(store, name), is_long=True
    )


async def diff(request: Request) -> Response:
    """Two versions of one."""
    name = request.path_params["name"]
    a, b = page.text(request, "a"), page.text(request, "b")
    is_whole = page.choice(request, "lines", ("near", "all")) == "all"
    is_paired = page.choice(request, "of", ("paired", "all")) == "paired"

    def work(store: Store) -> Mapping[str, object]:
        return difference(store, name, a, b, is_whole=is_whole, is_paired=is_paired)

    return await page.answer(request, "resource_diff.html", work)


ROUTES: Final[list[Route]] = [
    Route("/resources", resources, methods=["GET"]),
    Route("/resources/{name:path}@uses", using, methods=["GET"]),
    Route("/resources/{name:path}@diff", diff, methods=["GET"]),
    Route("/resources/{name:path}", resource, methods=["GET"]),
]

"""Resources: their versions, who is given which, what each earned, what changed, what is live."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.rewards.totals import read_rollout_rewards
from lightning_otel.serve.bodies import form
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.text_diff import compare_lines, fold_lines
from lightning_otel.serve.viewer.transitions import cut
from lightning_otel.serve.viewer.urls import page_path
from lightning_otel.store.reader import Reader
from lightning_otel.store.table import Query
from lightning_otel.views.messages import show_value
from lightning_otel.views.nouns import describe_resource, parse_version
from lightning_otel.views.plot.curves import mean_of, share, standard_error, widened
from lightning_otel.views.previews import task_words

if TYPE_CHECKING:
    from lightning_otel.resources import Resources
    from lightning_otel.resources.comparison import Comparison

_LINES: Final = 5000
"""Lines of two versions together that are compared."""
_TASK: Final = 160
_TASKS: Final = """
SELECT rollout_id, any_value(task) AS task FROM rollouts
WHERE rollout_id IN (SELECT unnest(?)) GROUP BY 1
"""


async def resources(request: Request) -> Response:
    """The list."""
    repositories = request.app.state.repositories

    def read(_: Store) -> Mapping[str, object]:
        names = repositories.resources.names() if repositories.is_made else []
        part = page.show_part(request, names)
        rows = [describe_resource(repositories.resources, name) for name in part["rows"]]
        return {**part, "rows": rows}

    return await page.answer(request, "resources.html", read, title="Resources")


async def resource(request: Request) -> Response:
    """One resource: a page of its versions, the newest first."""
    name = request.path_params["name"]

    def read(_: Store) -> Mapping[str, object]:
        opened = open_resources(request)
        last_move = opened.last_move(name)  # first: a form refuses what moves from now on
        versions = opened.versions(name)[::-1]
        aliases = dict(sorted(opened.aliases(name).items(), key=_live_first))
        part = page.show_part(request, versions)
        texts = {row.version: show_value("\n".join(_lines_of(row))) for row in part["rows"]}
        live = next((row for row in versions if row.version == aliases.get("live")), None)
        return {
            "title": name,
            "name": name,
            "kind": versions[0].kind,
            **part,
            "aliases": aliases,
            "last_move": last_move,
            "by_version": _group_aliases(aliases),
            "share": opened.canary_weight(name),
            "previous": opened.previous(name),
            "withdrawn": opened.withdrawn(name),
            "numbers": [version.version for version in versions],
            "live": live,
            "live_text": show_value("\n".join(_lines_of(live))) if live else None,
            "text": texts,
        }

    return await page.answer(request, "resource.html", read)


_USES: Final = """
SELECT steps.agent, steps.resources::VARCHAR AS resources, max(steps.start_ns) AS last_ns
FROM steps JOIN rollouts USING (rollout_id, attempt_id) WHERE rollouts.status <> 'incomplete'
GROUP BY 1, 2"""
"""Who acted with which resources, and when last."""


async def using(request: Request) -> Response:
    """Show the use of versions, as a part or a page of its own: it reads all steps."""
    name = request.path_params["name"]

    def read(store: Store) -> Mapping[str, object]:
        versions = open_resources(request).versions(name)
        uses = count_uses(name, store.source.connect_overview())
        rows = [uses[version.version] for version in versions[::-1] if version.version in uses]
        return {
            "title": f"Usage of {name}",
            "name": name,
            "rows": rows[: page.ROWS],
            "total": len(rows),
            "never": len(versions) - len(rows),
        }

    return await page.answer(request, "resource_uses.html", read, is_long=True)


def count_uses(name: str, con: Reader) -> dict[int, dict[str, Any]]:
    """Count the use of each version; a rollout made with several counts for none.

    ``con`` is one of ``SpanSource.connect_overview``.
    """
    from lightning_otel.resources.comparison import read_last_attempts, read_version

    uses: dict[int, dict[str, Any]] = {}
    for row in Query(con, _USES).dicts():
        version = read_version(name, row["agent"], row["resources"])
        if version is not None:
            new = {"version": version, "rollouts": 0, "rewards": [], "agents": set(), "last_ns": 0}
            use = uses.setdefault(version, new)
            use["agents"].add(row["agent"])
            use["last_ns"] = max(use["last_ns"], row["last_ns"])
    rewards = read_rollout_rewards(con)
    for attempt in read_last_attempts(name, con):
        if attempt.version is not None:
            use = uses[attempt.version]
            use["rollouts"] += 1
            use["rewards"] += [rewards[attempt.rollout_id]] if attempt.rollout_id in rewards else []
    for use in uses.values():
        earned = use["rewards"]
        use["mean"], use["error"] = mean_of(earned) if earned else None, standard_error(earned)
    return uses


async def diff(request: Request) -> Response:
    """Two versions beside each other, and what rewards say of them.

    The first is by default what is live, the second the canary, else the newest.
    """
    name = request.path_params["name"]
    a, b = page.text(request, "a"), page.text(request, "b")
    is_whole = page.choice(request, "lines", ("near", "all")) == "all"
    is_paired = page.choice(request, "of", ("paired", "all")) == "paired"

    def read(store: Store) -> Mapping[str, object]:
        opened = open_resources(request)
        last_move = opened.last_move(name)
        versions, aliases = opened.versions(name), opened.aliases(name)
        first = opened.get(
            name, parse_version(a) if a else aliases.get("live", versions[0].version)
        )
        second = opened.get(
            name, parse_version(b) if b else aliases.get("canary", versions[-1].version)
        )
        of_a, of_b = _lines_of(first), _lines_of(second)
        left_out = max(0, len(of_a) + len(of_b) - _LINES)
        if left_out:
            of_a, of_b = of_a[: _LINES // 2], of_b[: _LINES // 2]
        lines = compare_lines(of_a, of_b)
        comparison, refusal = None, ""
        try:
            comparison = opened.compare(
                name, first.version, second.version, store, is_paired=None if is_paired else False
            )
        except ConfigError as exc:
            refusal = str(exc)
        return {
            "title": f"{name}@{first.version} and @{second.version}",
            "name": name,
            "a": first,
            "b": second,
            "numbers": [version.version for version in versions][::-1],
            "last_move": last_move,
            "by_version": _group_aliases(aliases),
            "lines": lines if is_whole else fold_lines(lines),
            "left_out": left_out,
            "is_whole": is_whole,
            "is_paired": is_paired,
            "is_same": of_a == of_b and not left_out,
            "comparison": comparison,
            "refusal": refusal,
            **(_pick_pairs(store, comparison) if comparison else {"pairs": (), "scale": None}),
        }

    return await page.answer(request, "resource_diff.html", read)


def _pick_pairs(store: Store, comparison: "Comparison") -> Mapping[str, object]:
    pairs = sorted(comparison.pairs, key=lambda pair: pair.difference)
    sample = pairs
    if len(pairs) > page.ROWS:
        sample = [*pairs[: page.ROWS // 2], *pairs[-(page.ROWS // 2) :]]
    ids = [pair.rollouts_b[0] for pair in sample]
    tasks = {row["rollout_id"]: row["task"] for row in store.sql(_TASKS, [ids])} if ids else {}
    return {
        "pairs": [(pair, cut(task_words(tasks.get(pair.rollouts_b[0])), _TASK)) for pair in sample],
        "pairs_total": len(pairs),
        "scale": _make_scale(comparison),
    }


def _make_scale(comparison: "Comparison") -> Mapping[str, object]:
    """Return differences as places in a picture, 20 to 700: dots are tasks, with how many each."""
    differences = [pair.difference for pair in comparison.pairs]
    low, high = comparison.low, comparison.high
    least, most = widened(min(0.0, low, *differences), max(0.0, high, *differences))

    def place(value: float) -> float:
        return round(20 + 680 * share(value, least, most), 1)

    counts: dict[float, int] = {}
    for difference in differences:
        at = round(place(difference) / 4) * 4
        counts[at] = counts.get(at, 0) + 1
    marks = {"zero": 0.0, "low": low, "high": high, "mean": comparison.difference}
    places = {name: place(value) for name, value in marks.items()}
    return {**places, "dots": sorted(counts.items()), "least": least, "most": most}


async def change_aliases(request: Request) -> Response:
    """Do what a form asks for, and show the resource."""
    name = request.path_params["name"]
    fields = await form(request)
    await page.run(request, lambda _: _move_aliases(open_resources(request), name, fields))
    return page.see(page_path("resources", name))


def _move_aliases(opened: "Resources", name: str, fields: Mapping[str, str]) -> None:
    act, text = fields.get("act", ""), fields.get("last_move", "")
    last_move = int(text) if text.isdecimal() and len(text) < 19 else -1  # -1: never a move
    if act == "promote":
        opened.promote(name, last_move=last_move)
    elif act == "rollback":
        opened.rollback(name, last_move=last_move)
    elif act == "alias":
        alias, weight = fields.get("alias", "").strip(), fields.get("weight", "").strip()
        version = fields.get("version", "").strip()
        if version != "none" and (not version.isdecimal() or len(version) > 9):
            raise ConfigError(f"version is {version[:40]!r}; name its number, or none")
        share = page.parse_number("weight", weight) if weight else None
        target = None if version == "none" else int(version)
        opened.set_alias(name, alias, target, weight=share, last_move=last_move)
    else:
        raise ConfigError(f"act is {act[:40]!r}; it is one of alias, promote, rollback")


def open_resources(request: Request) -> "Resources":
    """Return the resources that an address is about; there must be a state."""
    name = request.path_params["name"]
    opened: Resources = page.require_state(request, f"resource {name!r}").resources
    return opened


def _lines_of(resource: Any) -> list[str]:
    from lightning_otel.resources.bodies import format_lines

    return format_lines(resource)


def _group_aliases(aliases: Mapping[str, int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for alias, version in sorted(aliases.items(), key=_live_first):
        names.setdefault(version, []).append(alias)
    return names


def _live_first(item: tuple[str, int]) -> tuple[bool, str]:
    return item[0] != "live", item[0]


ROUTES: Final[list[Route]] = [
    Route("/resources", resources, methods=["GET"]),
    Route("/resources/{name:path}@change", change_aliases, methods=["POST"]),
    Route("/resources/{name:path}@uses", using, methods=["GET"]),
    Route("/resources/{name:path}@diff", diff, methods=["GET"]),
    Route("/resources/{name:path}", resource, methods=["GET"]),
]

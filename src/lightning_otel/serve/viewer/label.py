"""Labels: the items of a list, one a screen, each scored by a key; the next comes by itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_otel import config, rewards
from lightning_otel.dataset import Store
from lightning_otel.dataset.selections import list_uses
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewards.feedback import give, make_feedback, reward_from_feedback
from lightning_otel.rewards.labels import describe_author, list_labels
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.steps import Range, list_steps, read_ends, read_threads
from lightning_otel.serve.viewer.traces import LISTS, choose_rollouts
from lightning_otel.serve.viewer.urls import TraceLinks
from lightning_otel.views.messages import show_value
from lightning_otel.views.nouns import word_error
from lightning_otel.views.previews import task_words
from lightning_otel.views.stored_trace import read_trace

ITEMS: Final = 500
"""Items of one sitting; the next ones are a link away."""
STEPS: Final = 20
"""Steps of an item that are shown; its trace has all."""
_STARS: Final = {str(stars): round(reward_from_feedback(rating=stars), 9) for stars in range(1, 6)}


@page.with_form_faults
async def label(request: Request) -> Response:
    """The page: who labels under which names is asked for once, and then an item is shown."""
    find = choose_rollouts(request, ("names", "author", "item"), ITEMS)
    names = _read_words(request, "names", "name", 9)
    author = "".join(_read_words(request, "author", "author", 1))
    of = page.choice(request, "of", tuple(LISTS))
    fields = {"of": of, "filters": LISTS[of].filters, "names": names, "author": author}

    def read(store: Store) -> Mapping[str, object]:
        items, is_more = find(store)
        content = {"items": items, "is_more": is_more, "sitting": None, "item": None, **fields}
        if page.faults_of(request) or not (items and names and author):
            return content
        asked = request.query_params.get("item")
        return {**content, **_read_sitting(store, items, names, author, asked)}

    return await page.answer(request, "label.html", read, title="Label")


def _read_words(request: Request, field: str, key: str, most: int) -> list[str]:
    texts = page.text(request, field).split(",")
    words = list(dict.fromkeys(filter(None, map(str.strip, texts))))
    try:
        for word in words:
            describe_author(**{key: word})
        if len(words) > most:
            raise ConfigError(f"{field} has {len(words)} names; write {most} at most")
    except ConfigError as exc:
        page.refuse_field(request, field, str(exc))
    return words


def _read_sitting(
    store: Store, items: Sequence[str], names: Sequence[str], author: str, item: str | None
) -> Mapping[str, object]:
    """Read the item that is asked for, else the first that its person has not labelled."""
    own: dict[str, set[str]] = {}
    for each in list_labels(store, items):
        if each["author"] == author and each["name"] in names:
            own.setdefault(each["rollout_id"], set()).add(each["name"])
    done = [rollout_id for rollout_id in items if len(own.get(rollout_id, ())) == len(names)]
    if item not in items:
        item = next((each for each in items if each not in set(done)), None)
    sitting = {"items": items, "names": names, "author": author, "done": done}
    if item is None:
        return {"sitting": sitting, "position": len(items), "done": done}
    missing = [name for name in names if name not in own.get(item, ())]
    position = items.index(item)
    following = items[position + 1] if position + 1 < len(items) else None
    return {
        "sitting": sitting,
        "position": position,
        "done": done,
        "name": (missing or names)[0],
        "following": item if len(missing) > 1 else following,
        "stars": _STARS,
        **read_item(store, item),
    }


async def part(request: Request) -> Response:
    """One item, as the page shows it."""
    rollout_id = request.query_params.get("rollout", "")
    return await page.answer(
        request, "label_item.html", lambda store: read_item(store, rollout_id), title="Item"
    )


def read_item(store: Store, rollout_id: str) -> Mapping[str, object]:
    """Read a rollout as its judge needs it: what was asked, answered and done, and its labels.

    Raises:
        NotFoundError: There is none.
    """
    attempts = store.sql(
        "SELECT * FROM rollouts WHERE rollout_id = ? ORDER BY start_ns", [rollout_id]
    ).rows()
    if not attempts:
        raise NotFoundError(f"there is no rollout {rollout_id!r}; look for it among all of them")
    task = next((row["task"] for row in attempts if row["task"] is not None), None)
    content: dict[str, object] = {
        "item": rollout_id,
        "attempt": attempts[-1],
        "error": word_error(attempts[-1]),
        "task": None if task is None else show_value(task_words(task)),
        "labels": list_labels(store, [rollout_id]),
        "trace": None,
    }
    if not page.select_small(store, [rollout_id]):
        return content
    trace = read_trace(store, "rollout", rollout_id)
    asked, answered = read_ends(store, trace, trace.rows)
    steps = Range.of(len(list_steps(trace)), STEPS, 0, "step")
    homes = {row.span.span_id: row.span.trace_id for row in trace.rows}
    return content | {
        "trace": trace.rows[0].span.trace_id,
        "asked": asked,
        "answered": answered,
        "steps": steps,
        "talks": read_threads(store, trace, steps),
        "links_of": lambda span_id: TraceLinks.to(homes[span_id]),
    }


async def keep(request: Request) -> Response:
    """Keep a person's score of an item in the place of their earlier one; without one, retract."""
    fields = await form(request)
    missing = [name for name in ("item", "name", "author") if not fields.get(name)]
    if missing:
        raise RefusalError(400, f"{missing[0]} is empty; say what is labelled, as what, by whom")
    if not config.is_enabled():
        raise RefusalError(400, "recording is switched off; nothing was kept")
    item, name, author = (fields[key] for key in ("item", "name", "author"))
    number = fields.get("reward", "")
    reward = page.parse_number("reward", number) if number else None
    if reward is not None and not -1 <= reward <= 1:
        raise RefusalError(400, f"reward is {reward:g}; it is a number from -1 to 1")
    take = request.app.state.ingester.keep

    def work(store: Store) -> tuple[bool, list[str]]:
        own = (name, author, None)
        earlier = [
            row for row in list_labels(store, [item])
            if (row["name"], row["author"], row["link_value"]) == own
        ]  # fmt: skip
        notes = [text for row in earlier for text in _word_uses(store, row)]
        if reward is None:
            for row in earlier:
                rewards.retract(store, row["span_id"], take)
            return True, notes
        feedback = make_feedback("rollout", item, reward=reward, name=name, author=author)
        return give(store, [feedback], take) != [None], notes

    is_kept, notes = await page.run(request, work)
    if not is_kept:
        raise RefusalError(404, f"there is no rollout {item!r} in the store; see the list")
    if not page.is_for_people(request):
        return JSONResponse({"item": item, "name": name, "reward": reward, "notes": notes})
    following = item if reward is None else fields.get("following")
    return page.see(page.url(request, item=following or None))


def _word_uses(store: Store, row: Mapping[str, Any]) -> Iterator[str]:
    """Say which data sets hold a label that is taken back, and where they were exported to."""
    for version, paths in list_uses(store, row["rollout_id"], row["name"], row["start_ns"]).items():
        files = f", exported to {', '.join(paths)}" if paths else ""
        yield f"The earlier label stays in {version}{files}; save the selection again."


ROUTES: Final[list[Route]] = [
    Route("/label", label, methods=["GET"]),
    Route("/label", keep, methods=["POST"]),
    Route("/label/item", part, methods=["GET"]),
]

"""Conversations: what was said in them and what it earned, and a form for what people think."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel import config
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.messages import ShownMessage, show_thread
from lightning_otel.serve.viewer.size_limit import TOO_LARGE, select_small
from lightning_otel.serve.viewer.spans import keep_feedback
from lightning_otel.serve.viewer.urls import Links, page_path
from lightning_otel.types import Trajectory, Transition
from lightning_otel.views.nouns import CONVERSATIONS, TALKS

ROLLOUTS: Final = 20
"""Rollouts of one conversation on a page, the first ones first."""
MESSAGES: Final = 200
"""Messages of one agent's branch that are shown, the last ones; the rest is in the trace."""
_REWARDS: Final = 100

_ONE: Final = f"""
SELECT rollout_id, start_ns, end_ns, agents, trace_id, count(*) OVER () AS total
FROM ({TALKS}) WHERE coalesce(named, rollout_id) = ? ORDER BY start_ns LIMIT {ROLLOUTS} OFFSET ?
"""
_ALL_REWARDS: Final = f"""
SELECT rollout_id, name, value, start_ns, trace_id, span_id, count(*) OVER () AS total FROM rewards
WHERE rollout_id IN (SELECT unnest(?)) ORDER BY start_ns LIMIT {_REWARDS}
"""


def _read_conversation(store: Store, conversation_id: str, number: int) -> Mapping[str, object]:
    """One conversation, or the rollout that is one by itself: a page of its rollouts."""
    rows = store.sql(_ONE, [conversation_id, (number - 1) * ROLLOUTS]).rows()
    if not rows:
        raise NotFoundError(
            f"there is no conversation {conversation_id!r} with a page {number}; look for it among "
            "all of them"
        )
    ids = [row["rollout_id"] for row in rows]
    read_ids = select_small(store, ids)
    paths: dict[str, list[Trajectory]] = {each: [] for each in ids}
    if read_ids:
        for made in store.adapt(rollout_id=read_ids, include_incomplete=True):
            for path in made.trajectories:
                paths[path.rollout_id].append(path)
    before: Transition | None = None
    for row in rows:
        own = paths[row["rollout_id"]]
        row |= {"talks": _show_threads(own, before), "is_heavy": row["rollout_id"] not in read_ids}
        before = own[-1].transitions[-1] if own else before
    answers = [
        (f"span:{said.span_id}", f"answer {said.label}: {_word_answer(said)}")
        for row in rows
        for shown in row["talks"]
        for said, _ in shown["messages"]
        if said.label
    ]
    rewards = store.sql(_ALL_REWARDS, [ids]).rows()
    rollouts = [(f"rollout:{each}", f"rollout {each}") for each in ids[::-1]]
    return {
        "title": f"Conversation {conversation_id}",
        "heavy": TOO_LARGE,
        "id": conversation_id,
        "said": rows,
        "total": rows[0]["total"],
        "size": ROLLOUTS,
        "number": number,
        "rewards": rewards,
        "rewards_total": rewards[0]["total"] if rewards else 0,
        # Of feedback: a rollout, the last one first, or one answer.
        "targets": [*rollouts, *answers[::-1]],
        "feedback_id": f"viewer-{secrets.token_hex(8)}",
    }


def _show_threads(paths: Sequence[Trajectory], before: Transition | None) -> list[dict[str, Any]]:
    steps = [step for path in paths for step in path.transitions]
    labels = {step.span_id: f"#{step.step}" for step in steps}
    links = {step.span_id: Links.to(step.trace_id) for step in steps}
    found: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for path in paths:
        talk = show_thread(path, labels, before, seen)
        before = None
        if talk.messages:
            hidden = max(0, len(talk.messages) - MESSAGES)
            messages = [(each, links[each.span_id]) for each in talk.messages[hidden:]]
            found.append({"talk": talk, "messages": messages, "hidden": hidden})
    return found


def _word_answer(answer: ShownMessage) -> str:
    return next((part.text[:40] for part in answer.parts if part.text), "…")


@page.with_form_faults
async def conversations(request: Request) -> Response:
    """The list."""
    return await page.answer_list(
        request, "conversations.html", CONVERSATIONS, title="Conversations"
    )


async def conversation(request: Request) -> Response:
    """One of them."""
    given_id = request.path_params["conversation_id"]
    number = page.integer(request, "page", 1, 1, 1_000_000)
    return await page.answer(
        request,
        "conversation.html",
        lambda store: _read_conversation(store, given_id, number),
    )


async def feedback(request: Request) -> Response:
    """Keep what somebody said of a conversation, once."""
    conversation_id = request.path_params["conversation_id"]
    fields = await form(request)
    noun, _, target = fields.get("target", "").partition(":")
    if noun not in ("rollout", "span") or not target:
        raise RefusalError(400, "target says what is judged; choose a rollout or an answer")
    if not config.is_enabled():
        raise RefusalError(400, "recording is switched off; nothing was kept")
    await keep_feedback(request, "rollout" if noun == "rollout" else "span", target, fields)
    return page.see(page_path("conversations", conversation_id) + "?said=1")


ROUTES: Final[list[Route]] = [
    Route("/conversations", conversations, methods=["GET"]),
    Route("/conversations/{conversation_id:path}/feedback", feedback, methods=["POST"]),
    Route("/conversations/{conversation_id:path}", conversation, methods=["GET"]),
]

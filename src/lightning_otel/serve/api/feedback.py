"""Feedback by HTTP: one reward for what somebody said, whether or not what it judges is there."""

import secrets
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, get_args

from opentelemetry.util.types import AttributeValue
from pydantic import Field, StringConstraints
from starlette.requests import Request

from lightning_otel import rewards
from lightning_otel.errors import ConfigError
from lightning_otel.rewards.feedback import Conflict, Feedback, Noun, make_feedback
from lightning_otel.serve.api.operation import RequestModel, ResponseModel, operation, write_json
from lightning_otel.serve.responses import RefusalError
from lightning_otel.types import conventions as c

_MOST_METADATA: Final = 16_384
_WITH_KEY: Final = "http+token"
_PARTS: Final = ("quality_score", "rating", "satisfied", "used_result")

Id = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
TraceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{32}$", to_lower=True)]
SpanId = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{16}$", to_lower=True)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]


class FeedbackBody(RequestModel):
    """Feedback on a rollout, span or response."""

    response_id: Id | None = None
    """The model response it judges, such as `chatcmpl-…`."""
    rollout_id: Id | None = None
    """The rollout it judges."""
    conversation_id: Id | None = None
    """The conversation it judges, by its latest call when this was said."""
    trace_id: TraceId | None = None
    """The trace it judges."""
    span_id: SpanId | None = None
    """The span it judges."""
    task_id: Id | None = None
    """Kept with it; the rollout it judges where nothing else is named."""
    name: Name | None = None
    """The reward's name; without, `feedback`."""
    author: Name | None = None
    """Who gives it (needs the key): it takes the place of their earlier one of that name."""
    feedback_id: Key | None = None
    """An id of the sender's: feedback is kept once, however often it is sent."""
    reward: Annotated[float, Field(ge=-1, le=1)] | None = None
    """The reward itself; without, it is made of the next four."""
    quality_score: Annotated[float, Field(ge=0, le=100)] | None = None
    rating: Annotated[float, Field(ge=0, le=5)] | None = None
    """Stars."""
    satisfied: bool | None = None
    used_result: bool | None = None
    text: Annotated[str, Field(max_length=20_000)] | None = None
    """What they wrote."""
    feedback_text: Annotated[str, Field(max_length=20_000)] | None = None
    """Another name for `text`."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept with it; `quality_score`, `rating`, `satisfied` and `used_result` may stand here."""


class FeedbackResponse(ResponseModel):
    """The reward that feedback became, or its wait for its target."""

    status: Literal["kept", "pending"]
    """`pending`: what it judges is not there yet; it waits on disk, and is no reward until then."""
    feedback_id: str
    reward: float
    judges: Noun
    target: str
    rollout_id: str | None = None
    """The rollout it was given to."""
    span_id: str | None = None
    """The reward's span."""
    is_new: bool | None = None
    """Whether it was not kept before; null while it waits."""


@operation(
    "POST",
    "/v1/feedback",
    {
        200: "It was given to what it judges.",
        202: "What it judges is not there yet: it waits, on disk.",
        409: "Its id was given to other feedback before.",
    },
    is_open=True,
)
def feedback(request: Request, params: FeedbackBody) -> tuple[FeedbackResponse, int]:
    """Give the reward that feedback comes to."""
    state = request.app.state
    sender = _name_sender(request)
    if params.author is not None and not sender.startswith(_WITH_KEY):
        raise RefusalError(401, "feedback in somebody's name needs the key; send it, or no author")
    feedback_piece = _parse_feedback(params, sender)
    rollouts = state.rollout_by_span if params.feedback_id is None else {}
    answer = state.repositories.pending.give(
        state.store, feedback_piece, state.ingester.keep, rollouts
    )
    if isinstance(answer, Conflict):
        raise RefusalError(409, f"{answer.reason}; give an id of its own to what was said later")
    response = FeedbackResponse(
        status="kept" if answer is not None else "pending",
        feedback_id=feedback_piece.feedback_id,
        reward=feedback_piece.value,
        judges=feedback_piece.noun,
        target=feedback_piece.target,
        **(answer._asdict() if answer is not None else {}),
    )
    return response, 200 if answer is not None else 202


same_feedback: Final = replace(
    feedback, path="/feedback", description="Give feedback; the same as `/v1/feedback`."
)


class RetractionBody(RequestModel):
    """A reward that shall not count any more."""

    span_id: SpanId
    """Its span, as the answer to `/v1/feedback` told it."""


class RetractionResponse(ResponseModel):
    """The reward that was retracted."""

    span_id: str
    rollout_id: str
    name: str
    value: float


@operation("POST", "/v1/feedback/retract", {404: "No reward that counts has this span."})
def retract_reward(request: Request, params: RetractionBody) -> RetractionResponse:
    """Retract a reward; it stays stored, and counts no more."""
    store, keep = request.app.state.store, request.app.state.ingester.keep
    row = rewards.retract(store, params.span_id, keep, received=_name_sender(request))
    return RetractionResponse(**row)


def _name_sender(request: Request) -> str:
    peer = request.client.host if request.client else ""
    return f"{_WITH_KEY if request.app.state.access.admits(request) else 'http'}:{peer}"


def _parse_feedback(params: FeedbackBody, came: str) -> Feedback:
    targets: dict[Noun, str | None] = {
        noun: getattr(params, f"{noun}_id") for noun in get_args(Noun)
    }
    choices = [(noun, target) for noun, target in targets.items() if target is not None]
    if len(choices) > 1:
        nouns = " and ".join(f"{noun}_id" for noun, _ in choices)
        raise RefusalError(400, f"feedback judges one thing, and {nouns} are named; name one")
    if not choices and params.task_id is None:
        raise RefusalError(
            400,
            "feedback names nothing that it judges; give response_id, rollout_id, "
            "conversation_id, trace_id or span_id",
        )
    noun, target = choices[0] if choices else ("rollout", str(params.task_id))
    parts = {name: _read_field(params, name) for name in _PARTS}
    try:
        feedback_piece = make_feedback(
            noun,
            target,
            feedback_id=params.feedback_id or f"feedback-{secrets.token_hex(12)}",
            text=params.text if params.text is not None else params.feedback_text,
            reward=params.reward,
            name=params.name,
            author=params.author,
            **parts,
        )
    except ConfigError as exc:
        raise RefusalError(
            400, str(exc).replace("give quality_score", "give reward, quality_score")
        ) from exc
    attributes: dict[str, AttributeValue] = {**feedback_piece.attributes, c.RECEIVED: came}
    if params.metadata:
        attributes[c.FEEDBACK_METADATA] = write_json(params.metadata, "metadata", _MOST_METADATA)
    if params.task_id is not None:
        attributes[c.TASK_ID] = params.task_id
    return replace(feedback_piece, attributes=attributes)


def _read_field(params: FeedbackBody, name: str) -> Any:
    value, within = getattr(params, name), params.metadata.get(name)
    if value is not None and within is not None and value != within:
        raise RefusalError(400, f"{name} and metadata.{name} differ; send one")
    return value if value is not None else within

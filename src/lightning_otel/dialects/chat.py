"""The wire format of chat completions, and what the other dialects of OpenAI share with it.

Source: OpenAI's API reference; vLLM's ``return_token_ids``: prompt ids at the top level (in a
stream on its first chunk) or, as SGLang has them, on each choice; sampled ids on each choice.
"""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from lightning_otel import messages
from lightning_otel.adapter.tokens import add_encoded, encode_ids, sampled_ids, token_content
from lightning_otel.dialects.dialect import Attributes, Dialect, Json, add_tools, dump, pick_texts
from lightning_otel.dialects.pieces import join_calls, join_pieces
from lightning_otel.dialects.prompts import LIMITS, replace_prompt
from lightning_otel.errors import ConfigError
from lightning_otel.messages import (
    object_of,
    objects,
    raw_call_part,
    read_settings,
    token_counts,
)
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

_RESPONSE: Final[Mapping[str, str]] = {
    "id": c.RESPONSE_ID,
    "model": c.RESPONSE_MODEL,
    "system_fingerprint": c.OPENAI_FINGERPRINT,
    "service_tier": c.OPENAI_RESPONSE_TIER,
}
_TOKEN_ID: Final = "token_id:"
_DEPLOYMENT: Final = re.compile(r"/deployments/([^/?#]+)/")

_FIRST: Final = frozenset({"id", "model", "system_fingerprint", "service_tier", "prompt_token_ids"})
"""Fields of a stream's events of which the first value counts."""
_LAST: Final = frozenset({"usage", "error"})
_GROWING: Final = frozenset({"text", "logprobs", "token_ids"})


class Chat(Dialect):
    """``/chat/completions``; the other endpoints say where they differ.

    Attributes:
        api: The API's name there, where it has one.
        token_limit: The API's name for the limit of tokens, where it has but one.
    """

    provider = "openai"
    end_marks = frozenset({"[DONE]"})
    api = "chat_completions"
    token_limit = ""

    def model_of(self, body: Json, path: str) -> str | None:
        """Return the model that a request names, in its body or as Azure's deployment."""
        deployment = _DEPLOYMENT.search(path)
        model = super().model_of(body, path)
        return unquote(deployment[1]) if model is None and deployment else model

    def request_attributes(self, body: Json) -> Attributes:
        """Sampling parameters and the like, where they have the type the conventions name."""
        attributes: Attributes = {c.OPENAI_API: self.api} if self.api else {}
        attributes.update(read_settings(body))
        choices = body.get("n")
        if isinstance(choices, int) and choices != 1:
            attributes[c.REQUEST_CHOICES] = choices
        tier = body.get("service_tier")
        if isinstance(tier, str) and tier != "auto":
            attributes[c.OPENAI_REQUEST_TIER] = tier
        kind = self.output_format(body).get("type")
        if kind in ("json_object", "json_schema"):
            attributes[c.OUTPUT_TYPE] = "json"
        elif kind == "text":
            attributes[c.OUTPUT_TYPE] = "text"
        return attributes

    def output_format(self, body: Json) -> Json:
        """Return the response format that a request wants."""
        return object_of(body.get("response_format"))

    def request_content(self, body: Json) -> dict[str, str]:
        """Messages and tools of a request."""
        content = {c.INPUT_MESSAGES: self.write_messages(objects(body.get("messages")))}
        return add_tools(content, body.get("tools"))

    def read_message(self, item: Any) -> Mapping[str, Any]:
        """Return a message of a request in the conventions' form."""
        return messages.read_message(item, "", raw_call_part)

    def instruct(self, body: Json, prompt: Prompt, task: object) -> dict[str, Any]:
        """Return the messages with this system prompt, then its examples."""
        items = body.get("messages")
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise ConfigError(f"its messages are {type(items).__name__}; substitution wants a list")
        examples = list(prompt.examples)
        return {"messages": replace_prompt(prompt, items, task, examples, is_needed=True)}

    def sample(self, body: Json, endpoint: Json) -> dict[str, Any]:
        """Return model and sampling of an endpoint, by the names that this API has for them."""
        changes: dict[str, Any] = {}
        for name, value in endpoint.get("sampling", {}).items():
            spelt = self.token_limit or _limit_name(name, body) if name in LIMITS else name
            changes.update(self.spell_setting(spelt, copy.deepcopy(value), body))
        return changes | ({"model": endpoint["model"]} if endpoint.get("model") else {})

    def spell_setting(self, name: str, value: Any, body: Json) -> dict[str, Any]:
        """Return a setting as this API takes it; nothing where it does not."""
        return {name: value}

    def wanted_ids(self, body: Json) -> dict[str, Any]:
        """Return the fields that ask for token ids beside the agent's own."""
        if body.get("logprobs", "top_logprobs" not in body):
            return {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        # The agent does not want logprobs, or asks a wrong question.
        return {"return_token_ids": True}

    def response_attributes(self, body: Json) -> Attributes:
        """Id, model, counts and finish reasons of an answer."""
        attributes = pick_texts(body, _RESPONSE) | token_counts(body.get("usage"))
        reasons = [reason for reason in self.finish_reasons(body) if isinstance(reason, str)]
        if reasons:
            attributes[c.FINISH_REASONS] = reasons
        return attributes

    def finish_reasons(self, body: Json) -> list[object]:
        """Return the finish reason of each choice."""
        return [choice.get("finish_reason") for choice in objects(body.get("choices"))]

    def response_content(self, body: Json) -> dict[str, str]:
        """Messages, token ids and logprobs of an answer."""
        choices = objects(body.get("choices"))
        content = {c.OUTPUT_MESSAGES: dump([self.read_answer(choice) for choice in choices])}
        if not _has_tokens(body) and not any(map(_has_tokens, choices)):
            return content  # as of most calls
        sampled = [self.read_sampled(choice) for choice in choices]
        prompt_ids = body.get("prompt_token_ids") or next(
            (ids for choice in choices if (ids := choice.get("prompt_token_ids"))), None
        )
        content |= token_content(
            prompt_ids,
            sampled_ids(body, [choice.get("token_ids") for choice in choices]),
            [logprobs for _, logprobs in sampled],
        )
        token_ids = [_named_ids(tokens) for tokens, _ in sampled]
        if any(token_ids):
            add_encoded(content, c.LOGPROB_TOKEN_IDS, encode_ids, token_ids)
        return content

    def read_answer(self, choice: Json) -> dict[str, Any]:
        """Return the message of a choice."""
        reason, answer = choice.get("finish_reason"), object_of(choice.get("message"))
        return messages.read_message(answer, "assistant", raw_call_part, finish_reason=reason)

    def read_sampled(self, choice: Json) -> tuple[list[Any], list[Any]]:
        """Return the sampled tokens of a choice and their logprobs."""
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return [], []
        tokens = objects(logprobs.get("content")) + objects(logprobs.get("refusal"))
        return [token.get("token") for token in tokens], [token.get("logprob") for token in tokens]

    def is_complete(self, events: Sequence[Json]) -> bool:
        """Return whether a stream ended, or every choice has its finish reason."""
        if any(event.get("done") for event in events[-1:]):
            return True
        finished: dict[int, bool] = {}
        for event in events:
            for choice in objects(event.get("choices")):
                index = _index_of(choice)
                finished[index] = finished.get(index, False) or bool(choice.get("finish_reason"))
        return bool(finished) and all(finished.values())

    def assemble(self, events: Sequence[Json]) -> Json:
        """The whole answer that a stream's events add up to."""
        whole: dict[str, Any] = {}
        present = frozenset(itertools.chain.from_iterable(events))
        for name in _FIRST & present:
            whole[name] = next((value for event in events if (value := event.get(name))), None)
        for name in _LAST & present:
            latest = reversed(events)
            whole[name] = next((value for event in latest if (value := event.get(name))), None)
        chunks: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            for chunk in objects(event.get("choices")):
                chunks.setdefault(_index_of(chunk), []).append(chunk)
        whole["choices"] = [self.join_choice(chunks[index]) for index in sorted(chunks)]
        return whole

    def join_choice(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the choice that its chunks add up to."""
        deltas = [object_of(chunk.get("delta")) for chunk in chunks]
        names = frozenset(itertools.chain.from_iterable(deltas))
        spoken = join_pieces(deltas, names - {"role", "tool_calls"})
        calls: list[Any] = []
        if "tool_calls" in names:
            calls = [call for delta in deltas for call in objects(delta.get("tool_calls"))]
        whole = join_pieces(chunks, _GROWING)
        return {**whole, "message": {**spoken, "tool_calls": join_calls(calls)}}


def _limit_name(name: str, body: Json) -> str:
    """Return the agent's own name for the token limit, since two are refused."""
    limit = next((limit for limit in LIMITS[:2] if limit in body), None)
    return limit or (name if name in LIMITS[:2] else LIMITS[0])


def _has_tokens(holder: Json) -> bool:
    get = holder.get
    return bool(get("logprobs") or get("token_ids") or get("prompt_token_ids")) or bool(
        get("response_token_ids")
    )


def _index_of(choice: Json) -> int:
    """A choice's number; servers with only one may leave it out."""
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def _named_ids(tokens: Sequence[object]) -> list[int]:
    """The ids that tokens written ``token_id:N`` name; empty unless all are.

    Source: vLLM's ``return_tokens_as_token_ids``.
    """
    texts = [text for text in tokens if type(text) is str and text.startswith(_TOKEN_ID)]
    if not texts or len(texts) < len(tokens):
        return []
    try:
        return [int(text[len(_TOKEN_ID) :]) for text in texts]
    except ValueError:
        return []

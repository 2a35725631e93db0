"""The demo's toy model: tokenizer, chat template and trainable policy."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning_otel.demo.requests import example, message_text, requested_calls, requested_speaker

_PIECE = re.compile(r"\s*\S+|\s+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

STYLES = ("copy", "guess", "round")
_ANSWER = "The answer is {}"


def pieces(text: str) -> list[str]:
    """Word-sized parts of a text, leading blanks included; joined they are the text again."""
    return _PIECE.findall(text)


class PieceTokenizer:
    """A reversible tokenizer whose vocabulary grows with each new piece it sees."""

    def __init__(self) -> None:
        # Guards: a piece has one id, and that id is its position in _pieces.
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; `decode` gives exactly that text back."""
        return self.encode_pieces(pieces(text))

    def encode_pieces(self, parts: Iterable[str]) -> list[int]:
        """Token ids of pieces already cut, one id for each."""
        with self._lock:
            return [self._id_of(part) for part in parts]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids that this tokenizer gave.

        Raises:
            IndexError: An id is beyond the vocabulary seen so far.
        """
        with self._lock:
            return "".join(self._pieces[token_id] for token_id in token_ids)

    def texts(self, content: str | Sequence[str | int | Sequence[int]]) -> list[str]:
        """The texts of an API's `input` or `prompt`: one or many, each text or token ids."""
        if isinstance(content, str):
            return [content]
        token_ids = [part for part in content if isinstance(part, int)]
        if token_ids:
            return [self.decode(token_ids)]
        return [
            part if isinstance(part, str) else self.decode(part)
            for part in content
            if not isinstance(part, int)
        ]

    def _id_of(self, piece: str) -> int:
        token_id = self._ids.setdefault(piece, len(self._pieces))
        if token_id == len(self._pieces):
            self._pieces.append(piece)
        return token_id


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function the model wants called."""

    id: str
    name: str
    arguments: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The pieces the model writes for this call: its name, then its arguments."""
        return (f"<tool_call>{self.name}", *pieces(self.arguments))


@dataclass(frozen=True, slots=True)
class Reply:
    """A policy's answer to one request."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    finish_reason: str = "stop"
    """`stop`, `tool_calls` or `length`."""
    logprobs: tuple[float, ...] = ()
    """Natural logarithms, at most 0, one per entry of `tokens`; missing ones count as 0."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The pieces the model wrote, [R]: reasoning, then text, then tool calls."""
        calls = (token for call in self.tool_calls for token in call.tokens)
        return (*pieces(self.reasoning), *pieces(self.text), *calls)


class Policy(Protocol):
    """Anything that can answer an OpenAI chat body."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """The answer to a chat body, every choice drawn from `rng`."""


def prompt_tokens(body: Mapping[str, Any]) -> list[str]:
    """Return pieces of the prompt a chat body stands for, up to where the model goes on writing.

    Each message is cut by itself, so a later turn's prompt starts with the earlier turn's tokens.
    """
    tokens: list[str] = []
    if body.get("tools"):
        tokens += ["<|tools|>", *pieces(json.dumps(body["tools"], sort_keys=True)), "<|end|>"]
    for message in body.get("messages") or ():
        reply = Reply(
            text=message_text(message),
            tool_calls=tuple(
                ToolCall(
                    id=str(call.get("id")),
                    name=str(call["function"]["name"]),
                    arguments=str(call["function"].get("arguments") or ""),
                )
                for call in message.get("tool_calls") or ()
                if call.get("function")
            ),
            reasoning=message.get("reasoning_content") or "",
        )
        tokens += [f"<|{message.get('role')}|>", *reply.tokens, "<|end|>"]
    return [*tokens, "<|assistant|>"]


def shape(reply: Reply, body: Mapping[str, Any]) -> Reply:
    """The reply held to the body's JSON schema and token limit, where it names them."""
    response_format = body.get("response_format") or {}
    if response_format.get("type") == "json_schema" and not reply.tool_calls:
        text = " ".join(map(message_text, body.get("messages") or ()))
        value = example(response_format["json_schema"]["schema"], text)
        reply = Reply(text=json.dumps(value), reasoning=reply.reasoning)
    return _cut_to_length(reply, body.get("max_completion_tokens") or body.get("max_tokens"))


class ToyPolicy:
    """Calls the tools that are asked for, and reports a number in one of three styles.

    Style `copy` tells the tool's number and is right; `guess` is off by one to three; `round` gives
    a neighbouring multiple of ten. A style's probability is the softmax of the weights. Temperature
    and top-p are ignored: the log-probabilities are those the answer was drawn with.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict.fromkeys(STYLES, 0.0)
        self.set_weights(weights or {})

    @property
    def weights(self) -> dict[str, float]:
        """A copy of the preference weight of each style."""
        return dict(self._weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the weights named; the others stay.

        Raises:
            ValueError: A key is not in `STYLES`.
        """
        unknown = sorted(weights.keys() - set(STYLES))
        if unknown:
            raise ValueError(f"no such style: {', '.join(unknown)}; use {', '.join(STYLES)}")
        self._weights = {**self._weights, **weights}

    def logprobs(self) -> dict[str, float]:
        """Log-probability of each style: the log-softmax of the weights."""
        weights = self._weights
        top = max(weights.values())
        total = top + math.log(sum(math.exp(weight - top) for weight in weights.values()))
        return {style: round(weight - total, 6) for style, weight in weights.items()}

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """Calls of the tools that are asked for, a report of what a tool said, or a polite echo."""
        speaker = requested_speaker(body)
        if speaker is not None:
            return _certain_reply(Reply(text=speaker))
        calls = tuple(
            ToolCall(f"call_{rng.getrandbits(96):024x}", name, json.dumps(arguments))
            for name, arguments in requested_calls(body)
        )
        if calls:
            return _certain_reply(Reply(text="", tool_calls=calls, finish_reason="tool_calls"))
        last = (body.get("messages") or [{}])[-1]
        text = message_text(last)
        if last.get("role") == "tool":
            return self._report_result(text, rng)
        return _certain_reply(Reply(text=f"You said: {text}"))

    def _report_result(self, result: str, rng: random.Random) -> Reply:
        numbers = _NUMBER.findall(result)
        if not numbers:
            return _certain_reply(Reply(text=f"The tool said: {result}"))
        logprobs = self.logprobs()
        (style,) = rng.choices(STYLES, [math.exp(logprobs[style]) for style in STYLES])
        text = _ANSWER.format(_word_number(numbers[-1], style))
        limit = len(pieces(text)) - 1
        return Reply(text=text, logprobs=(logprobs[style], *[0.0] * limit))


def style_of(result: str, answer: str) -> str | None:
    """The style in which an answer reports a tool's result; None if none of ours."""
    numbers = _NUMBER.findall(result)
    if not numbers:
        return None
    texts = {_ANSWER.format(_word_number(numbers[-1], style)): style for style in STYLES}
    return texts.get(answer)


def _certain_reply(reply: Reply) -> Reply:
    return replace(reply, logprobs=(0.0,) * len(reply.tokens))


def _word_number(number: str, style: str) -> str:
    if style == "copy":
        return number
    value = math.floor(float(number))
    nearest = round(value / 10) * 10
    rounded = nearest if nearest != float(number) else nearest + 10
    if style == "round":
        return str(rounded)
    # Away from the rounded number: if two styles could write one text, that text's probability
    # would be the sum of both.
    step = 1 + value % 3
    return str(value - step if rounded > float(number) else value + step)


def _cut_to_length(reply: Reply, limit: int | None) -> Reply:
    spare = len(pieces(reply.reasoning))
    length = max(limit or 0, spare)
    if limit is None or reply.tool_calls or len(reply.tokens) <= length:
        return reply
    text = "".join(reply.tokens[spare:length])
    return replace(reply, text=text, finish_reason="length", logprobs=reply.logprobs[:length])

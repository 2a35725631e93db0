"""Conversations by the hashes of their messages: which call continues which, or asks it again.

Neither time nor the tree is known here.
"""

import hashlib
import json
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_otel.messages import RULES
from lightning_otel.types import Call, Message, Transition
from lightning_otel.types.values import parse_json

_MAX_DEPTH: Final = 20
_CALLS: Final = ("tool_call", "tool_call_response")

KnownHistory: TypeAlias = tuple[Sequence[Message], "array[int]"]
"""Messages and their running hashes."""
NO_HISTORY: Final[KnownHistory] = (), array("q")


class History(NamedTuple):
    """One call's part of a conversation.

    ``prefixes`` is a running hash of the observation up to and with each message, [M]; ``left``
    that of the observation with each choice after it: what the call leaves behind.
    """

    prefixes: "array[int]"  # an array, since the garbage collector does not look into it
    left: "array[int]"

    @property
    def given(self) -> int:
        """Running hash of the whole observation; 0 where there is none."""
        return self.prefixes[-1] if self.prefixes else 0


def hash_history(
    observation: Sequence[Message],
    action: Iterable[Message] = (),
    base: KnownHistory = NO_HISTORY,
) -> History:
    """Return the conversation of a call, one step a message.

    ``base`` has messages that it may go on from, the very same objects, with their hashes.
    """
    messages, prefixes = base
    hashes = array("q")
    if len(messages) <= len(observation) and all(map(is_, messages, observation)):
        hashes.extend(prefixes)
    chain = hashes[-1] if hashes else 0
    for message in observation[len(hashes) :]:
        chain = hash((chain, message_key(message)))
        hashes.append(chain)
    return History(hashes, hash_answers(chain, action))


def hash_answers(chain: int, action: Iterable[Message]) -> "array[int]":
    """Return the running hash of an observation, given its own, with each choice after it."""
    return array("q", [hash((chain, message_key(choice))) for choice in action])


def hash_spoken(call: Call) -> History:
    """Return a call's conversation without instructions: those differ between agents."""
    spoken = [item for item in call.observation if item.get("role") not in RULES]
    return hash_history(spoken, call.action)


def is_from_agent(message: Message) -> bool:
    """Return whether the agent or one of its tools said a message."""
    return message.get("role") in ("assistant", "tool")


def is_same(one: Message, other: Message) -> bool:
    """Return whether two messages are one, but for what an answer's repetition leaves out."""
    if one is other:
        return True
    return one.get("role") == other.get("role") and message_key(one) == message_key(other)


def find_choice(
    observation: Sequence[Message], action: Sequence[Message], prompt: Sequence[Message]
) -> int | None:
    """Return which choice of a call a later prompt goes on with, after all that the call was given.

    None where it does not; the rule of :attr:`History.left` for two calls alone.
    """
    size = len(observation)
    if size >= len(prompt):
        return None
    # A history that grows is mostly the very same objects, which takes two fifths of the time.
    if not (all(map(is_, observation, prompt)) or all(map(is_same, observation, prompt))):
        return None
    return next((i for i, choice in enumerate(action) if is_same(choice, prompt[size])), None)


def longest_prefix(prefixes: Sequence[int], hashes: Container[int]) -> int:
    """Return the length of the longest known prefix; 0 if none is known."""
    for length in range(len(prefixes), 0, -1):
        if prefixes[length - 1] in hashes:
            return length
    return 0


def message_key(message: Mapping[str, Any]) -> int:
    """Return a hash of a message but for what an answer has and its repetition lacks."""
    values: list[Any] = []
    try:
        for part in message["parts"]:  # flat parts, as most are, are hashed in C
            kind = part.get("type")
            if kind != "text":
                if kind in _CALLS:
                    values.append(frozenset(_drop_id(part).items()))
                elif kind != "reasoning":
                    values.append(frozenset(part.items()))
            elif part["content"]:
                values.append(part["content"])
        return hash((message.get("role"), *values))
    except (AttributeError, KeyError, TypeError):
        parts = message.get("parts")
        if isinstance(parts, list):
            parts = [
                _drop_id(part) if isinstance(part, dict) else part
                for part in parts
                if not isinstance(part, dict)
                or not (
                    (kind := part.get("type")) == "reasoning"
                    or (kind == "text" and not part.get("content"))
                )
            ]
        return _hash_value([message.get("role"), parts], 0)


def _drop_id(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part without its call's id, which is random; no arguments are an empty object."""
    if part.get("type") not in _CALLS:
        return part
    steady = {name: value for name, value in part.items() if name != "id"}
    if part["type"] == "tool_call":
        steady["arguments"] = parse_json(steady.get("arguments") or {})
    return steady


def state_key(step: Transition) -> str:
    """Return a hash of an agent and its state: messages and tools, else the prompt's token ids."""
    state = [step.agent, list(step.prompt_ids)]
    if step.observation:
        state = [step.agent, _number_calls(step.observation), step.tools]
    text = json.dumps(state, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number_calls(messages: Iterable[Message]) -> list[Any]:
    """Return messages for an identity: calls have numbers for ids, and values for arguments."""
    numbers: dict[object, int] = {}
    steady: list[Any] = []
    for message in messages:
        parts = message.get("parts")
        if isinstance(parts, (list, tuple)):
            numbered = [
                {**_drop_id(part), "number": numbers.setdefault(str(part.get("id")), len(numbers))}
                if isinstance(part, Mapping) and part.get("type") in _CALLS
                else part
                for part in parts
            ]
            message = {**message, "parts": numbered}
        steady.append({name: message[name] for name in message if name != "finish_reason"})
    return steady


def _hash_value(value: object, depth: int) -> int:
    """Hash a JSON value; dumping it to text would cost several times as much."""
    if type(value) is str:
        return hash(value)
    if depth >= _MAX_DEPTH:
        return 0
    if isinstance(value, dict):
        return hash(frozenset([(key, _hash_value(item, depth + 1)) for key, item in value.items()]))
    if isinstance(value, list):
        return hash(tuple([_hash_value(item, depth + 1) for item in value]))
    return hash((type(value).__name__, value))

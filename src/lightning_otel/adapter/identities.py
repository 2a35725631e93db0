"""Who asked: the identity of calls, and what of an earlier conversation a prompt repeats.

Neither time nor the tree is known here.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from lightning_otel.adapter.attributes import get_integer
from lightning_otel.adapter.histories import History, is_from_agent, message_key
from lightning_otel.messages import RULES, plain_text
from lightning_otel.types import Call, Message
from lightning_otel.types import conventions as c

NONE: Final = -1
"""Stands for no call, where calls are told by their index."""
_MOST_ALIKE: Final = 16
"""How many conversations in which the same was said are looked at for one."""
_LATEST: Final = 16
"""How many answers are looked at for a summary that a prompt goes on with."""
_SHORTEST: Final = 8
"""Characters of a summary."""
_VOLATILE: Final = re.compile(
    r"\b(?=[\dA-FJMNOSTWa-f])(?:"  # most words begin otherwise, and are passed five times as fast
    r"\d{4}-\d\d-\d\d(?:[T ][\d:.,+Z-]+)?|\d{1,2}:\d\d(?::\d\d)?|\d{1,2}/\d{1,2}/\d{2,4}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}|\d{9,}"
    r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?|(?:\d{1,2}\.? )?(?:January|February|March|April"
    r"|May|June|July|August|September|October|November|December)(?: \d{1,2}\b)?,?(?: \d{4}\b)?)"
)
"""Times, dates and random ids: what a prompt says anew each time."""
_DIGIT: Final = re.compile(r"\d")


class Identity(NamedTuple):
    """What tells an unnamed agent from another: its instructions and the names of its tools."""

    rules: str
    tools: frozenset[str]


def identify(call: Call) -> Identity:
    """Return what a call's prompt says of who asks."""
    rules = [message for message in call.observation if message.get("role") in RULES]
    text = plain_text(rules) if rules else ""
    if _DIGIT.search(text):  # most have none, and the look for more costs ten times as much
        text = _steady_text(text)
    return Identity(text, frozenset(map(_name_tool, call.tools)))


def _count_shared(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@lru_cache(maxsize=256)
def _steady_text(text: str) -> str:
    return " ".join(_VOLATILE.sub(" ", text).split())


def _name_tool(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = (function if isinstance(function, dict) else tool).get("name")
    return name if isinstance(name, str) else str(tool.get("type"))


class Identities:
    """The identities of one agent's calls, each read when it is asked for."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._known: dict[int, Identity] = {}

    def __getitem__(self, call: int) -> Identity:
        if call not in self._known:
            self._known[call] = identify(self._calls[call])
        return self._known[call]

    def group(self, call: int) -> object:
        """Return what all calls of one identity have in common: the name, if they have one."""
        return self._calls[call].agent or self[call]

    def may_shorten(self, call: int, other: int) -> bool:
        """Return whether a call may go on with less of what another one was given."""
        one, two = self[call], self[other]
        if not self._calls[call].agent:
            return one == two
        return one.rules == two.rules or bool(one.tools and one.tools == two.tools)

    def may_edit(self, call: int, other: int) -> bool:
        """Return whether a call may have changed what another one was given, as memories do."""
        one, two = self[call], self[other]
        texts = one.rules, two.rules
        shared = _count_shared(*texts)
        shared += _count_shared(*[text[shared:][::-1] for text in texts])
        is_similar = 2 * shared >= max(map(len, texts))
        if not self._calls[call].agent:
            return is_similar and one.tools == two.tools
        return is_similar or bool(one.tools and one.tools == two.tools)


class Tails:
    """The answers that prompts end with: they tell what goes on where its history was edited.

    ``doubtful`` are the calls whose answer others gave as well.
    """

    def __init__(
        self, calls: Sequence[Call], lengths: Sequence[int], identities: Identities
    ) -> None:
        """Take one agent's calls, and how many messages of each one some call left behind."""
        self.doubtful: set[int] = set()
        self._calls = calls
        self._identities = identities
        self._places = {
            call: place
            for call, (member, length) in enumerate(zip(calls, lengths, strict=True))
            if (place := _find_answer(member.observation, length)) >= length
        }
        self._chains: dict[int, int] = {}
        self._left: dict[tuple[int, ...], int] = {}
        self._shared: set[tuple[int, ...]] = set()

    def add(self, call: int, previous: int, length: int) -> None:
        """Add a call that ended, with the one it continues and how much of that it repeats."""
        if not self._places:
            return
        observation = self._calls[call].observation
        chain = self._chains.get(previous, 0) if length else 0
        tail = observation[length - 1 :] if length else observation
        self._chains[call] = chain = _hash_answers(tail, chain)
        task = _hash_task(observation)
        for choice in self._calls[call].action:
            for key in _list_keys(task, chain, message_key(choice)):
                if key in self._left:
                    self._shared.add(key)
                self._left[key] = call

    def find(self, call: int, length: int) -> int:
        """Return the call whose answer is the last in a prompt, if that is an edited history."""
        place = self._places.get(call, NONE)
        if place < length:
            return NONE
        observation = self._calls[call].observation
        chain = _hash_answers(observation[:place])
        keys = _list_keys(_hash_task(observation), chain, message_key(observation[place]))
        for key in keys:
            other = self._left.get(key, NONE)
            if other != NONE and self._identities.may_edit(call, other):
                if key in self._shared:
                    self.doubtful.add(call)
                return other
        return NONE


def _find_answer(observation: Sequence[Message], length: int) -> int:
    """Return the place of the last answer after so many messages, or -1."""
    for place in range(len(observation) - 1, length - 1, -1):
        if observation[place].get("role") == "assistant":
            return place
    return NONE


def _hash_answers(messages: Iterable[Message], chain: int = 0) -> int:
    for message in messages:
        if message.get("role") == "assistant":
            chain = hash((chain, message_key(message)))
    return chain


def _hash_task(observation: Sequence[Message]) -> int:
    first = next((message for message in observation if message.get("role") not in RULES), None)
    return 0 if first is None else message_key(first)


def _list_keys(task: int, chain: int, answer: int) -> tuple[tuple[int, ...], ...]:
    return (task, chain, answer), (task, answer), (answer,)


class Remarks:
    """What was said in the conversations of one agent, to know one that was shortened.

    ``doubtful`` are the calls that may go on with several of them.
    """

    def __init__(
        self, calls: Sequence[Call], histories: Sequence[History], identities: Identities
    ) -> None:
        self.doubtful: set[int] = set()
        self._calls, self._histories = calls, histories
        self._identities = identities
        self._said: dict[int, list[int]] = {}
        self._latest: dict[int, int] = {}  # of each conversation, by when these ended
        self._ends: dict[int, deque[int]] = {}
        self._grown: set[int] = set()
        self._answers: deque[int] = deque(maxlen=_LATEST)

    def latest_of(self, conversation: int) -> int:
        """Return the call of a conversation that ended last, or -1."""
        return self._latest.get(conversation, NONE)

    def add(self, call: int, conversation: int, length: int, *, is_grown: bool) -> None:
        """Add a call that ended, of whose messages so many are known from the one before."""
        self._answers.append(call)
        if is_grown:
            self._grown.add(conversation)
        self._latest.pop(conversation, None)
        self._latest[conversation] = call
        self._ends.setdefault(conversation, deque(maxlen=2)).append(call)
        current = self._calls[call]
        messages = [message for message in current.observation[length:] if is_from_agent(message)]
        if not length:  # what it was asked first
            messages += [item for item in current.observation if item.get("role") == "user"][:1]
        for message in (*messages, *current.action):
            holders = self._said.setdefault(message_key(message), [])
            if holders[-1:] != [conversation]:
                holders.append(conversation)

    def find(self, call: int, length: int, is_over: Callable[[int], bool]) -> int:
        """Return the latest call of the conversation that a prompt goes on with, or -1.

        It repeats something said there after so many messages that it has in common with a call:
        less than was said, or more if answers were edited.
        """
        tail = self._calls[call].observation[length:]
        for message in reversed(tail):
            if message.get("role") in RULES:
                continue
            for conversation in reversed(self._said.get(message_key(message), ())[-_MOST_ALIKE:]):
                if self._goes_on(call, conversation, is_over):
                    return self._latest[conversation]
        if self._has_summary(tail):
            matches = [
                conversation
                for conversation in islice(reversed(self._latest), _MOST_ALIKE)
                if self._goes_on(call, conversation, is_over)
            ]
            if matches:
                self.doubtful |= {call} if len(matches) > 1 else set()
                return self._latest[matches[0]]
        return NONE

    def _has_summary(self, messages: Sequence[Message]) -> bool:
        """Return whether a prompt holds an answer of the latest calls, and no transcript."""
        text = plain_text([message for message in messages if not is_from_agent(message)])
        latest = [call for call in self._answers if self._is_told(call, text)]
        return len(latest) == 1 and not any(
            self._is_told(call, text)
            for conversation in islice(reversed(self._latest), _MOST_ALIKE)
            for call in self._ends[conversation]
            if call != latest[0]
        )

    def _is_told(self, call: int, text: str) -> bool:
        answer = plain_text(self._calls[call].action[:1]).strip()
        return len(answer) >= _SHORTEST and answer in text

    def _goes_on(self, call: int, conversation: int, is_over: Callable[[int], bool]) -> bool:
        latest = self._latest[conversation]
        return (
            (conversation in self._grown or not self.is_smaller(call, latest))
            and is_over(latest)
            and self._identities.may_shorten(call, latest)
        )

    def is_smaller(self, call: int, latest: int) -> bool:
        """Return whether a call was given no more messages than another, or fewer tokens."""
        if len(self._histories[call].prefixes) <= len(self._histories[latest].prefixes):
            return True
        size, other = (
            get_integer(self._calls[i].span.attributes, c.INPUT_TOKENS) for i in (call, latest)
        )
        return size is not None and other is not None and size < other

"""Merge several instrumentors' records of one request into one call.

Records of several instrumentors have the response id in common; one without an id goes with that of
another make which lies within it, or which overlaps it and was asked the same: under the same
parent or, in a tree of its own, with the same answer.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.tree import Tree
from lightning_otel.messages import RULES, parse_messages, plain_text
from lightning_otel.types import Message, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.text import NESTED

DUPLICATE: Final = "duplicate: the same request was recorded twice"
DUPLICATE_OF: Final = "duplicate: {} recorded the same request"

_MOST_BESIDE: Final = 64
"""How many equal requests at once are looked at for one: each pair costs."""
_TOKENS: Final = (
    c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS, c.LOGPROB_TOKEN_IDS,
)  # fmt: skip
_SHARED: Final = (
    c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS, c.PROVIDER,
    c.REQUEST_MODEL, c.RESPONSE_MODEL, c.RESPONSE_ID, c.FINISH_REASONS, c.INPUT_TOKENS,
    c.OUTPUT_TOKENS, c.CACHED_TOKENS, c.REASONING_TOKENS, c.CONVERSATION_ID, c.TRACK_ONLY,
    c.RESOURCE_VERSION, c.RESOURCES, c.ERROR_TYPE,
)  # fmt: skip
"""What one record may take from another where it has nothing itself."""


@dataclass(slots=True)
class _Request:
    members: list[int]
    scopes: set[str]
    models: set[str]
    response_id: str | None
    log_scopes: set[str] = field(default_factory=set)


def find_requests(tree: Tree, calls: Sequence[int]) -> list[list[int]]:
    """Return the records of each request that has several, the richest first."""
    spans = [tree.spans[position] for position in calls]
    has_makes = len({span.scope for span in spans}) > 1
    # A list as an id, which some server may send, cannot be in a set.
    ids = [value for span in spans if type(value := span.attributes.get(c.RESPONSE_ID)) is str]
    if not has_makes and len(set(ids)) == len(ids):
        return []
    requests = _group_by_response(tree, calls)
    if has_makes:
        _join_nested(tree, calls, requests)
        _join_beside(tree, calls, requests)
    groups = {id(request): request.members for request in requests.values()}
    return [_rank_records(tree, group) for group in groups.values() if len(group) > 1]


def _group_by_response(tree: Tree, calls: Sequence[int]) -> dict[int, _Request]:
    requests: dict[int, _Request] = {}
    latest: dict[str, _Request] = {}
    for position in calls:
        span = tree.spans[position]
        response_id = get_text(span.attributes, c.RESPONSE_ID)
        request = latest.get(response_id or "")
        if request is None or not _is_of_request(tree, request, position):
            request = _Request([], set(), set(), response_id)
            if response_id is not None:
                latest[response_id] = request
        request.members.append(position)
        is_log = span.start_ns == span.end_ns  # which stands beside a span of its make
        (request.log_scopes if is_log else request.scopes).add(span.scope)
        names = [get_text(span.attributes, key) for key in (c.REQUEST_MODEL, c.RESPONSE_MODEL)]
        # Without the provider that some makes write before them.
        request.models |= {name.rpartition("/")[2] for name in names if name}
        requests[position] = request
    return requests


def _is_of_request(tree: Tree, request: _Request, position: int) -> bool:
    """Return whether a record with the request's response id is of that very request.

    A server may repeat its ids: of one make only a record within another is the same request
    (LiteLLM tells each call on two levels), or one that a first server relayed.
    """
    span, members = tree.spans[position], request.members
    scope = span.scope
    all_scopes = request.scopes | request.log_scopes
    if span.start_ns == span.end_ns and scope and scope not in all_scopes:
        # A log of another make, written once the answer was there.
        return any(_are_alike(tree.spans[i], span) is not False for i in members)
    if not any(_do_overlap(tree, member, position) for member in members):
        return False
    scopes = request.log_scopes if span.start_ns == span.end_ns else request.scopes
    return not (scope and scope in scopes) or any(
        tree.contains(member, position)
        or tree.contains(position, member)
        or _is_relayed(tree.spans[member], span)
        for member in members
    )


def _is_relayed(one: Span, other: Span) -> bool:
    """Return whether two records of ours are of two servers, one of which asked the other."""
    servers = [
        (span.attributes.get(c.SERVER_ADDRESS), span.attributes.get(c.SERVER_PORT))
        for span in (one, other)
    ]
    is_known = all(address for address, _ in servers)
    return one.scope == other.scope == c.SCOPE and is_known and servers[0] != servers[1]


def _do_overlap(tree: Tree, first: int, second: int) -> bool:
    """Return whether two records overlap, by the process's count or by the clock.

    Some are made after the fact, with the times of the request: by count they come too late.
    """
    if tree.starts[second] < tree.ends[first]:
        return True
    one, other = tree.spans[first], tree.spans[second]
    if one.end_ns is None or other.end_ns is None:
        return False
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


def _join_nested(tree: Tree, calls: Sequence[int], requests: dict[int, _Request]) -> None:
    above: list[int] = []
    inside: dict[int, list[int]] = {}
    for position in sorted(calls, key=tree.first.__getitem__):
        while above and not tree.contains(above[-1], position):
            above.pop()
        if above:
            inside.setdefault(above[-1], []).append(position)
        above.append(position)
    for outer, inner in inside.items():
        # Of several tries at one request the last that came through is what the outer one tells.
        inner.sort(key=lambda i: (tree.spans[i].status != "ERROR", tree.ends[i]), reverse=True)
        for position in inner:
            if _are_alike(tree.spans[outer], tree.spans[position]) is not False:
                _join_calls(tree, requests, outer, position)


def _join_beside(tree: Tree, calls: Sequence[int], requests: dict[int, _Request]) -> None:
    same: dict[str, list[int]] = {}
    for position in calls:
        attributes = tree.spans[position].attributes
        if question := _text_of(parse_messages(attributes.get(c.INPUT_MESSAGES)) or ()):
            # One make tells the instructions apart, another one as the first message.
            parts = parse_messages(attributes.get(c.SYSTEM_INSTRUCTIONS)) or ()
            rules = _text_of([{"role": "system", "parts": parts}])
            same.setdefault(rules + question, []).append(position)
    for group in same.values():
        for index, position in enumerate(group):
            for other in group[index + 1 : index + 1 + _MOST_BESIDE]:
                if not _do_overlap(tree, position, other):
                    continue
                are_alike = _are_alike(tree.spans[position], tree.spans[other])
                if are_alike is None:
                    are_alike = tree.parents[position] == tree.parents[other]
                if are_alike and _join_calls(tree, requests, position, other):
                    break


def _join_calls(tree: Tree, requests: dict[int, _Request], one: int, other: int) -> bool:
    target, joining = requests[one], requests[other]
    if target is joining:
        return True
    ids = {target.response_id, joining.response_id} - {None}
    is_other_model = target.models and joining.models and target.models.isdisjoint(joining.models)
    # Of one make are two levels of a request, where a record of another make ties them.
    is_of_one_make = tree.spans[one].scope == tree.spans[other].scope
    is_apart = target.scopes & joining.scopes and (
        is_of_one_make or not _are_nested(tree, target.members, joining.members)
    )
    if len(ids) > 1 or is_apart or is_other_model:
        return False
    target.members += joining.members
    target.scopes |= joining.scopes
    target.models |= joining.models
    target.response_id = target.response_id or joining.response_id
    requests.update(dict.fromkeys(joining.members, target))
    return True


def _are_nested(tree: Tree, members: Sequence[int], others: Sequence[int]) -> bool:
    return all(
        tree.contains(one, other) or tree.contains(other, one)
        for one, other in itertools.product(members, others)
        if tree.spans[one].scope == tree.spans[other].scope
    )


def _are_alike(one: Span, other: Span) -> bool | None:
    """Return whether two calls have the same answer; None if that is unknown."""
    operations = [span.attributes.get(c.OPERATION) for span in (one, other)]
    if c.EMBEDDINGS in operations and operations[0] != operations[1]:
        return False
    answers = [
        _text_of(parse_messages(span.attributes.get(c.OUTPUT_MESSAGES)) or ())
        for span in (one, other)
    ]
    return answers[0] == answers[1] if all(answers) else None


def _text_of(messages: Sequence[Message]) -> str:
    """Return messages' texts and tool calls without roles, which makes name differently."""
    text = plain_text(messages)
    return "" if NESTED in text else "".join(text.split())


def _rank_records(tree: Tree, members: Sequence[int]) -> list[int]:
    def wealth(position: int) -> tuple[object, ...]:
        span = tree.spans[position]
        attributes = span.attributes
        messages = parse_messages(attributes.get(c.INPUT_MESSAGES)) or ()
        return (
            span.end_ns is not None,
            c.RESPONSE_TOKEN_IDS in attributes,
            c.PROMPT_TOKEN_IDS in attributes,
            span.scope == c.SCOPE,
            c.OUTPUT_MESSAGES in attributes,
            c.INPUT_MESSAGES in attributes,
            -sum(not message.get("parts") for message in messages),
            c.RESPONSE_ID in attributes,
            -position,
        )

    return sorted(members, key=wealth, reverse=True)


def merge_records(tree: Tree, records: Sequence[int]) -> Span:
    """Return the first record, with what it lacks from the others in their order."""
    first, *others = [tree.spans[position] for position in records]
    attributes = dict(first.attributes)
    if c.RESPONSE_TOKEN_IDS not in attributes:
        # Ids and logprobs stay together: those of two records may be cut differently.
        for other in others:
            if c.RESPONSE_TOKEN_IDS in other.attributes:
                attributes |= {k: other.attributes[k] for k in _TOKENS if k in other.attributes}
                break
    message, events = first.status_message, first.events
    for other in others:
        for key in _SHARED:
            if attributes.get(key) is None and other.attributes.get(key) is not None:
                attributes[key] = other.attributes[key]
        message = message or (other.status_message if first.status == other.status else "")
        events = events or other.events
    # One make tells the instructions apart, another one as the first message.
    messages = parse_messages(attributes.get(c.INPUT_MESSAGES)) or ()
    if c.SYSTEM_INSTRUCTIONS in attributes and any(item.get("role") in RULES for item in messages):
        del attributes[c.SYSTEM_INSTRUCTIONS]
    return replace(first, attributes=attributes, status_message=message, events=events)


def place_of(tree: Tree, records: Sequence[int]) -> int:
    """Return the record whose place is the request's: around the richest that has a parent."""
    # The outermost record that holds each: what is beside it is beside the request.
    hosts = {
        record: min(filter(lambda i: tree.contains(i, record), records), key=tree.first.__getitem__)
        for record in records
    }
    placed = [i for i in records if tree.parents[hosts[i]] != NO_PARENT] or [*records[:1]]
    ours = [i for i in placed if tree.spans[i].scope == c.SCOPE]
    # Of a request that was passed on, the agent's own.
    choice = min(ours, key=lambda i: tree.spans[i].start_ns) if len(ours) > 1 else placed[0]
    outer = hosts[choice]
    return outer if tree.agents[outer] == tree.agents[choice] else choice


def find_untold(tree: Tree, calls: Sequence[int]) -> set[int]:
    """Return records of others that tell of no answer, where ours recorded each request."""
    models: dict[str, set[str]] = {}
    others = []
    for position in calls:
        span = tree.spans[position]
        get = span.attributes.get
        names = (get_text(span.attributes, key) for key in (c.RESPONSE_MODEL, c.REQUEST_MODEL))
        model = next(filter(None, names), "")
        if span.scope == c.SCOPE:
            models.setdefault(span.process, set()).add(model)
        elif model and span.end_ns is not None and span.status != "ERROR":
            values = map(get, (c.RESPONSE_ID, c.INPUT_TOKENS, c.OUTPUT_TOKENS))
            if not any(value is not None for value in values):
                others.append((position, span.process, model))
    return {
        position
        for position, process, model in others
        if any(
            name.startswith(model) or model.startswith(name)
            for name in models.get(process, ())
            if name
        )
    }

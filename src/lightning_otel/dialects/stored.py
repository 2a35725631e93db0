"""What OpenAI's server keeps: responses that it makes in the background, and conversations.

Source: OpenAI's API reference for responses (``retrieve``, ``cancel``) and conversations.
"""

import re
from functools import lru_cache
from typing import Final

from lightning_otel.dialects.dialect import Attributes, Json
from lightning_otel.dialects.responses import Responses
from lightning_otel.messages import objects
from lightning_otel.types import conventions as c

_OVER: Final = ("completed", "incomplete", "failed", "cancelled")


class StoredResponse(Responses):
    """A look at a response that the server keeps, or its cancellation."""

    operation = c.RETRIEVE_RESPONSE

    def read_exchange(self, path_id: str, body: Json, answer: Json) -> Attributes:
        """Return attributes and content of a request and its answer; empty if it tells nothing new.

        Args:
            path_id: The id in the path; empty if it has none.
            body: The request.
            answer: The answer to it.
        """
        # One that was not made in the background is on its call already.
        if answer.get("status") not in _OVER or answer.get("background") is False:
            return {}
        attributes = self.response_attributes(answer)
        attributes[c.RETRIEVED_RESPONSE] = attributes.pop(c.RESPONSE_ID, path_id)
        return {**attributes, **self.response_content(answer)}


class ConversationChange(StoredResponse):
    """A change of a conversation by the program; one without items leaves its history unknown."""

    operation = c.UPDATE_CONVERSATION

    def read_exchange(self, path_id: str, body: Json, answer: Json) -> Attributes:
        """Return attributes and content of a request and its answer."""
        conversation_id = path_id or answer.get("id")
        if not isinstance(conversation_id, str):
            return {}
        ids = dict.fromkeys((c.CONVERSATION_ID, c.REQUEST_CONVERSATION), conversation_id)
        if self.operation == c.UPDATE_CONVERSATION and "items" not in body:
            return ids
        return {**ids, c.INPUT_MESSAGES: self.write_messages(objects(body.get("items")))}


class NewConversation(ConversationChange):
    """The beginning of a conversation."""

    operation = c.CREATE_CONVERSATION


_RESPONSE, _UPDATE = StoredResponse(), ConversationChange()
_ID: Final = r"([^/]+)"
_ROUTES: Final[tuple[tuple[re.Pattern[str], StoredResponse], ...]] = (
    (re.compile(rf"GET .*/responses/{_ID}"), _RESPONSE),
    (re.compile(rf"POST .*/responses/{_ID}/cancel"), _RESPONSE),
    (re.compile(r"POST .*/conversations()"), NewConversation()),
    (re.compile(rf"POST .*/conversations/{_ID}/items"), _UPDATE),
    (re.compile(rf"DELETE .*/conversations/{_ID}/items/[^/]+"), _UPDATE),
)


@lru_cache(256)
def find_stored(method: str, path: str) -> tuple[StoredResponse, str] | None:
    """Return the reader of a request for what the server keeps, with the id in its path."""
    request = f"{method.upper()} /{path.partition('?')[0].strip('/')}"
    for route, dialect in _ROUTES:
        if match := route.fullmatch(request):
            return dialect, match[1]
    return None

"""Rewards as annotations of spans in Phoenix, which shows them beside the calls that earned them.

Source: Phoenix's REST API, ``POST /v1/span_annotations`` of arize-phoenix 20.26. With ``sync`` it
answers 404 for a span that has not landed; without, it takes such an annotation and drops it.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from lightning_otel.adapter.rewards import read_reward
from lightning_otel.config import OtlpEndpoint
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.exporters.forwarding.senders import Disposition, HttpSender, Receipt
from lightning_otel.store.engines.otlp import UnsendableError
from lightning_otel.types import Reward, Span
from lightning_otel.types import conventions as c

_ROUTE: Final = "/v1/span_annotations"
_TRACES: Final = "/v1/traces"
_LANDING_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Waits for spans that were sent and have not landed: Phoenix keeps them a moment later."""
_MOST_MISSING: Final = 5
"""Tries of annotations whose span is not there, before they are divided or given up."""
_REWARDS: Final = f"""
SELECT rewards.span_id, rewards.rollout_id, rewards.name, rewards.value, rewards.call_ids::VARCHAR
  AS calls, root.span_id AS root
FROM rewards LEFT JOIN (
  SELECT rollout_id, attempt_id, any_value(span_id) AS span_id FROM spans
  WHERE name = '{c.SPAN_ROLLOUT}' GROUP BY ALL
) AS root USING (rollout_id, attempt_id)
WHERE rewards.span_id IN (SELECT unnest(?))"""
_HUMAN: Final = (
    c.REWARD_AUTHOR,
    c.FEEDBACK_ID,
    c.FEEDBACK_TEXT,
    c.FEEDBACK_RATING,
    c.FEEDBACK_SATISFIED,
)


def is_reward(span: Span) -> bool:
    """Return whether a span may hold a reward."""
    return span.name == c.SPAN_ANNOTATION and c.REWARD_RETRACTED not in span.attributes


class PhoenixSender(HttpSender):
    """Sends annotations to the Phoenix that takes spans at an endpoint."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        """Find the route beside that of spans.

        Raises:
            ConfigError: The endpoint is gRPC's, which has no such route.
        """
        if endpoint.protocol == "grpc":
            raise ConfigError(
                f"{endpoint.url} is a gRPC port, which takes no annotations; name Phoenix's own "
                "address with --to http://127.0.0.1:6006"
            )
        super().__init__(replace(endpoint, compression=""))
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").removesuffix(_TRACES) + _ROUTE
        self.url = parts._replace(path=path, query="sync=true").geturl()
        self._session.headers["Content-Type"] = "application/json"
        self._missing = (b"", 0)

    def send(self, body: bytes) -> Receipt:
        """Send annotations; those of spans that are not there may be sent again some times."""
        answer = super().send(body or b'{"data":[]}')
        for wait_s in _LANDING_S if body else ():
            if not answer.reason.startswith("HTTP 404"):
                break
            time.sleep(wait_s)
            answer = super().send(body)
        if answer.reason.startswith(("HTTP 422", "HTTP 409")):
            return replace(answer, verdict=Disposition.BAD)
        if body and answer.reason.startswith("HTTP 404"):
            tries = self._missing[1] + 1 if self._missing[0] == body else 1
            self._missing = (body, tries)
            if tries >= _MOST_MISSING:
                return replace(answer, verdict=Disposition.BAD)
        return answer


class Annotations:
    """The annotations that a store's rewards are in Phoenix."""

    def __init__(self, store: Store, *, with_content: bool) -> None:
        """Read rewards of a store; explanations leave it only ``with_content``."""
        self._store = store
        self._with_content = with_content

    def encode(self, spans: Sequence[Span]) -> bytes:
        """Return the body for the rewards of some spans.

        Raises:
            UnsendableError: One of the rewards belongs to no span.
        """
        by_id = {span.span_id: span for span in spans}
        rows = self._store.sql(_REWARDS, [[*by_id]]).rows()  # none of one that is retracted
        parts = [list(self._make(row, by_id[row["span_id"]])) for row in rows]
        if not all(parts):  # several are divided, and the others sent
            raise UnsendableError("the reward belongs to no span")
        return json.dumps({"data": [one for part in parts for one in part]}).encode()

    def _make(self, row: dict[str, Any], reward: Span) -> Iterator[dict[str, Any]]:
        attributes = reward.attributes
        texts = (attributes.get(key) for key in (c.EVALUATION_EXPLANATION, c.FEEDBACK_TEXT))
        reason = next(filter(None, texts), None) if self._with_content else None
        is_human = any(key in attributes for key in _HUMAN)
        kind = "HUMAN" if is_human else "LLM" if c.REWARD_PROMPT in attributes else "CODE"
        identifier = reward.span_id
        if author := attributes.get(c.REWARD_AUTHOR):  # a label takes their earlier one's place
            identifier = f"{author} {attributes.get(c.LINK_VALUE, '')}".strip()
        parts = read_reward(reward)
        values: Mapping[str, float] = {row["name"] or "reward": row["value"]}
        if isinstance(parts, Reward) and len(parts.values) > 1:
            values = parts.values
        span_ids = json.loads(row["calls"] or "null") or [row["root"]]
        for span_id, name in itertools.product(filter(None, span_ids), values):
            yield {
                "span_id": span_id,
                "name": name,
                "annotator_kind": kind,
                "result": {"score": values[name], "explanation": reason},
                "metadata": {"rollout_id": row["rollout_id"]},
                "identifier": identifier,
            }

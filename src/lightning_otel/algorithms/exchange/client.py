"""A client of Agent Lightning 0.3's HTTP store.

Source: ``agentlightning/store/client_server.py`` of v0.3.0. It assigns ids: ours stand in metadata.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

from lightning_otel.config import OtlpEndpoint
from lightning_otel.errors import ConfigError, ReceiveError, StoreError
from lightning_otel.exporters.forwarding.senders import Disposition, HttpSender
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.types import Span

OUR_ROLLOUT: Final = "lightning_otel.rollout_id"
"""In the metadata of a rollout that was handed over: its id here."""
OUR_ATTEMPT: Final = "lightning_otel.attempt_id"
"""Likewise of an attempt."""
_API: Final = "/v1/agl"
_PAGE: Final = 500
_SAID: Final = 300

Found = Mapping[str, Any]
"""A rollout, attempt or span as it tells them."""


class Client:
    """A running store of Agent Lightning's, by its address."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        """Name the store by a URL such as ``http://127.0.0.1:4747``; nothing is asked yet."""
        import requests

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no store of Agent Lightning's; name one like http://127.0.0.1:4747"
            )
        self.peer = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{self.peer}{parts.path.rstrip('/')}"
        self._root = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._failures = requests.RequestException
        # HTTP alone, whatever the environment says of another collector.
        endpoint = OtlpEndpoint(self._root, compression="gzip", timeout_s=timeout_s)
        self._sender = HttpSender(endpoint)

    def check(self) -> None:
        """Ask whether it is there, and what it says it is."""
        health = self._send_request("GET", "/health")
        if health.get("status") != "ok":
            raise StoreError(
                f"{self.url} is no store of Agent Lightning's; start one: agl store --port 4747"
            )

    def rollouts(self) -> Iterator[Found]:
        """Read every rollout there."""
        return self._read_pages("/rollouts", {"sort_by": "start_time"})

    def attempts(self, rollout_id: str) -> list[Found]:
        """Read the attempts at a rollout, in order."""
        path = f"/rollouts/{quote(rollout_id, safe='')}/attempts"
        return list(self._read_pages(path, {"sort_by": "sequence_id"}))

    def spans(self, rollout_id: str, attempt_id: str | None = None) -> Iterator[Found]:
        """Read the spans of a rollout, or of one attempt at it, in order."""
        filters = {} if attempt_id is None else {"attempt_id": attempt_id}
        return self._read_pages("/spans", {"rollout_id": rollout_id, **filters})

    def start(self, task: object, mode: str | None, our_id: str) -> Found:
        """Begin a rollout with its first attempt."""
        body = {"input": task, "mode": mode, "metadata": {OUR_ROLLOUT: our_id}}
        return self._send_request("POST", "/rollouts", body)

    def start_attempt(self, rollout_id: str) -> Found:
        """Begin another attempt at a rollout."""
        path = f"/rollouts/{quote(rollout_id, safe='')}/attempts"
        return self._send_request("POST", path, {})

    def finish(self, rollout_id: str, attempt_id: str, status: str, our_id: str) -> None:
        """Say how an attempt ended; its rollout takes the status of its last one."""
        ids = f"{quote(rollout_id, safe='')}/attempts/{quote(attempt_id, safe='')}"
        body = {"status": status, "metadata": {OUR_ATTEMPT: our_id}}
        self._send_request("POST", f"/rollouts/{ids}", body)

    def send(self, spans: list[Span], *, with_content: bool) -> None:
        """Hand spans over by OTLP; each names a rollout and an attempt that are there."""
        answer = self._sender.send(encode_request(spans, with_content=with_content))
        if answer.verdict is not Disposition.DELIVERED or answer.rejected:
            raise StoreError(
                f"{self.url} did not take {len(spans)} spans: {answer.reason}; hand over again, "
                "what it took is not sent twice"
            )

    def _read_pages(self, path: str, query: Mapping[str, Any]) -> Iterator[Found]:
        offset = 0
        while True:
            parameters = {"sort_order": "asc", **query, "limit": _PAGE, "offset": offset}
            items = self._send_request("GET", path, query=parameters).get("items")
            if not isinstance(items, list):
                raise ReceiveError(f"{self.url}{_API}{path} gave no items; is it version 0.3?")
            yield from items
            offset += len(items)
            if len(items) < _PAGE:
                return

    def _send_request(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None
    ) -> Found:
        try:
            answer = self._session.request(
                method,
                f"{self._root}{_API}{path}",
                params=query,
                json=body,
                timeout=self._timeout_s,
                allow_redirects=False,
            )
        except self._failures as exc:
            raise StoreError(
                f"no store of Agent Lightning's answers at {self.url} ({type(exc).__name__}); "
                "start one: agl store --port 4747"
            ) from exc
        if not 200 <= answer.status_code < 300:
            message = " ".join(answer.text.split())[:_SAID]
            raise StoreError(
                f"{self.url} answered {method} {path} with {answer.status_code}: {message}; "
                "is it a store of Agent Lightning 0.3?"
            )
        try:
            value = answer.json()
        except ValueError as exc:
            raise ReceiveError(
                f"{self.url}{_API}{path} gave no JSON; is it a store of Agent Lightning 0.3?"
            ) from exc
        if not isinstance(value, Mapping):
            raise ReceiveError(
                f"{self.url} gave {type(value).__name__} where an object is due; is it version 0.3?"
            )
        return value

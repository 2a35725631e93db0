"""Pages asked for without a browser: as a program does, with the key."""

import http.client
import re
from collections.abc import Mapping
from html import unescape
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from tests.viewer.visiting import KEY


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The page, with its markup."""
        return self.body.decode()

    @property
    def words(self) -> str:
        """What the page's content says, without markup."""
        content = self.text.partition("<main")[2].partition("</main>")[0]
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", content)).split())


class Asking:
    """A served store, asked with its key."""

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc

    def get(self, path: str) -> Answer:
        """A page, or what else is there; header names are in lower case."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, **fields: str) -> Answer:
        """The answer to a form, as a page of the same origin sends it."""
        kind = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": f"http://{self.host}",
            "Sec-Fetch-Site": "same-origin",
        }
        return self._ask("POST", path, urlencode(fields).encode(), kind)

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, timeout=30)
        known = {"Authorization": f"Bearer {KEY}", "Accept": "text/html"}
        try:
            connection.request(method, path, body, {**known, **headers})
            answer = connection.getresponse()
            return Answer(
                answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
            )
        finally:
            connection.close()

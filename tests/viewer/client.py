"""Pages asked for without a browser: as a program does, with the key."""

import http.client
import re
from collections.abc import Callable, Mapping
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from tests.viewer.browsing import KEY

from lightning_otel import Store


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def words(self) -> str:
        """What the page's content says, without markup."""
        content = self.text.partition("<main")[2].partition("</main>")[0]
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", content)).split())


def send(host: str, method: str, path: str, body: Any = None, /, **headers: str) -> Answer:
    """The answer to a request; ``content_type`` is the header Content-Type, and so on."""
    connection = http.client.HTTPConnection(host, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(answer.status, told, answer.read())
    finally:
        connection.close()


class Asking:
    """A served store, asked with its key as people ask."""

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, **fields: str) -> Answer:
        """The answer to a form, as a page of the same origin sends it."""
        return self.ask(
            "POST",
            path,
            urlencode(fields),
            Content_Type="application/x-www-form-urlencoded",
            Origin=f"http://{self.host}",
            Sec_Fetch_Site="same-origin",
        )

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        """An answer, with other headers than usual; an empty one is left out."""
        named = {"Authorization": f"Bearer {KEY}", "Accept": "text/html", **headers}
        own = {name: value for name, value in named.items() if value}
        return send(self.host, method, path, body, **own)


AskingOf = Callable[[Store], Asking]
Ask = Callable[..., Answer]

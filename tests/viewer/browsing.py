"""What a visit to a page records, and what axe says of a page."""

import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

CHROMIUM: Final = Path("/usr/bin/chromium")
FLAGS: Final = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
KEY: Final = "a-key-of-some-length"
Visits = Callable[..., Any]


class Visit:
    """One browser profile: what went wrong in its pages."""

    def __init__(self, context: Any, url: str, tolerated: tuple[int, ...]) -> None:
        self.context = context
        self.problems: list[str] = []
        self._host = urlsplit(url).netloc
        self._tolerated = tuple(f"status of {status} " for status in tolerated)
        context.on("request", self._asked)
        context.on("console", self._said)
        context.on("weberror", lambda error: self.problems.append(f"script: {error.error}"))
        context.on("dialog", self._shouted)

    def _asked(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.problems.append(f"asked another host: {request.url}")

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(
            each in message.text for each in self._tolerated
        ):
            self.problems.append(f"console: {message.text} ({message.page and message.page.url})")

    def _shouted(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()


def prefix(address: str) -> str:
    """The path below which a server has its pages for browsers, as it stands in an address."""
    found = re.match(r"(?:http://[^/]*)?(/v-[\w-]{22})/", address)
    assert found is not None, address
    return found[1]


@cache
def axe() -> str:
    return (resources.files("axe_core_python") / "axe.min.js").read_text("utf-8")


def violations(page: Any, *rules: str) -> list[str]:
    """What axe finds wrong with a page: each rule with the elements that break it.

    It is evaluated, not loaded: the page's own policy lets no foreign script in.

    Args:
        page: The page as it is.
        rules: Only these; by default all.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe())
    only = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
    found = page.evaluate(
        "(asked) => axe.run(document, asked)", {"resultTypes": ["violations"], **only}
    )
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]

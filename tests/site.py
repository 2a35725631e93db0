"""Builds the documents, with warnings as errors, and finds what a page loads from other hosts.

    python -m tests.site FOLDER

Needs the extra ``docs``. First writes ``docs/cli.md`` from the help of the commands, and
``docs/api.md`` from the public names. A page outside the index, a broken link, a docstring that
does not parse, and a script, style, font or picture from another host are failures.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tests.cli.reference import reference
from tests.pages import DOCS

import lightning_otel

_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
_FROM_CSS = re.compile(r"""(?:url\(|@import\s)\s*["']?(?:https?:)?//[^"')\s]+""")
_API = """\
# Python API

`import lightning_otel` offers these names and imports each when it is first used. Modules below,
such as `lightning_otel.formats`, are described on the pages that use them.

```{{api}}
{names}
```

## Testing

```{{api}}
testing.captured testing.Captured testing.CapturedCall testing.CapturedTool
testing.scripted_server testing.ScriptedServer testing.tool_call testing.failure
```
"""


class _Fetches(HTMLParser):
    """What a browser asks for to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == _FETCHED.get(tag)]


def outside(folder: Path) -> Iterator[str]:
    """Each address elsewhere that a built page or its styles would fetch, with the file."""
    for path in sorted(folder.rglob("*.html")):
        page = _Fetches()
        page.feed(path.read_text())
        for address in page.found:
            if re.match(r"(?:\w+:)?//", address):
                yield f"{path.name}: {address}"
    for path in sorted(folder.rglob("*.css")):
        yield from (f"{path.name}: {each}" for each in _FROM_CSS.findall(path.read_text()))


def main(folder: Path) -> int:
    """Build into a folder; 1 if a warning, or anything from elsewhere, was found."""
    (DOCS / "cli.md").write_text(reference())
    (DOCS / "api.md").write_text(_API.format(names=" ".join(sorted(lightning_otel.__all__))))
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning"]
    built = subprocess.run([*command, "--builder", "html", str(DOCS), str(folder)], check=False)
    found = list(outside(folder)) if not built.returncode else []
    for each in found:
        print(f"fetched from elsewhere: {each}")  # noqa: T201
    pages = len(list(folder.glob("*.html")))
    print(f"{pages} pages in {folder}")  # noqa: T201
    return 1 if built.returncode or found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""The documents name all there is: public names, pages, doctor's codes, extras."""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import get_args

import pytest
from tests.pages import DOCS, ROOT, fences
from tests.site import outside

import lightning_otel
from lightning_otel import config, doctor


def test_every_public_name_is_in_the_reference_once() -> None:
    """The API page has each name of ``__all__``, and no other."""
    named = re.findall(
        r"^\.\. auto(?:class|function|exception):: lightning_otel\.(\w+)$",
        (DOCS / "api.md").read_text(),
        re.MULTILINE,
    )

    assert sorted(named) == sorted(lightning_otel.__all__)


def test_every_code_of_doctor_has_its_paragraph_and_no_more() -> None:
    """Each code is a heading with words below it, and each such heading is a code."""
    page = (DOCS / "troubleshooting.md").read_text()
    found = re.findall(r"^### ([\w-]+)\n(\S.*)", page, re.MULTILINE)

    assert [code for code, _ in found] == re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert sorted(code for code, _ in found) == sorted(get_args(doctor.Code))


def test_every_code_of_doctor_is_used() -> None:
    """No code is left over from a finding that is gone."""
    rooms = "".join(path.read_text() for path in Path(doctor.__file__).parent.glob("*.py"))
    used = re.findall(r'Finding\(\s*"([\w-]+)",', rooms)

    assert sorted(set(used)) == sorted(get_args(doctor.Code))


def test_every_setting_is_named() -> None:
    """The page of settings names each variable of ours that the one reader knows, and no other."""
    known = {value for name, value in vars(config).items() if name.endswith("_ENV")}
    named = set(re.findall(r"`(LIGHTNING_OTEL\w*)`", (DOCS / "settings.md").read_text()))

    assert named == {name for name in known if name.startswith("LIGHTNING_OTEL")}


def test_every_page_is_in_the_index_in_one_order() -> None:
    """The tables of contents list each page once, and the index's own table lists the same."""
    text = (DOCS / "index.md").read_text()
    trees = re.findall(r"```\{toctree\}\n(?::.*\n)*((?s:.*?))```", text)
    listed = [tree.split() for tree in trees]
    rows = [re.findall(r"\]\(([\w-]+)\.md\)", line) for line in text.splitlines() if "| [" in line]

    assert rows == listed
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(chain.from_iterable(listed)) == sorted(pages)


def test_every_extra_is_named() -> None:
    """The page about the start names each extra of the package, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (DOCS / "start.md").read_text().partition("## Extras\n")[2]
    named = {one or other for one, other in re.findall(r"\[(\w+)\]`|`(\w+)`", page)}

    assert named - {"opentelemetry-instrument"} == set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="http://example/x.png">',
    ],
)
def test_what_a_page_fetches_is_found(page: str, tmp_path: Path) -> None:
    """A script, style or picture from elsewhere is found; a link that one may click is none."""
    (tmp_path / "a.html").write_text(f'{page}<a href="https://example">x</a><img src="x.svg">')
    (tmp_path / "a.css").write_text("@import url(https://fonts.example/x); a{background:url(x)}")

    assert len(list(outside(tmp_path))) == 2


def test_fences_are_read_as_they_stand(tmp_path: Path) -> None:
    """A block knows its language and its excuse; a directive is no block."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na\n```\n<!-- not run: it costs -->\n```bash\nb\n```\n```{note}\nc\n```\n"
    )

    assert [tuple(block) for block in fences(page)] == [
        ("python", "a\n", ""),
        ("bash", "b\n", "it costs"),
    ]

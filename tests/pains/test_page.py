"""The table of pains in docs/contributing.md names tests that exist and bear the number."""

import ast
import re

from tests.pages import DOCS

ROOT = DOCS.parent
_ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|")


def listed() -> dict[int, set[str]]:
    """The table: node ids by the pain's number."""
    rows = _ROW.findall((DOCS / "contributing.md").read_text())
    return {int(number): set(re.findall(r"`([^`]+)`", tests)) for number, *_, tests in rows}


def marked() -> dict[int, set[str]]:
    """The tests that are there: node ids by the number in their mark."""
    found: dict[int, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "mark.pain" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for number in numbers_of(node):
                    name = f"{path.relative_to(ROOT)}::{node.name}"
                    found.setdefault(number, set()).add(name)
    return found


def numbers_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """The pains in a function's marks."""
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.pain"]
    return [ast.literal_eval(mark.args[0]) for mark in marks]


def test_every_pain_is_listed_once_with_its_tests() -> None:
    """All 23 are there, in order, each with a test; all tests with such a mark are listed."""
    assert list(listed()) == list(range(1, 24))
    assert all(listed().values())
    assert listed() == marked()

"""The picture of a rollout: what it shows, and that nothing in it can act."""

import re
from xml.etree import ElementTree

import pytest
from tests.adapter.forest import SECOND, Forest, reward_attributes, said

from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.html import escape, render_table
from lightning_otel.views.picture import draw_trace
from lightning_otel.views.trace import make_trace

SVG = "{http://www.w3.org/2000/svg}"
# What attackers write into names and messages; each must stay text.
ATTACKS = [
    "<script>alert(1)</script>",
    "</text></svg><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onclick='alert(1)",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "]]><script>alert(1)</script>",
    "<!-- --><script>alert(1)</script>",
    "<?xml-stylesheet href='https://x/y'?>",
    "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>&e;",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;",
    "<a xlink:href='javascript:alert(1)'>x</a>",
    "<foreignObject><iframe src='//x'></iframe></foreignObject>",
    "<animate onbegin=alert(1) attributeName=x dur=1s>",
    "<use href='data:image/svg+xml,…#x'/>",
    "url(https://x/y) expression(alert(1)) @import '//x'",
    "half \ud800 a pair \udfff",
    "\u202egnitirw\u2066 \u061c\u200f",
    "\x00\x07\x1b[31mred\x9b2J\x7f",
    "\ufffe\uffff",
    "line\nbreak\ttab\u2028\u2029",
    "𝕊𝕔𝕣𝕚𝕡𝕥 👩‍👩‍👧‍👦 日本語",
]
LOOPED = [
    Span("t", name, parent, title, SECOND, 2 * SECOND)
    for name, parent, title in (("a", "b", "one"), ("b", "a", "two"), ("c", "c", "self"))
]
_IDS = [f"{index + 1:016x}" for index in range(20_000)]
CHAIN = [
    Span("t", name, parent, "deep", SECOND, 2 * SECOND)
    for name, parent in zip(_IDS, [None, *_IDS], strict=False)
]
ALLOWED = {"svg", "style", "title", "rect", "text", "path", "circle", "g"}


def parsed(svg: str) -> ElementTree.Element:
    """A picture as a strict XML parser reads it, once it is known to hold nothing that acts."""
    root = ElementTree.fromstring(svg.encode("utf-8"))
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in ALLOWED
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on"), name
            assert "href" not in name.lower()
            assert name != "style" or value == "max-width:100%;height:auto"
    assert svg.count("<style>") == 1
    assert "url(" not in ElementTree.tostring(root.find(f"{SVG}style") or root[0]).decode()
    return root


def texts(root: ElementTree.Element) -> list[str]:
    """What the picture says, but for what is shown under the pointer."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def arrows(root: ElementTree.Element) -> int:
    """How many arrows go from a reward to a step."""
    return sum(element.get("class") == "credit" for element in root.iter(f"{SVG}path"))


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
@pytest.mark.pain(20)
def test_nothing_in_a_name_acts(attack: str) -> None:
    """Every place that shows a user's text shows it as text, in XML and in HTML."""
    forest = Forest(rollout_id=attack)
    marked = {c.OPERATION_NAME: attack, c.MARK_NAME: attack, c.ERROR_TYPE: attack}
    with (
        forest.inside(c.SPAN_ROLLOUT, **{c.OPERATION_NAME: attack}),
        forest.agent(attack),
        forest.inside(attack, **marked),
    ):
        forest.call(attack, attack, response_id=attack)
        forest.reward((attack, 0.5))
        forest.make(attack, {**marked, c.OPERATION: c.CHAT}, status="ERROR", status_message=attack)
        forest.make(c.SPAN_ANNOTATION, {**reward_attributes(1.0), c.REWARD_VALUE: attack})
    with forest.agent("other"):
        forest.call("second")

    svg = draw_trace(make_trace(forest.spans))
    html = render_table([attack], [[attack], [None]], attack)

    parsed(svg)
    assert "<script" not in svg + html
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c\u200f]", svg + html)
    (svg + html).encode("utf-8")
    assert set(re.findall(r"</?(\w+)", html)) <= {
        "table", "thead", "tbody", "tr", "th", "td", "p"
    }  # fmt: skip


def test_steps_rewards_and_credit_are_drawn() -> None:
    """Each step has its number, each credited reward an arrow to it, each loss its reason."""
    forest = Forest()
    with forest.agent("planner"):
        forest.call("first")
        forest.reward(0.25)
        forest.call("second")
        forest.reward(("correct", 1.0))
    forest.reward(2.0, span_id="f" * 16)

    root = parsed(draw_trace(make_trace(forest.spans)))

    said_there = texts(root)
    assert {"0", "1", "reward 0.25", "reward 1", "0.25 → #0", "correct 1 → #1"} <= set(said_there)
    assert arrows(root) == 2
    assert any("left out: its link" in text for text in said_there)
    assert "2 of 3 rewards credited" in said_there[0]


def test_branches_have_colours_and_incomplete_spans_are_dashed() -> None:
    """Parallel calls are of different colours, named below; what never ended is dashed."""
    forest = Forest()
    asked = [said("user", "one")]
    forest.call("a", asked)
    after = [*asked, said("assistant", "a")]
    one = forest.open_call("left", [*after, said("user", "left")])
    other = forest.open_call("right", [*after, said("user", "right")])
    forest.close(one, other)
    forest.open("work")

    root = parsed(draw_trace(make_trace(forest.spans)))

    classes = [element.get("class") or "" for element in root.iter(f"{SVG}rect")]
    assert classes.count("b0") == 4
    assert classes.count("b1") == 2
    assert sum("open" in name.split() for name in classes) == 1
    assert any(text.startswith("nobody named, branch 1") for text in texts(root))


def test_a_late_reward_does_not_squeeze_the_time() -> None:
    """Feedback days later stands at the edge and says so; the scale is that of the work."""
    forest = Forest()
    call = forest.call("a")
    forest.tick += 3 * 86_400
    forest.reward(1.0, span_id=call)

    root = parsed(draw_trace(make_trace(forest.spans)))

    assert "1 → #0 · 3 d later" in texts(root)
    assert not any(text.endswith(" h") for text in texts(root))


@pytest.mark.pain(12)
def test_a_huge_trace_is_bounded_and_says_so() -> None:
    """Of many spans the first and last are drawn, and what is left out is counted."""
    forest = Forest()
    with forest.inside("loop"):
        for index in range(1500):
            forest.call(f"{index}")
            forest.reward(1.0)

    svg = draw_trace(make_trace(forest.spans), limit=40)

    assert len(svg) < 40_000
    said_there = texts(parsed(svg))
    assert "40 of 3,001 spans are drawn" in said_there
    assert "⋯ 2,961 more spans: 1,481 calls, 1,480 rewards" in said_there


def test_a_deep_chain_and_cycles_are_drawn() -> None:
    """Neither nesting nor parents that go in a circle stop the picture."""
    drawn = texts(parsed(draw_trace(make_trace(LOOPED))))
    deep = texts(parsed(draw_trace(make_trace(CHAIN), limit=50)))

    assert "⋯ 19,950 more spans" in deep
    assert {"one", "two", "self"} <= set(drawn)


def test_nothing_recorded_is_a_picture_too() -> None:
    """No span is an empty picture, and spans without length are drawn."""
    assert texts(parsed(draw_trace(make_trace([]))))[0].startswith("nothing recorded · 0 spans")
    parsed(draw_trace(make_trace([Span("t", "s", None, "n", 5, 5)])))


def test_text_is_cut_by_its_width() -> None:
    """Wide characters take two cells, marks on others none; an ellipsis says that it was cut."""
    assert escape("日本語", 5) == "日本…"
    assert escape("abc", 3) == "abc"
    assert escape("abcd", 3) == "ab…"
    assert escape("e\u0301" * 3, 3) == "e\u0301" * 3

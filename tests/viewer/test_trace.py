"""A trace's pages by plain HTTP: rows, chat, tools, tokens, rewards, forms, absurd questions."""

import re
import subprocess
import sys
import textwrap
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest
from tests.viewer.client import Asking, AskingOf
from tests.viewer.spans import TRACE, call, said, span

from lightning_otel import Store, auto_trace, emit_action, emit_observation
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.cli.spans import tree_lines
from lightning_otel.serve.viewer import trace as pages
from lightning_otel.serve.viewer.templating import render_markdown
from lightning_otel.tracing.emitters import reward_span
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.views.differences import compare_traces
from lightning_otel.views.trace import make_trace

PNG = b64encode(b"\x89PNG\r\n\x1a\n and what is drawn").decode()
HTTP, DB = {"http.request.method": "GET"}, {"db.system.name": "postgresql"}
FOREIGN = [
    span(1, attributes={"http.method": "POST"}),
    span(2, 1),
    span(3, 2, attributes=HTTP),
    span(4, 3, attributes=DB),
    span(5, 2, attributes={"note": '"db.system": is text here'}),
]
FOUR = [span(1), span(2, 1), span(3, 2), span(4, 1)]
FORESTS: dict[str, tuple[list[Span], str, str | None]] = {
    # What is in a tree, what its address says, and its rows by depth; any rows, but all of them.
    "below parents": (FOUR, "", "0 work 1, 1 work 2, 2 work 3, 1 work 4"),
    "closed": (FOUR, f"?closed={2:016x},unknown", "0 work 1, 1 work 2, 1 work 4"),
    "HTTP is folded away": (FOREIGN, "", "0 work 1, 1 work 2, 2 work 5"),
    "HTTP is shown": (FOREIGN, "?others=1", "0 work 1, 1 work 2, 2 work 3, 3 work 4, 2 work 5"),
    "only HTTP": ([span(1, attributes=HTTP), span(2, 1, attributes=DB)], "", "0 work 1, 1 work 2"),
    "loop": ([span(1, 2), span(2, 3), span(3, 1)], "", None),
    "own parent": ([span(1, 1), span(2, 1)], "", None),
    "orphans": ([span(1, 99), span(2, 98)], "", None),
    "unended": ([span(1, end_ns=None), span(2, 1, end_ns=None)], "", None),
    "clocks": (
        [span(1, end_ns=1_000), span(2, 1, end_ns=1), span(3, 1, start_ns=0, end_ns=0)], "", None,
    ),
    "twice": ([span(1), span(1), span(2, 1)], "", None),
    "deep": ([span(number, number - 1 or None) for number in range(1, 601)], "", None),
}  # fmt: skip
ROW = re.compile(
    r'id="s-(\w+)" data-row data-depth="(\d+)"(?: data-parent="(\w+)")?.*?class="name"[^>]*>'
    r'(?:<b>.*?</b> )?([^<]*)<.*?(?:<rect x="([\d.]+)" y="1" width="([\d.]+)".*?)?</li>'
)


def read_rows(asking: Asking, path: str) -> list[tuple[str, ...]]:
    """Id, depth, parent, name and bar of every row, those included that come when they are seen."""
    text = asking.get(path).text
    parts = [asking.get(unescape(part)).text for part in re.findall(r'data-load="([^"]*)"', text)]
    return [row for part in (text, *parts) for row in ROW.findall(part)]


@pytest.mark.pain(14)
def test_rows_hold_every_span_once(store: Store, asked: Asking) -> None:
    """Below its parent, folded where it is foreign, with a bar in bounds, whatever spans say."""
    traces = {name: f"{number:032x}" for number, name in enumerate(FORESTS, 1)}
    for name, (spans, _, _) in FORESTS.items():
        store.add([replace(each, trace_id=traces[name]) for each in spans])

    for name, (spans, query, expected) in FORESTS.items():
        rows = read_rows(asked, f"/traces/{traces[name]}{query or '?'}&tab=waterfall")
        told = ", ".join(f"{depth} {named}" for _, depth, _, named, _, _ in rows)
        assert expected is None or told == expected, name
        ids = [row[0] for row in rows]
        if expected is None:
            assert sorted(ids) == sorted({each.span_id for each in spans}), name
        assert all(row[2] in ("", *ids[:at]) for at, row in enumerate(rows)), name
        assert all(0 <= float(row[4]) <= 1000 and 0 < float(row[5]) <= 1000 for row in rows), name
    folded = asked.get(f"/traces/{traces['HTTP is folded away']}").words
    assert "2 HTTP and DB spans hidden" in folded
    assert "work 2 +2 HTTP, DB" in folded


def test_rewards_given_later_stand_below_what_they_judge(store: Store, asked: Asking) -> None:
    """By link to a span or response; those for the rollout at the end; others' not at all."""
    given, answered = said(("user", "hi")), said(("assistant", "ho"))
    first = call(2, 1, given, answered, attributes={c.RESPONSE_ID: "r-2"})
    store.add([span(1), first, call(3, 1, given, answered)])
    store.add(
        [
            reward_span({"by span": 1.0}, span_id=f"{3:016x}"),
            reward_span({"by response": 0.5}, response_id="r-2"),
            reward_span({"of the rollout": 0.25}, rollout_id=TRACE),
            reward_span({"of another": 9.0}, rollout_id="b" * 32),
        ]
    )

    words, told = asked.get(f"/traces/{TRACE}").words, asked.get(f"/traces/{TRACE}?tab=rewards")

    places = [words.index(each) for each in (
        "#0 work 2 ★ 0.5", "reward by response 0.5 → #0 given later",
        "#1 work 3 ★ 1", "reward by span 1 → #1 given later", "reward of the rollout 0.25",
    )]  # fmt: skip
    assert places == sorted(places)
    assert "of another" not in words
    assert "by response 0.5 #0 link" in told.words
    assert "by span 1 #1 link" in told.words


def test_a_reward_leads_to_the_step_that_trains_with_it(store: Store, asked: Asking) -> None:
    """An outcome goes to the main conversation, whoever was asked last, and however long."""
    turns = [("user", "go")]
    spans = [span(1, end_ns=90_000)]
    for number in range(2, 5):
        turns += [("user", f"on {number}")]
        answer = ("assistant", f"answer {number}")
        spans.append(call(number, 1, said(*turns), said(answer)))
        turns.append(answer)
    title = said(("system", "Name this conversation."), ("user", "go"))
    reward = {c.REWARD_VALUE: 1.0, c.REWARD_NAME: "judge"}
    given = span(6, 1, name=c.SPAN_ANNOTATION, attributes=reward)
    store.add([*spans, call(5, 1, title, said(("assistant", "a title"))), given])
    (step,) = (step for step in store.transitions() if step.reward is not None)

    tree, told = asked.get(f"/traces/{TRACE}"), asked.get(f"/traces/{TRACE}?tab=rewards")

    assert step.span_id == f"{4:016x}"
    assert "#2 work 4 ★ 1" in tree.words
    assert "reward judge 1 → #2" in tree.words
    assert "judge 1 #2 outcome" in told.words


def test_a_long_tree_tells_where_each_reward_went(store: Store, asked: Asking) -> None:
    """Of thousands of spans, too."""
    store.add(trace(2_600))

    words = asked.get(f"/traces/{TRACE}").words

    assert "reward judge 0.25 → planner #1" in words


def test_a_fault_is_told_once_where_it_arose(store: Store, asked: Asking) -> None:
    """By the page, the tree, a comparison; an ancestor's other words are another fault."""
    broken = {"status": "ERROR", "status_message": "ToolError: no answer"}
    tool = {c.OPERATION: c.EXECUTE_TOOL}
    spans = [span(1, **broken), span(2, 1, **broken), span(3, 2, attributes=tool, **broken)]
    spans[2] = replace(spans[2], status_message="no answer")
    other = span(4, 1, status="ERROR", status_message="out of memory")
    store.add([*spans, other])

    page, found = asked.get(f"/traces/{TRACE}"), make_trace([*spans, other])

    rows = page.words.partition("4 rows")[2].partition("good")[0]
    assert "2 failed" in page.words
    assert (rows.count("failed"), rows.count("failed no answer")) == (2, 1)
    told = "".join(text for line in tree_lines(found, lambda *_: {}) for text, _ in line)
    assert (told.count("ERROR"), told.count("no answer")) == (2, 1)
    (errors,) = (
        each.b for each in compare_traces(make_trace([]), found).figures if each.name == "errors"
    )
    assert errors == 2


def test_a_call_that_two_recorded_counts_once_in_a_comparison() -> None:
    """With its tokens, as on every page."""
    words = said(("user", "asked")), said(("assistant", "told"))
    counted = {c.RESPONSE_ID: "r", c.INPUT_TOKENS: 3, c.OUTPUT_TOKENS: 2}
    outer = call(1, None, *words, attributes=counted, end_ns=9_000, scope="theirs")
    spans = [outer, call(2, 1, *words, attributes=counted)]

    figures = compare_traces(make_trace([]), make_trace(spans)).figures

    told = {figure.name: figure.b for figure in figures}
    assert (told["spans"], told["calls"], told["tokens in"], told["tokens out"]) == (2, 1, 3, 2)


def test_parts_of_a_page_are_of_the_trace_as_the_page_showed_it(
    store: Store, asked: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of thousands of spans is not read anew for each of them, nor held for ever."""
    store.add([span(1)])

    def count(path: str) -> int:
        return asked.get(f"/traces/{TRACE}{path}").text.count("data-row")

    assert count("") == 1
    store.add([span(2, 1)])
    assert (count("/rows?first=0"), count(""), count("/rows?first=0")) == (1, 2, 2)
    store.add([span(3, 1)])
    monkeypatch.setattr(pages, "KEPT_S", 0.0)
    assert count("/rows?first=0") == 3


def trace(calls: int) -> Iterator[Span]:
    """Two agents by turns, each call with a reward after it; every tenth call fails."""
    end_ns = 10_000 * (calls + 2) + 1_000
    yield span(1, end_ns=end_ns)
    for number, agent in enumerate(("planner", "writer"), 2):
        own = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: agent}
        yield span(number, 1, start_ns=1_000 + number, end_ns=end_ns - number, attributes=own)
    for turn in range(calls):
        # An agent goes on with its last call, and after five begins another conversation.
        number, agent_number, since_ns = 10 + 2 * turn, 2 + turn % 2, 10_000 * (turn + 1)
        told = turn // 2 % 5
        begun = turn - 2 * told
        history = [("user", f"task {begun}")]
        for each in range(begun, turn, 2):
            history += [("assistant", f"answer {each}"), ("user", f"go on {each}")]
        attributes: dict[str, Any] = {
            c.RESPONSE_ID: f"r-{turn}",
            c.OUTPUT_TOKENS: 2,
            c.PROMPT_TOKEN_IDS: encode_ids([range(3 + told)]),
            c.RESPONSE_TOKEN_IDS: encode_ids([[7, turn]]),
            c.RESPONSE_LOGPROBS: encode_logprobs([[-0.1, -0.2]]),
        }
        yield call(
            number, agent_number, said(*history), said(("assistant", f"answer {turn}")),
            start_ns=since_ns, end_ns=since_ns + 5_000, attributes=attributes,
            status="ERROR" if turn % 10 == 9 else "OK",
        )  # fmt: skip
        yield span(
            number + 1, agent_number, name=c.SPAN_ANNOTATION, start_ns=since_ns + 6_000,
            end_ns=since_ns + 6_000, attributes={c.REWARD_VALUE: turn / 8, c.REWARD_NAME: "judge"},
        )  # fmt: skip


def below_title(words: str) -> str:
    """What a trace's page says below its title, which is the first that was asked."""
    return words.partition(" copy ")[2]


def test_a_long_trace_is_told_in_pages(store: Store, asking: AskingOf) -> None:
    """Each message once; tokens and rewards to the last one; a span leads to its page."""
    store.add(trace(600))
    store.add([reward_span({"late": 0.5}, span_id=f"{10:016x}")])
    at, asked = f"/traces/{TRACE}?tab=", asking(store)
    told = {}
    for path in (
        *(f"chat&first={first}" for first in range(0, 540, 50)),
        f"chat&span={10 + 2 * 300:016x}",
        "tokens&first=400",
        "rewards",
        "rewards&first=400",
        "rewards&first=999999",
    ):
        answer = asked.get(at + path)
        assert (answer.status, len(answer.body) < 300_000) == (200, True), path
        told[path] = below_title(answer.words)

    chat = " ".join(words for path, words in told.items() if "chat&first" in path)
    for turn in (0, 1, 300, 597):
        assert len(re.findall(rf"\banswer {turn}\b", chat)) == 1, turn
    assert len(re.findall(r"\btask 0\b", chat)) == 1
    assert len(re.findall(r"\bgo on 301\b", chat)) == 1
    assert "steps 1–50 of 540" in told["chat&first=0"]
    assert "60 calls left out" in told["chat&first=0"]
    assert "failed: the call ended in an error" in told["chat&first=0"]
    assert "steps 151–200" in told[f"chat&span={10 + 2 * 300:016x}"]
    assert "answer 300" in told[f"chat&span={10 + 2 * 300:016x}"]
    assert "chat tools tokens rewards" in asked.get(f"{at}chat").words
    assert "steps 401–540" in told["tokens&first=400"]
    assert "exact 6 2 2" in told["tokens&first=400"]
    assert "rows 1–200 of 601" in told["rewards"]
    assert "late 0.5 planner #0 link" in told["rewards"]
    assert "74.88" in told["rewards&first=400"]
    assert "rows 601–601 of 601" in told["rewards&first=999999"]


def parts(*each: Any, role: str = "user") -> str:
    return orjson.dumps([{"role": role, "parts": each}]).decode()


def test_a_chat_says_every_message_once_and_whole(store: Store, asked: Asking) -> None:
    """Of hundreds of new ones the last, with a link to those before; a branch names its cause."""
    long = [("user", f"message {number}") for number in range(1_000)]
    more = (*long, ("assistant", "one"), ("user", "b"))
    store.add(
        [
            span(1, end_ns=90_000),
            call(2, 1, said(*long), said(("assistant", "one"))),
            call(3, 1, said(*more), said(("assistant", "two")), end_ns=5_000),
            call(4, 1, said(*more[:-1], ("user", "c")), said(("assistant", "three"))),
            call(6, 1, said(("user", "anew")), said(("assistant", "four"))),
        ]
    )

    chat = asked.get(f"/traces/{TRACE}?tab=chat")
    (earlier,) = re.findall(r'href="([^"]*until=\d+[^"]*)"', chat.text)
    before = asked.get(unescape(earlier)).words

    shown = [int(number) for number in re.findall(r"message (\d+)", below_title(chat.words))]
    assert shown == list(range(1_000 - len(shown), 1_000))
    assert f"message {shown[0] - 1}" in before
    assert f"message {shown[0]} " not in before
    for told in (
        "message 999 assistant #0 one user b assistant #1 two",
        "branch 1 parallel history changed: 1,001 messages kept, 1 new user c assistant #1",
        "branch 2 user anew assistant #0 branch 2 four",
    ):
        assert told in chat.words, chat.words[-600:]
    assert chat.words.count(" one ") == 1


def test_a_chat_tells_what_was_seen_before_each_action_marked_by_hand(
    store: Store, asked: Asking
) -> None:
    """Observations stand before the action that answers them, also where a page begins there."""
    with auto_trace(store=store, rollout_id="r", agent="solver"):
        for turn in range(60):
            emit_observation(f"sign {turn}.")
            emit_observation(f"light {turn}.")
            emit_action(f"step {turn}.")
    (trace_id,) = {step.trace_id for step in store.transitions()}

    for first in (0, 50):
        words = asked.get(f"/traces/{trace_id}?tab=chat&first={first}").words
        for turn in range(first, min(first + 50, 60)):
            at = [words.index(f"{noun} {turn}.") for noun in ("sign", "light", "step")]
            assert at == sorted(at)


def test_the_chat_of_a_small_trace_is_whole(store: Store, asking: AskingOf) -> None:
    """Of many short calls each message is there, one of a call with many and a long one too."""
    asked_first = [("user", f"first {number}") for number in range(12)]
    told = [("user", f"turn {number} {'x' * 3_000} end {number}.") for number in range(1, 30)]
    history = [*asked_first, *(each for turn in told for each in (("assistant", "a"), turn))]
    calls = [
        call(
            2 + number, 1, said(*history[: 12 + 2 * number]), said(("assistant", "a")),
            start_ns=1_000 + number, end_ns=1_001 + number,
        )
        for number in range(30)
    ]  # fmt: skip
    store.add([span(1, end_ns=90_000), *calls])

    words = asking(store).get(f"/traces/{TRACE}?tab=chat").words

    assert all(f"first {number}" in words for number in range(12))
    assert all(f"end {number}." in words for number in range(1, 30))
    assert "before this one" not in words


def test_a_chat_tells_agents_and_attempts_apart(store: Store, asked: Asking) -> None:
    """A hand-off is named where an agent begins, and an attempt that is a trace of its own."""
    asks = said(("user", "q"))
    goes_on = said(("user", "q"), ("assistant", "one"), ("user", "go on"))
    for attempt, trace_id in (("1", TRACE), ("2", "b" * 32)):
        own = {c.ROLLOUT_ID: "r", c.ATTEMPT_ID: attempt}
        at: dict[str, Any] = {"trace_id": trace_id}
        planner, writer = ({**own, c.AGENT_NAME: name} for name in ("planner", "writer"))
        store.add(
            [
                span(1, attributes=own, **at),
                call(2, 1, asks, said(("assistant", "one")), attributes=planner, **at),
                call(3, 1, goes_on, said(("assistant", "two")), attributes=writer, **at),
            ]
        )

    for attempt, trace_id in (("1", TRACE), ("2", "b" * 32)):
        chat = asked.get(f"/traces/{trace_id}?tab=chat").words
        assert f"assistant attempt {attempt} planner #0 one" in chat, chat
        assert "writer hand off user q" in chat, chat


MARKDOWN = {
    "# Facts\n1. **COP**": '<p class="head">Facts</p>\n<ol>\n<li><strong>COP</strong></li>',
    "|a|\n|--:|\n|<i>|": "<tbody>\n<tr>\n<td>&lt;i&gt;</td>",
    "```js onload=x\n<script>1</script>\n```": "<code>&lt;script&gt;1&lt;/script&gt;",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "![x](http://evil.example/x.png)": "<p>![x](http://evil.example/x.png)</p>",
    "<http://evil.example>\n\n[x]: //evil": "<p>&lt;http://evil.example&gt;</p>\n<p>[x]: //",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "17*23, 3**4, *not* **5**": "<p>17*23, 3**4, <em>not</em> <strong>5</strong></p>",
    "a&#x202e;b\u202ec": "<p>a&amp;#x202e;b‹U+202E›c</p>",
    ">" * 30 + "deep": f'<p class="data">{"&gt;" * 30}deep</p>',
}


def test_a_search_finds_what_was_said_in_a_long_trace(store: Store, asked: Asking) -> None:
    """Whatever its case and signs, on rows not shown yet; with what is above, and the words."""
    told = said(("user", 'say "it\'s"\n5 %'))
    calls = [call(n, 1, said(("user", "hi")), said(("assistant", "ho"))) for n in range(2, 1000)]
    calls[898] = call(900, 1, told, said(("assistant", "ho")))
    store.add([span(1, name="work 1", end_ns=2_000_000), *calls])

    found, many, none = (
        asked.get(f"/traces/{TRACE}?{urlencode({'q': text})}")
        for text in ('SAY "it\'s"\n5 %', "work 9", "<mark>")
    )

    assert "1 matching span show all spans ▾ work 1 2 ms #898 work 900 say" in found.words
    assert "<mark>say &#34;it&#39;s&#34; 5 %</mark>" in found.text
    assert 'aria-current="true"' in found.text.partition(f's-{900:016x}"')[2][:200]
    assert "111 matching spans" in many.words
    assert "0 matching spans" in none.words


def test_two_traces_stand_side_by_side(store: Store, asked: Asking) -> None:
    """With the figures and lines of the command's comparison; a wrong id keeps the form."""
    other = "b" * 32
    for trace_id, answer in ((TRACE, "<b>four</b>"), (other, "<b>five</b>")):
        spans = [span(1), call(2, 1, said(("user", "2 + 2?")), said(("assistant", answer)))]
        store.add(replace(each, trace_id=trace_id) for each in spans)
    given = reward_span({"correct": 1.0}, rollout_id=TRACE)
    store.add([replace(given, attributes={**given.attributes, "note": "x" * 30_000})])
    assert "reward 1" in asked.get(f"/traces/{TRACE}").words

    found = asked.get(f"/traces/{TRACE}/diff?with={other[:9]}")

    assert "spans 3 2 -1 calls 1 1" in found.words
    assert "reward correct 1 –" in found.words
    assert "1 user: 2 + 2? 1 user: 2 + 2? 2 removed: assistant: <b> four" in found.words
    assert f'href="/traces/{other}/diff?with={TRACE}"' in found.text
    wrong = asked.get(f"/traces/{TRACE}/diff?with=nope")
    assert "no rollout, trace, span or response id begins with 'nope'" in wrong.words
    assert 'value="nope"' in wrong.text


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown_is_laid_out_and_leads_nowhere(text: str) -> None:
    """No element but of a layout, no attribute, no address; nothing of the text is lost."""
    found = render_markdown(text)

    assert MARKDOWN[text] in found
    assert not re.search(r"<(?!/?(p|ol|li|em|strong|code|pre|table|thead|tbody|tr|t[hd])\b)", found)
    assert set(re.findall(r"<\w+ ([^>]*)>", found)) <= {'class="head"', 'class="data"'}


@pytest.mark.pain(13)
def test_a_span_shows_all_that_is_on_it(store: Store, asking: AskingOf) -> None:
    """Parts are named, media not fetched, what is long is cut and had whole, tokens are graded."""
    long = "x" * 5_000_000 + "end"
    odd: list[Any] = [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c", "name": "search", "arguments": {"q": 1}},
        {"type": "tool_call_response", "id": "c", "response": ["found"]},
        {"type": "uri", "modality": "image", "uri": "https://example.com/x.png"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": PNG},
        {"type": "blob", "modality": "image", "mime_type": "image/svg+xml", "content": PNG},
        {"type": "blob", "modality": "image", "mime_type": "text/html", "content": " "},
        {"type": "new kind", "x": 1},
        "bare",
        7,
    ]
    tokens: dict[str, Any] = {
        c.PROMPT_TOKEN_IDS: encode_ids([range(9_999)]),
        c.RESPONSE_TOKEN_IDS: encode_ids([[1, 2, 3, 4, 5]]),
        c.RESPONSE_LOGPROBS: encode_logprobs([[-0.01, -0.5, -1.0, -3.0, -9.0]]),
    }
    ho = said(("assistant", "ho"))
    store.add([span(1), call(2, 1, said(("user", long)), ho), call(3, 1, parts(*odd), ho)])
    tokens["note"] = "y" * 50_000
    # Of 10 MB the store keeps a part, which is no JSON; it is there, with what was cut.
    store.add([call(4, 1, said(("user", "x" * 10_000_000)), ho)])
    store.add([call(5, 1, ho, ho, attributes=tokens)])
    store.add([span(6, 1, attributes={c.OPERATION_OUTPUT: '"a result"'})])
    asked, path = asking(store), f"/traces/{TRACE}/spans"

    def words(number: int, below: str = "") -> str:
        return asked.get(f"/traces/{TRACE}/spans/{number:016x}{below}").words

    assert "8,000 of 5,000,003 characters" in words(2)
    text = asked.get(f"/traces/{TRACE}/spans/{2:016x}/text?side=input&message=0&part=0")
    noted = asked.get(f"/traces/{TRACE}/spans/{5:016x}/text?attribute=note")
    assert (text.text, noted.text) == (long, "y" * 50_000)
    for told in (
        "reasoning, 2 characters hm", 'calls search {"q": 1}', 'tool answered ["found"]',
        "image https://example.com/x.png", "image, image/png 4 characters of base64, not shown",
        'new kind {"type": "new kind", "x": 1}', "bare", 'number {"type": "number", "content": 7}',
    ):  # fmt: skip
        assert told in words(3)
    pictures = re.findall('<img loading[^>]* src="([^"]*)"', asked.get(f"{path}/{3:016x}").text)
    assert len(pictures) == 1
    picture = asked.get(unescape(pictures[0]))
    assert (picture.headers["content-type"], picture.body) == ("image/png", b64decode(PNG))
    whole = asked.get(f"{path}/{3:016x}/text?side=input&message=0")
    assert [each.get("type") for each in orjson.loads(whole.body)["parts"][:2]] == [
        "reasoning", "tool_call",
    ]  # fmt: skip
    cut = words(4)
    assert "Input" not in cut
    assert re.search(rf"{c.INPUT_MESSAGES} .{{2000}} 2,000 of [\d,]{{9}} characters", cut)
    assert "10000" in cut[cut.index(c.CUT) :]
    graded = asked.get(f"/traces/{TRACE}/spans/{5:016x}/tokens")
    assert re.findall(r'class="p(\d)" title="[^"]*">(\d)<', graded.text) == [
        ("0", "1"), ("1", "2"), ("2", "3"), ("3", "4"), ("4", "5"),
    ]  # fmt: skip
    assert "2,000 of 9,999 are shown" in graded.words
    assert "Output a result" in words(6)


def test_tools_are_told_by_spans_and_by_messages(store: Store, asking: AskingOf) -> None:
    """A call of a tool stands once: by its span, or else by what the model asked and was given."""
    asks = [
        {"type": "tool_call", "id": f"c{n}", "name": "search", "arguments": {"q": n}}
        for n in (1, 2)
    ]
    answers = {"type": "tool_call_response", "id": "c2", "response": "found it"}
    tool = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "search", c.TOOL_CALL_ID: "c1"}
    store.add(
        [
            span(1, end_ns=9_000),
            call(2, 1, said(("user", "find")), parts(*asks, role="assistant")),
            span(3, 1, attributes={**tool, c.TOOL_ARGUMENTS: '{"q": 1}', c.TOOL_RESULT: "nothing"}),
            call(4, 1, parts(answers, role="tool"), said(("assistant", "ho"))),
        ]
    )

    told = asking(store).get(f"/traces/{TRACE}?tab=tools").words

    assert "2 calls, 1 tool span in all" in told
    assert re.search(
        r'500 ns c1 arguments {"q": 1} result nothing|0 ms c1 arguments {"q": 1}', told
    )
    assert 'no span, duration unknown c2 arguments {"q": 2} result found it' in told


ABSURD = {
    "/traces?status=x": 400,
    "/traces?agents=x": 400,
    "/rollouts?of=queue&state=x": 400,
    "/traces?rewarded=maybe": 400,
    "/traces?min_reward=NaN": 400,
    "/traces?min_reward=1e999": 400,
    "/traces?max_reward=--1": 400,
    "/traces?since=tomorrow": 400,
    "/traces?page=x": 400,
    "/traces?sort=agents": 400,
    "/traces?q=%00": 400,
    "/traces?q=" + "a" * 3_000: 400,
    "/traces?origin=mars": 400,
    "/traces?q='%20OR%201=1%20--%20%25": 200,
    "/traces?agent=[&model=]&version=%25@%22": 200,
    "/traces/none": 404,
    "/traces/%27%22%3Cx%3E": 404,
    f"/traces/{TRACE}?tab=none": 400,
    f"/traces/{TRACE}?first=-1": 400,
    f"/traces/{TRACE}?first=999999999": 200,
    f"/traces/{TRACE}?tab=chat&first=999999999": 200,
    f"/traces/{TRACE}?tab=chat&until=x": 400,
    f"/traces/{TRACE}?tab=chat&until=999": 200,
    f"/traces/{TRACE}?tab=tools&first=999999999": 200,
    f"/traces/{TRACE}?span=%3Cscript%3E": 200,
    f"/traces/{TRACE}?closed={','.join(['a'] * 500)}": 200,
    f"/traces/{TRACE}/rows?first=999999": 200,
    f"/traces/{TRACE}/rows?first=x": 400,
    f"/traces/{TRACE}/spans/none": 404,
    f"/traces/{TRACE}/spans/none/tokens": 404,
    f"/traces/{TRACE}/spans/{2:016x}/text": 404,
    f"/traces/{TRACE}/spans/{2:016x}/text?attribute=none": 404,
    f"/traces/{TRACE}/spans/{2:016x}/text?side=input&message=9&part=0": 404,
    f"/traces/{TRACE}/spans/{2:016x}/text?side=input&message=x&part=0": 404,
    f"/traces/{TRACE}/spans/{2:016x}/text?side=y&message=0&part=7": 404,
    f"/traces/{TRACE}/spans/{1:016x}/text?side=output&message=-99&part=0": 404,
    f"/traces/{TRACE}/spans/{1:016x}/tokens": 200,
    f"/traces/{TRACE}/raw": 200,
    "/transitions?min_reward=nan": 400,
    "/transitions?max_reward=one": 400,
    "/transitions?since=yesterday-ish": 400,
    "/transitions?capture=perfect": 400,
    "/transitions?agents=re:(": 400,
    "/transitions?agents=" + "x" * 3000: 400,
    "/transitions?mode=a%00b": 400,
    "/transitions?page=0": 400,
    "/transitions?page=9": 200,
    "/transitions?rollout_id=nobody": 404,
    "/?by=nothing": 400,
    "/?metric=%00": 400,
    "/?by=": 200,
    "/?by=time&by=step": 200,
    "/?metric=reward&unknown=%FF%FE": 200,
    "/?by=" + "x" * 60_000: 400,
}


@pytest.fixture
def traced(store: Store, asked: Asking) -> Asking:
    """A served trace of one call."""
    store.add([span(1), call(2, 1, said(("user", "hi")), said(("assistant", "ho")))])
    return asked


def test_absurd_questions_are_refused_or_answered(traced: Asking) -> None:
    """A page that says what can be asked, or a file; never a fault."""
    answers = {path: traced.get(path) for path in ABSURD}

    assert {path: answer.status for path, answer in answers.items()} == ABSURD
    for path, answer in answers.items():
        assert "default-src 'none'" in answer.headers["content-security-policy"], path
        if answer.status != 200:
            assert answer.headers["content-type"] == "text/html; charset=utf-8", path


def test_a_form_gives_a_reward_once(traced: Asking, store: Store) -> None:
    """However often it is sent; what cannot be said, and forms of other sites, give none."""
    at = f"/traces/{TRACE}/spans/{2:016x}/reward"
    own = [traced.post(at, reward="1", feedback_id="f", tab="waterfall") for _ in range(2)]
    told = traced.post(at, reward="-1", text="well done", feedback_id="g")
    fields: tuple[dict[str, str], ...] = ({"reward": "5"}, {}, {"rating": "4"})
    form = "application/x-www-form-urlencoded"
    refused = [
        *(traced.post(at, **each).status for each in fields),
        traced.ask("POST", at, "reward=1", Content_Type=form, Sec_Fetch_Site="cross-site").status,
        traced.ask("POST", at, "reward=1", Content_Type=form, Origin="http://evil.example").status,
        traced.post(f"/traces/{TRACE}/spans/none/reward", reward="1").status,
        traced.get(at).status,
    ]

    ids = {row["value"]: row["span_id"] for row in store.sql("FROM rewards")}
    assert [(each.status, each.headers["location"]) for each in own] == 2 * [
        (303, f"/traces/{TRACE}?span={2:016x}&given=1&reward={ids[1.0]}&tab=waterfall")
    ]
    assert told.status == 303
    assert '<textarea name="text"' in traced.get(f"/traces/{TRACE}?span={2:016x}").text
    assert refused == [400, 400, 400, 403, 403, 404, 405]
    values = [row["value"] for row in store.sql("SELECT value FROM rewards ORDER BY value")]
    assert values == [-1.0, 1.0]


def test_a_form_is_told_apart_by_its_whole_id(
    traced: Asking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id may have 200 characters; where nothing is recorded, that is said."""
    at = f"/traces/{TRACE}/spans/{2:016x}/reward"

    kept = [traced.post(at, reward="1", text=end, feedback_id="f" * 199 + end) for end in "ab"]
    monkeypatch.setenv("LIGHTNING_OTEL", "false")
    refused = traced.post(at, reward="1")

    assert [answer.status for answer in kept] == [303, 303]
    assert refused.status == 400
    assert "Recording is switched off" in refused.words
    assert len(list(store.sql("FROM rewards"))) == 2


def test_a_form_retracts_a_reward_once(traced: Asking, store: Store) -> None:
    """By its span; forms of other sites, and what is no reward, retract nothing."""
    traced.post(f"/traces/{TRACE}/spans/{2:016x}/reward", reward="1")
    (row,) = store.sql("FROM rewards")
    at = f"/traces/{TRACE}/spans/{row['span_id']}/retract"
    form = "application/x-www-form-urlencoded"
    refused = [
        traced.ask("POST", at, "tab=tree", Content_Type=form, Sec_Fetch_Site="cross-site").status,
        traced.post(f"/traces/{TRACE}/spans/{2:016x}/retract").status,
        traced.get(at).status,
    ]
    kept = list(store.sql("FROM rewards"))
    listed = traced.get(f"/traces/{TRACE}?tab=rewards")

    done = traced.post(at, tab="rewards")

    assert (refused, kept) == ([403, 404, 405], [row])
    assert f'formaction="{at}" name="tab" value="rewards"' in listed.text
    assert (done.status, done.headers["location"]) == (303, f"/traces/{TRACE}?tab=rewards")
    after = traced.get(f"/traces/{TRACE}?tab=rewards")
    assert "left out: it was retracted" in after.words
    assert "formaction" not in after.text
    assert traced.post(at).status == 404
    assert list(store.sql("FROM rewards")) == []


WRITER = """
    import sys
    import lightning_otel as lo

    for number in range(40):
        with lo.auto_trace(store=sys.argv[1], agent="writer", task=f"task {number}"):
            lo.emit_action("answer", str(number))
            lo.emit_reward(number / 40)
"""


def test_the_list_is_right_while_eight_agents_write(traced: Asking, store: Store) -> None:
    """Every answer is a page, counts only grow, and in the end every trace is counted."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), store.name]
    writers = [subprocess.Popen(command) for _ in range(8)]
    counts, seen = [], []
    try:
        while any(writer.poll() is None for writer in writers):
            page = traced.get("/traces")
            seen += [page.status, traced.get(f"/traces/{TRACE}").status]
            counts.append(total(page.text))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(10)

    assert set(seen) <= {200}
    assert counts == sorted(counts)
    assert [writer.returncode for writer in writers] == [0] * 8
    assert total(traced.get("/traces").text) == 8 * 40 + 1


def total(page: str) -> int:
    # Above the list, and below a long one.
    (found,) = set(re.findall(r"([\d,]+) traces?</span>", page)) or {"0"}
    return int(found.replace(",", ""))

"""The pages of conversations: what was said as a chat, and what people say of it."""

import itertools
import re

import pytest
from tests.viewer.browsing import Shot, Visits, prefix, violations
from tests.viewer.client import AskingOf
from tests.viewer.spans import call, said, span

from lightning_otel import Store
from lightning_otel.serve.viewer import size_limit
from lightning_otel.types import conventions as c

HOSTILE = "<script>alert(1)</script> ![x](http://evil.example/x.png)"


NUMBERS = itertools.count(1, 10)


def talk(
    store: Store, *texts: str, rollout_id: str, conversation_id: str = "", reward: float = 0.0
) -> None:
    """Record a rollout with one call, which is given what was said so far and answers it."""
    first = next(NUMBERS)
    turns = [(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    own = {c.ROLLOUT_ID: rollout_id, c.AGENT_NAME: "tutor"}
    named = {**own, **({c.CONVERSATION_ID: conversation_id} if conversation_id else {})}
    told = said(("assistant", answer_to(texts[-1])))
    place = {"trace_id": f"{first:032x}"}
    store.add([call(first, None, said(*turns), told, attributes=named, **place)])
    if reward:
        earned = {**own, c.REWARD_VALUE: reward, c.REWARD_NAME: c.PRIMARY_REWARD}
        store.add([span(first + 1, first, name=c.SPAN_ANNOTATION, attributes=earned, **place)])


def answer_to(text: str) -> str:
    """What a model says to something."""
    return f"You said: {text}"


def test_rollouts_of_one_conversation_are_one_row(store: Store, asking: AskingOf) -> None:
    """By its id; others are one by themselves. What was asked first and answered last is told."""
    talk(store, "What is 1*2?", rollout_id="r1", conversation_id="ada")
    talk(store, "Alone", rollout_id="r2", reward=1.0)
    talk(store, "What is 1*2?", "2", "3*4", rollout_id="r3", conversation_id="ada", reward=-1.0)
    asked = asking(store)

    found, one, nobody = (
        asked.get(f"/conversations{query}").words for query in ("", "?id=ad", "?agent=nobody")
    )

    assert re.search(r"ada What is 1\*2\? .*3\*4.* tutor 2 2 -1 .* r2 Alone .* tutor 1 1 1 ", found)
    assert "2 conversations" in found
    assert "1 conversation ada" not in nobody
    assert ("1 conversation" in one, "no conversations" in nobody) == (True, True)


def test_a_conversation_says_each_message_once(store: Store, asking: AskingOf) -> None:
    """What a rollout was given of the one before is folded; answers have their rewards."""
    talk(store, "one", rollout_id="r1", conversation_id="ada", reward=0.5)
    talk(store, "one", answer_to("one"), "two", rollout_id="r2", conversation_id="ada")
    asked = asking(store)

    told = asked.get("/conversations/ada").words

    assert f"user one assistant #0 reward 0.5 {answer_to('one')} r2 " in told
    assert f"user two assistant #0 {answer_to('two')}" in told
    assert told.count(" user ") == 2
    assert "2 rollouts" in told
    assert asked.get("/conversations/nobody").status == 404


def test_long_conversations_show_their_end_and_count_the_rest(
    store: Store, asking: AskingOf
) -> None:
    """Of 300 messages the last 200; the ones before are counted, not silently gone."""
    talk(store, *(f"message {n}" for n in range(300)), rollout_id="long")

    told = asking(store).get("/conversations/long").words

    assert "⋯ 101 earlier messages not shown" in told
    numbers = [int(number) for number in re.findall(r"(?:user|assistant) message (\d+)", told)]
    assert numbers == list(range(101, 300))


def test_huge_rollouts_are_told_of_without_their_messages(
    store: Store,
    asking: AskingOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is bounded: what is too large for a page is linked to, on every page alike."""
    monkeypatch.setattr(size_limit, "MOST_BYTES", 4000)
    talk(store, "x" * 5000, rollout_id="huge", reward=1.0)
    talk(store, "small", rollout_id="small")
    asked = asking(store)

    huge, small, one, listed = (
        asked.get(path).words
        for path in (
            "/conversations/huge",
            "/conversations/small",
            "/rollouts/huge",
            "/transitions",
        )
    )

    assert f"This rollout is {size_limit.TOO_LARGE}" in huge
    assert "user small assistant" in small
    assert f"#0 {size_limit.TOO_LARGE} 1 – done" in one
    assert re.search(rf"#0 small .* #0 {size_limit.TOO_LARGE} 1 ", listed)
    assert "xxxxx" not in huge + one + listed


def test_feedback_by_form_is_kept_once(store: Store, asking: AskingOf) -> None:
    """Sent twice it counts once; what is absurd, and unknown targets, leave no row."""
    talk(store, "hello", rollout_id="r1")
    asked = asking(store)
    (feedback_id,) = re.findall(
        r'name="feedback_id" value="([^"]*)"', asked.get("/conversations/r1").text
    )
    said = {"feedback_id": feedback_id, "rating": "5", "target": "rollout:r1", "text": HOSTILE}

    answers = [asked.post("/conversations/r1/feedback", **said) for _ in range(2)]
    wrong = [
        asked.post("/conversations/r1/feedback", **fields).status
        for fields in (
            {"target": "rollout:nobody", "rating": "1"},
            {"rating": "4"},
            {"target": "rollout:r1"},
            {"target": "rollout:r1", "rating": "6"},
            {"target": "rollout:r1", "rating": "6", "reward": "1"},
            {"target": "rollout:r1", "rating": "nan"},
            {"target": "rollout:r1", "rating": "x"},
            {"target": "trace:r1", "rating": "1"},
            {"target": "rollout:r1", "satisfied": "perhaps"},
        )
    ]
    page = asked.get(answers[0].headers["location"])

    assert [each.status for each in answers] == [303, 303]
    assert wrong == [404, *[400] * 8]
    (step,) = store.transitions(rollout_id="r1")
    assert dict(step.rewards) == {"feedback": 1.0}
    assert "saved as a reward" in page.words
    assert asked.get("/conversations/nobody").status == 404


def test_feedback_by_form_is_told_apart_by_its_whole_id(
    store: Store, asking: AskingOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id may have 200 characters; where nothing is recorded, that is said."""
    talk(store, "hello", rollout_id="r1")
    asked, at = asking(store), "/conversations/r1/feedback"

    kept = [
        asked.post(at, target="rollout:r1", rating="5", text=end, feedback_id="f" * 199 + end)
        for end in "ab"
    ]
    monkeypatch.setenv("LIGHTNING_OTEL", "false")
    refused = asked.post(at, target="rollout:r1", rating="5")

    assert [each.status for each in kept] == [303, 303]
    assert refused.status == 400
    assert "Recording is switched off" in refused.words
    rows = store.sql("SELECT reward FROM spans WHERE reward IS NOT NULL").rows()
    assert len(rows) == 2


def test_a_conversation_is_read_and_judged(visit: Visits, store: Store, shot: Shot) -> None:
    """In a browser: from the list to the chat, all of it text, and a rating that comes back."""
    talk(store, HOSTILE, rollout_id="r1", conversation_id="ada")
    page = visit(store, "/conversations")
    found = {"list": violations(page)}
    page.get_by_role("link", name="ada").click()
    page.wait_for_url("**/conversations/ada")
    found["one"] = violations(page)
    shot(page)
    said = page.locator(".chat").inner_text()
    links = page.locator(".chat a").evaluate_all("all => all.map(each => each.pathname)")
    page.get_by_label("4", exact=True).check()
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**said=1")

    assert HOSTILE in said
    assert page.locator(".chat img").count() == 0
    assert all(link.startswith(f"{prefix(page.url)}/traces/") for link in links)
    assert "0.6 feedback" in page.locator("aside").inner_text()
    assert {name: each for name, each in found.items() if each} == {}

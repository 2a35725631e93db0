"""The pages of conversations: what was said as a chat, and what people say of it."""

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from tests.viewer.asking import Asking
from tests.viewer.visiting import KEY, Visits, prefix, violations

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.serve.viewer import conversations, rollouts, transitions, weighing
from lightning_otel.serve.viewer.selecting import chosen

HOSTILE = "<script>alert(1)</script> ![x](http://evil.example/x.png)"


class Talker:
    """Somebody who talks to a model, turn by turn."""

    def __init__(self, store: Store, server: DemoServer) -> None:
        self.store = store
        self.client = openai.OpenAI(base_url=server.base_url, api_key="none")

    def say(
        self, *texts: str, rollout_id: str, conversation_id: str | None = None, reward: float = 0.0
    ) -> None:
        """A rollout with one call, which is given what was said so far."""
        named = {"conversation_id": conversation_id} if conversation_id else {}
        with auto_trace(store=self.store, rollout_id=rollout_id, agent="tutor", **named):
            roles = ("user", "assistant")
            messages: Any = [
                {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
            ]
            self.client.chat.completions.create(model="toy", messages=messages)
            if reward:
                emit_reward(reward)


def answer_to(text: str) -> str:
    """What the demo's policy says to something that is no question."""
    return f"You said: {text}"


@pytest.fixture
def talker(store: Store, server: DemoServer) -> Any:
    """Talks into an empty store."""
    found = Talker(store, server)
    yield found
    found.client.close()


def test_rollouts_of_one_conversation_are_one_row(store: Store, talker: Talker) -> None:
    """By its id; others are one by themselves. What was asked first and answered last is told."""
    talker.say("What is 1*2?", rollout_id="r1", conversation_id="ada")
    talker.say("Alone", rollout_id="r2", reward=1.0)
    talker.say("What is 1*2?", "2", "3*4", rollout_id="r3", conversation_id="ada", reward=-1.0)

    found: Any = conversations.listed(store, 1)
    one: Any = conversations.listed(store, 1, prefix="ad")
    nobody: Any = conversations.listed(store, 1, agent="nobody")

    assert [(row["id"], row["rollout_ids"], row["reward"]) for row in found["rows"]] == [
        ("ada", ["r1", "r3"], -1.0),
        ("r2", ["r2"], 1.0),
    ]
    assert found["rows"][0]["asked"] == "What is 1*2?"
    assert "3*4" in found["rows"][0]["answered"]
    assert (found["total"], one["total"], nobody["total"]) == (2, 1, 0)


def test_a_conversation_says_each_message_once(store: Store, talker: Talker) -> None:
    """What a rollout was given of the one before is folded; answers have their rewards."""
    talker.say("one", rollout_id="r1", conversation_id="ada", reward=0.5)
    talker.say("one", answer_to("one"), "two", rollout_id="r2", conversation_id="ada")

    found: Any = conversations.read(store, "ada", 1)
    first, second = [
        [
            (said.role, said.parts[0].text, said.reward)
            for talk in each.talks
            for said, _ in talk.messages
        ]
        for each in found["said"]
    ]

    assert [each.rollout_id for each in found["said"]] == ["r1", "r2"]
    assert first == [("user", "one", None), ("assistant", answer_to("one"), 0.5)]
    assert second == [("user", "two", None), ("assistant", answer_to("two"), None)]
    assert found["total"] == 2
    with pytest.raises(NotFoundError):
        conversations.read(store, "nobody", 1)


def test_long_conversations_show_their_end_and_count_the_rest(store: Store, talker: Talker) -> None:
    """Of 300 messages the last 200; the ones before are counted, not silently gone."""
    talker.say(*(f"message {n}" for n in range(300)), rollout_id="long")

    found: Any = conversations.read(store, "long", 1)
    ((talk,),) = [each.talks for each in found["said"]]

    assert (len(talk.messages), talk.hidden) == (200, 101)
    assert talk.messages[0][0].parts[0].text == "message 101"


def test_huge_rollouts_are_told_of_without_their_messages(
    store: Store, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded: what is too large for a page is linked to, on every page alike."""
    monkeypatch.setattr(weighing, "MOST_BYTES", 4000)
    talker.say("x" * 5000, rollout_id="huge", reward=1.0)
    talker.say("small", rollout_id="small")

    (huge,) = conversations.read(store, "huge", 1)["said"]  # type: ignore[misc]  # a list
    (small,) = conversations.read(store, "small", 1)["said"]  # type: ignore[misc]  # a list
    one: Any = rollouts.read(store, "huge")
    listed: Any = transitions.read(store, chosen({}, store), 1)

    assert (huge.is_heavy, len(huge.talks), small.is_heavy, len(small.talks)) == (True, 0, False, 1)
    assert [each.told["observation"] for each in one["steps"]] == [weighing.HEAVY]
    assert [each.step.reward for each in one["steps"]] == [1.0]
    assert [row["observation"] for row in listed["rows"]] == ["small", weighing.HEAVY]


@pytest.mark.parametrize(
    "fields",
    [
        {"rating": "4"},
        {"target": "rollout:r1"},
        {"target": "rollout:r1", "rating": "6"},
        {"target": "rollout:r1", "rating": "nan"},
        {"target": "trace:r1", "rating": "1"},
        {"target": "rollout:r1", "satisfied": "perhaps"},
    ],
)
def test_absurd_feedback_is_refused(store: Store, fields: dict[str, str]) -> None:
    """Before anything is kept."""
    from lightning_otel.rewarding.feedback import emit_feedback

    store.add([])
    with pytest.raises(ConfigError):
        emit_feedback(store=store, **conversations.given(fields))


def test_feedback_by_form_is_kept_once(
    store: Store, talker: Talker, served: Callable[..., str]
) -> None:
    """Sent twice it counts once; unknown targets and other sites leave no row."""
    talker.say("hello", rollout_id="r1")
    asking = Asking(served(store, "", key=KEY))
    (feedback_id,) = re.findall(
        r'name="feedback_id" value="([^"]*)"', asking.get("/conversations/r1").text
    )
    said = {"feedback_id": feedback_id, "rating": "5", "target": "rollout:r1", "text": HOSTILE}

    answers = [asking.post("/conversations/r1/feedback", **said) for _ in range(2)]
    wrong = asking.post("/conversations/r1/feedback", rating="1", target="rollout:nobody")
    page = asking.get(answers[0].headers["location"])

    assert [each.status for each in answers] == [303, 303]
    assert wrong.status == 404
    (step,) = store.transitions(rollout_id="r1")
    assert dict(step.rewards) == {"feedback": 1.0}
    assert "kept as a reward" in page.words
    assert asking.get("/conversations/nobody").status == 404


def test_a_conversation_is_read_and_judged(
    visit: Visits, store: Store, talker: Talker, shot: Callable[..., None]
) -> None:
    """In a browser: from the list to the chat, all of it text, and a rating that comes back."""
    talker.say(HOSTILE, rollout_id="r1", conversation_id="ada")
    page = visit(store, "/conversations")
    found = {"list": violations(page)}
    page.get_by_role("link", name="ada").click()
    page.wait_for_url("**/conversations/ada")
    found["one"] = violations(page)
    shot(page)
    said = page.locator(".chat").inner_text()
    links = page.locator(".chat a").evaluate_all("all => all.map(each => each.pathname)")
    page.get_by_label("4", exact=True).check()
    page.get_by_role("button", name="Keep it as a reward").click()
    page.wait_for_url("**said=1")

    assert HOSTILE in said
    assert page.locator(".chat img").count() == 0
    assert all(link.startswith(f"{prefix(page.url)}/traces/") for link in links)
    assert "0.6 feedback" in page.locator("aside").inner_text()
    assert {name: each for name, each in found.items() if each} == {}

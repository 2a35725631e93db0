"""What was learnt for a kind of task: the version that earned most, or what there is instead."""

import json
from collections.abc import Callable, Iterable
from urllib.parse import quote

import openai
import pytest
from tests.command import invoke
from tests.viewer.browsing import KEY
from tests.viewer.client import Asking

from lightning_otel import Resources, Store, auto_trace, emit_action, emit_reward, learned
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.state import State


@pytest.fixture
def resources(store: Store) -> Resources:
    """Two versions for images, the first live, and one prompt for all."""
    found = Resources(State(store.name))
    found.publish("system_prompt", "Answer.")
    found.publish("system_prompt[image]", "Describe it.")
    found.publish("system_prompt[image]", "Describe it with light and lens.")
    return found


def earn(store: Store, name: str, version: int, rewards: Iterable[float | None]) -> None:
    """Rollouts that were given a version, each with its reward."""
    for index, reward in enumerate(rewards):
        with auto_trace(
            store=store,
            rollout_id=f"{name}-{version}-{index}",
            resources={"*": {name: str(version)}},
        ):
            emit_action("say", "hi")
            if reward is not None:
                emit_reward(reward)


def test_best_version_of_a_category_is_found(store: Store, resources: Resources) -> None:
    """The version whose rollouts earned most is given, with what all of them earned."""
    earn(store, "system_prompt[image]", 1, [0.0, 0.5, 0.1])
    earn(store, "system_prompt[image]", 2, [1.0, 0.5, 0.9, None])
    earn(store, "system_prompt", 1, [5.0, 5.0, 5.0])

    found = learned("image", resources=resources, store=store)
    careful = learned("image", resources=resources, store=store, min_rollouts=4)

    assert str(found.resource) == "system_prompt[image]@2"
    assert found.resource.body["template"] == "Describe it with light and lens."
    assert not found.is_general
    assert found.earned is not None
    assert found.earned.rollouts == 3
    assert found.earned.mean == pytest.approx(0.8)
    assert found.earned.error == pytest.approx(0.1528, abs=1e-4)
    assert [(each.version, each.rollouts) for each in found.versions] == [(2, 3), (1, 3)]
    # Too few rollouts move nobody from what is live.
    assert (careful.resource.version, careful.earned, careful.versions) == (1, None, found.versions)


@pytest.mark.parametrize("way", ["withdraw", "remove", "rollback", "rollback twice"])
def test_withdrawn_version_is_not_the_best(store: Store, resources: Resources, way: str) -> None:
    """However it was taken back, and until it is assigned again; no door lists what it earned."""
    name = "system_prompt[image]"
    earn(store, name, 1, [0.0, 0.5, 0.1])
    earn(store, name, 2, [1.0, 0.5, 0.9])
    resources.set_alias(name, "canary", 2)
    if way == "withdraw":
        resources.withdraw(name, "rude")
    elif way == "remove":
        resources.set_alias(name, "canary", None)
    else:
        resources.promote(name)
        if way == "rollback twice":
            resources.publish(name, "Describe it twice.", alias="live")
            resources.rollback(name)
        resources.rollback(name)

    best = learned("image", resources=resources, store=store)
    rows = json.loads(invoke("resources", "list", "--json", "--store", store.name).stdout)
    (listed,) = (row["withdrawn"] for row in rows if row["name"] == name)
    resources.set_alias(name, "canary", 2)
    again = learned("image", resources=resources, store=store)

    assert (best.resource.version, [row.version for row in best.versions]) == (1, [1])
    assert (listed, again.resource.version) == (2, 2)
    assert resources.withdrawn(name).keys() <= {3}
    resources.promote(name)
    resources.publish(name, "Describe it at length.", alias="live")
    assert 2 not in resources.withdrawn(name)  # it was replaced, which is no judgment


def test_unknown_category_gets_what_all_have(store: Store, resources: Resources) -> None:
    """Where nothing was learnt of a kind of task, the general resource stands in."""
    earn(store, "system_prompt", 1, [0.5])

    found = learned("video", resources=resources, store=store)

    assert (str(found.resource), found.is_general) == ("system_prompt@1", True)
    with pytest.raises(NotFoundError, match=r"neither tone\[video\] nor tone; publish one"):
        learned("video", "tone", resources=resources, store=store)
    with pytest.raises(ConfigError, match="min_rollouts is 0"):
        learned("image", resources=resources, store=store, min_rollouts=0)


def test_model_limits_what_counts(
    store: Store, resources: Resources, client: openai.OpenAI
) -> None:
    """Rewards that another model earned say nothing of this one."""
    name = "system_prompt[image]"
    earn(store, name, 2, [1.0, 1.0, 1.0])
    for _ in range(3):
        with auto_trace(store=store, resources={"*": {name: "1"}}):
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "hi"}]
            )
            emit_reward(0.25)

    found = learned("image", model="toy*", resources=resources, store=store)

    assert found.resource.version == 1
    assert [(each.version, each.mean) for each in found.versions] == [(1, 0.25)]


def test_version_of_the_last_attempt_earned_the_reward(
    store: Store, resources: Resources, served: Callable[..., str]
) -> None:
    """A rollout that was tried again with another version: on every door it is the last one's."""
    name = "system_prompt[image]"
    for attempt, version in (("1", "1"), ("2", "2")):
        with auto_trace(
            store=store, rollout_id="r", attempt_id=attempt, resources={"*": {name: version}}
        ):
            emit_action("say", "hi")
            emit_reward(float(version))

    found = learned("image", resources=resources, store=store, min_rollouts=1)
    used = Asking(served(store, "", key=KEY)).get(f"/resources/{quote(name)}@uses").words

    assert [(each.version, each.mean) for each in found.versions] == [(2, 2.0)]
    assert "@2 2 (n = 1) 1" in used
    assert "@1 – 0" in used

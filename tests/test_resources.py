"""Resources: versions that never change, aliases that move, and who is given which."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_otel import Queue, Resources, Runner, Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ChangedError, ConfigError, NotFoundError
from lightning_otel.state import State
from lightning_otel.types import Prompt
from lightning_otel.types import conventions as c

SECRET = "sk-" + "a1b2c3d4" * 5


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "traces.duckdb")


@pytest.fixture
def resources(place: str) -> Resources:
    """Resources of a state that is not there yet."""
    return Resources(State(place))


def elsewhere(place: str, program: str) -> str:
    """What a program prints in another process; `resources` is there for it."""
    head = (
        "from lightning_otel.resources import Resources\n"
        "from lightning_otel.state import State\n"
        f"resources = Resources(State({place!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_publish_counts_versions_and_keeps_each(resources: Resources) -> None:
    """A version is what was published, whatever comes after it."""
    first = resources.publish("system_prompt", "Be brief.", metrics={"reward": 0.5})
    second = resources.publish(
        "system_prompt", Prompt("Be kind to {name}.", ({"role": "user", "content": "hi"},)),
        parent=1, run_id="run-7",
    )  # fmt: skip

    assert [each.version for each in resources.versions("system_prompt")] == [1, 2]
    assert resources.get("system_prompt", 1) == first
    assert resources.get("system_prompt", 2) == second
    assert first.body == {"template": "Be brief.", "examples": []}
    assert (second.parent, second.run_id, second.kind) == (1, "run-7", "prompt")
    assert len(first.sha256) == 64
    assert first.sha256 != second.sha256
    assert str(second) == "system_prompt@2"
    assert resources.names() == ["system_prompt"]
    # What the newest version says already makes no other, but the alias moves.
    assert resources.get("system_prompt").version == 1
    again = resources.publish("system_prompt", second.body, alias="live")
    assert (again, resources.get("system_prompt")) == (second, second)
    assert resources.publish("system_prompt", "Be brief.").version == 3
    assert resources.publish("other", "x", alias="canary").version == 1
    with pytest.raises(NotFoundError, match="no version of other is live"):
        resources.get("other")


def test_publishers_at_once_get_distinct_versions(resources: Resources, place: str) -> None:
    """Threads and another process publish, and no version is lost, doubled or overwritten."""
    program = """
        for n in range(10):
            resources.publish("p", f"from elsewhere {n}")
    """
    child = threading.Thread(target=elsewhere, args=(place, program))
    child.start()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: resources.publish("p", f"here {n}"), range(20)))
    child.join(30)

    versions = resources.versions("p")
    assert [each.version for each in versions] == list(range(1, 31))
    assert len({each.body["template"] for each in versions}) == 30
    for each in made:
        assert resources.get("p", each.version) == each


def test_of_changes_decided_on_at_once_one_is_done(resources: Resources, place: str) -> None:
    """Whoever looked before another one moved an alias changes nothing, and is told so."""
    others = [Resources(State(place)) for _ in range(4)]
    for number in range(1, 6):
        resources.publish("p", f"text {number}")
    start = threading.Barrier(len(others) + 1)

    def decide(number: int, seen: int) -> str:
        opened = others[number]
        start.wait(20)
        try:
            if number == 0:
                opened.promote("p", last_move=seen)
            else:
                opened.set_alias("p", "live", number, last_move=seen)
        except ChangedError:
            return "refused"
        return "done"

    with ThreadPoolExecutor(len(others)) as pool:
        for _ in range(20):
            resources.set_alias("p", "live", 4)
            resources.set_alias("p", "canary", 5)
            seen = resources.last_move("p")
            told = [pool.submit(decide, number, seen) for number in range(len(others))]
            start.wait(20)
            said = [each.result(20) for each in told]
            resources.set_alias("p", "canary", None)

            assert sorted(said) == ["done", "refused", "refused", "refused"]
            assert resources.aliases("p")["live"] == (said.index("done") or 5)


def test_a_change_and_its_undoing_are_changes(resources: Resources) -> None:
    """What stands as it did was moved all the same, by somebody who had a reason."""
    resources.publish("p", "one")
    resources.publish("p", "two")
    seen = resources.last_move("p")
    resources.publish("p", "three")
    assert resources.last_move("p") == seen
    resources.set_alias("p", "live", 2)
    resources.rollback("p")

    for change in (resources.rollback, resources.promote):
        with pytest.raises(ChangedError, match="somebody changed p meanwhile"):
            change("p", last_move=seen)
    resources.set_alias("p", "canary", 3, last_move=resources.last_move("p"))

    assert resources.promote("p", last_move=resources.last_move("p")).version == 3


def test_promote_and_rollback_move_live(resources: Resources) -> None:
    """Rollback goes back step by step, over promotions, and what it left is never before."""
    for text in ("one", "two", "three"):
        resources.publish("p", text)
    resources.set_alias("p", "live", 2)
    resources.set_alias("p", "canary", 3, weight=0.5)

    assert resources.promote("p").version == 3
    assert resources.aliases("p") == {"live": 3}
    assert resources.rollback("p").version == 2
    resources.set_alias("p", "live", 3)
    assert resources.rollback("p").version == 2
    assert resources.rollback("p").version == 1
    with pytest.raises(ConfigError, match="nothing of p was live before"):
        resources.rollback("p")
    assert resources.get("p").version == 1
    resources.set_alias("p", "live", None)  # leaves the agent to itself
    assert resources.assigned("key") == {}
    assert resources.rollback("p").version == 1


def test_withdrawn_canary_is_given_to_nobody(resources: Resources, place: str) -> None:
    """The alias goes, live stays, and the reason is kept for whoever looks, in any process."""
    resources.publish("p", "one")
    resources.publish("p", "two", alias="canary", weight=1.0)
    assert str(resources.assigned("key")["p"]) == "p@2"

    taken = resources.withdraw("p", "worse by 0.2")

    assert str(taken) == "p@2"
    assert str(resources.assigned("key")["p"]) == "p@1"
    assert resources.aliases("p") == {"live": 1}
    (kept,) = Resources(State(place)).withdrawals("p")
    assert (kept.version, kept.reason) == (2, "worse by 0.2")
    with pytest.raises(NotFoundError, match="p has no canary"):
        resources.withdraw("p")
    resources.publish("p", "three", alias="canary")
    with pytest.raises(NotFoundError, match="p@2 is no canary"):
        resources.withdraw("p", version=2)
    with pytest.raises(NotFoundError, match="there is no resource 'q'"):
        resources.withdraw("q")
    resources.set_alias("p", "canary", 2)
    assert resources.withdraw("p").version == 2
    resources.set_alias("p", "canary", 2)
    resources.set_alias("p", "canary", None)
    reasons = [each.reason for each in resources.withdrawals("p")]
    assert reasons == ["worse by 0.2", "by hand", "by hand"]


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 1.0])
def test_canary_gets_its_share(resources: Resources, weight: float) -> None:
    """The share of keys lies within four standard deviations of the weight."""
    resources.publish("p", "one")
    resources.publish("p", "two", alias="canary", weight=weight)
    count = 4000

    given = [resources.assigned(f"rollout-{n}")["p"].version for n in range(count)]

    deviation = (count * weight * (1 - weight)) ** 0.5
    assert abs(given.count(2) - count * weight) <= 4 * deviation


def test_canary_share_is_even_over_tenths(resources: Resources) -> None:
    """Chi-square: keys fall evenly on tenths of the range, and independently for two names."""
    count = 5000
    shares = {name: [0] * count for name in "pq"}  # a key's: the tenths at which it is no canary
    for name in shares:
        resources.publish(name, "one")
        resources.publish(name, "two")
    for tenth in range(1, 10):
        for name in shares:
            resources.set_alias(name, "canary", 2, weight=tenth / 10)
        for n in range(count):
            for name, version in resources.assigned(f"rollout-{n}").items():
                shares[name][n] += version.version == 1

    for tenths in map(Counter, shares.values()):
        chi_square = sum((tenths[n] - count / 10) ** 2 / (count / 10) for n in range(10))
        assert chi_square < 27.88  # 9 degrees of freedom, one in a thousand
    both = sum(p < 5 and q < 5 for p, q in zip(*shares.values(), strict=True))
    assert abs(both - count / 4) < 4 * (count * 0.25 * 0.75) ** 0.5


def test_assignment_is_sticky_across_processes(resources: Resources, place: str) -> None:
    """A key is given the same version wherever it is asked for; a larger weight takes none away."""
    resources.publish("p", "one")
    resources.publish("p", "two", alias="canary", weight=0.3)
    keys = [f"rollout-{n}" for n in range(200)]

    here = {key for key in keys if resources.assigned(key)["p"].version == 2}
    program = f"print([k for k in {keys!r} if resources.assigned(k)['p'].version == 2])"
    there = set(eval(elsewhere(place, program)))
    resources.set_alias("p", "canary", 2, weight=0.6)
    more = {key for key in keys if resources.assigned(key)["p"].version == 2}

    assert here == there
    assert here < more


def test_agents_own_resource_goes_first(resources: Resources) -> None:
    """`agent/name` is that agent's `name`; others keep theirs; pins go before both."""
    resources.publish("system_prompt", "for all")
    resources.publish("planner/system_prompt", "for the planner")
    resources.publish("planner/system_prompt", "for the planner, better")

    def given(agent: str | None, pinned: Mapping[str, int] | None = None) -> dict[str, str]:
        found = resources.assigned("key", agent=agent, pinned=pinned)
        return {name: str(resource) for name, resource in found.items()}

    assert given("writer")["system_prompt"] == "system_prompt@1"
    assert given("planner")["system_prompt"] == "planner/system_prompt@1"
    assert given(None) == {
        "system_prompt": "system_prompt@1",
        "planner/system_prompt": "planner/system_prompt@1",
    }
    assert given("planner", {"planner/system_prompt": 2}) == {
        "system_prompt": "planner/system_prompt@2",
        "planner/system_prompt": "planner/system_prompt@2",
    }
    assert given("planner", {"system_prompt": 1})["system_prompt"] == "system_prompt@1"
    with pytest.raises(NotFoundError, match="no system_prompt@9"):
        given("planner", {"system_prompt": 9})


def test_stamps_name_each_agents_versions(resources: Resources, place: str) -> None:
    """What is stamped is what each agent was given."""
    resources.publish("system_prompt", "for all")
    resources.publish("planner/system_prompt", "for the planner")

    resources.publish("planner/tool_prompt", "for its tool")

    def writer(task: object, resources: object) -> float:
        return 1.0

    def planner(task: object, resources: object) -> float:
        return 1.0

    def stamps(agent: Callable[[object, object], float]) -> object:
        store, queue = Store(place), Queue(State(place))
        (rollout,) = queue.put(["task"])
        Runner(agent, store=store, queue=queue, resources=resources).run()
        spans = store.spans(rollout_id=rollout.rollout_id)
        (text,) = {span.attributes[c.RESOURCES] for span in spans}
        return json.loads(str(text))

    assert stamps(writer) == {
        "planner": {"planner/system_prompt": "1", "planner/tool_prompt": "1"},
        "*": {"system_prompt": "1"},
    }
    assert stamps(planner) == {
        "*": {"planner/system_prompt": "1", "planner/tool_prompt": "1"},
    }


def test_running_process_picks_up_what_another_published(
    resources: Resources, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as what is known counts as fresh no more, and not before."""
    resources.publish("p", "one")
    assert resources.assigned("key")["p"].version == 1
    monkeypatch.setattr("lightning_otel.resources.FRESH_S", 3600.0)

    elsewhere(place, "resources.publish('p', 'two', alias='live')")
    known = resources.assigned("key")["p"].version
    monkeypatch.setattr("lightning_otel.resources.FRESH_S", 0.0)

    assert (known, resources.assigned("key")["p"].version) == (1, 2)


@pytest.mark.parametrize("act", ["publish", "promote", "rollback"])
def test_what_this_process_changes_is_used_at_once(
    store: Store, server: DemoServer, client: openai.OpenAI, act: str
) -> None:
    """The next rollout of an unchanged agent is made with it, and others of this process, too."""
    resources, other = Resources(State(store.name)), Resources(State(store.name))
    resources.publish("system_prompt", "first")
    resources.publish("system_prompt", "second", alias="live")
    resources.publish("system_prompt", "third", alias="canary", weight=0.0)

    def sent() -> str:
        with auto_trace(store=store, apply=True):
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "hi"}]
            )
        return str((server.log[-1].request or {})["messages"][0]["content"])

    before = sent(), other.assigned("key")["system_prompt"].version
    if act == "publish":
        resources.publish("system_prompt", "fourth", alias="live")
    else:
        getattr(resources, act)("system_prompt")
    after = sent(), other.assigned("key")["system_prompt"].version

    assert before == ("second", 2)
    assert (
        after == {"publish": ("fourth", 4), "promote": ("third", 3), "rollback": ("first", 1)}[act]
    )


def test_assigned_asks_at_most_once_a_second(resources: Resources) -> None:
    """A thousand assignments open the state once."""
    resources.publish("p", "one")
    reads = 0
    read = resources.state.read

    def counted() -> Any:
        nonlocal reads
        reads += 1
        return read()

    resources.state.read = counted  # type: ignore[method-assign]  # counts, and reads

    for n in range(1000):
        resources.assigned(f"rollout-{n}")

    assert reads <= 2


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        ("", None, "has no text"),
        ("   ", "prompt", "has no text"),
        (b"bytes", None, "is bytes"),
        (7, None, "is int"),
        ({}, None, "none of a resource's keys"),
        ({"template": "x", "api_key": "k"}, None, "keys of a server stay with the agent"),
        ({"template": "x", "examples": "y"}, None, "no list"),
        ({"template": "x", "examples": [{"role": "system", "content": "y"}]}, None, "no message"),
        ({"template": "x", "examples": [{"role": "user"}]}, None, "says nothing"),
        ({"template": "x", "examples": [{"role": "user", "content": "\ud800"}]}, None, "JSON"),
        ([{"role": "user", "content": "x"}], None, "begin with the system's"),
        ({"model": ""}, None, "says nothing"),
        ({"model": 3}, None, "the model of p is 3"),
        ({"base_url": "ftp://host/v1"}, None, "base_url of p"),
        ({"base_url": "http://me:secret@host/v1"}, None, "base_url of p"),
        ({"model": "m", "sampling": {"temperature": "hot"}}, None, "temperature of p"),
        ({"model": "m", "sampling": {"temperature": float("nan")}}, None, "temperature of p"),
        ({"model": "m", "sampling": {"messages": []}}, None, "sampling of p has 'messages'"),
        ({"uri": ""}, None, "uri ''"),
        ({"uri": "/w"}, "prompt", "has 'uri', which prompt does not have"),
        ({"template": "x"}, "poem", "no kind 'poem'"),
        ({"template": "x" * (1 << 20)}, None, "holds up to"),
        (f"Use {SECRET}.", None, r"a secret \(api_key\).* from its environment"),
        ({"template": "x", "examples": [{"role": "user", "content": SECRET}]}, None, "a secret"),
        ({"base_url": f"http://host/v1/{SECRET}"}, None, "a secret"),
        ({"uri": f"s3://bucket/{SECRET}"}, None, "a secret"),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_refused(
    resources: Resources, body: object, kind: Any, match: str
) -> None:
    """It is said what is wrong, and nothing is kept."""
    with pytest.raises(ConfigError, match=match) as error:
        resources.publish("p", body, kind=kind)

    assert SECRET not in str(error.value)
    assert resources.names() == []


def test_aliases_are_checked(resources: Resources) -> None:
    """Words, shares and versions that cannot be are refused, and what stood stands."""
    resources.publish("p", "text")

    with pytest.raises(ConfigError, match="no alias can be '2'"):
        resources.set_alias("p", "2", 1)
    with pytest.raises(ConfigError, match="share from 0 to 1"):
        resources.set_alias("p", "canary", 1, weight=1.5)
    with pytest.raises(ConfigError, match="live has no weight"):
        resources.set_alias("p", "live", 1, weight=0.5)
    with pytest.raises(NotFoundError, match="no p@2"):
        resources.set_alias("p", "live", 2)
    with pytest.raises(NotFoundError, match="no canary"):
        resources.promote("p")
    for name in ("get", "versions", "rollback", "promote"):
        with pytest.raises(NotFoundError):
            getattr(resources, name)("q")
    with pytest.raises(ConfigError, match="p is prompt, and this is endpoint"):
        resources.publish("p", {"model": "m"})
    with pytest.raises(NotFoundError, match="no r@4"):
        resources.publish("r", "text", parent=4)
    for name in ("", " x", "a@b", "a,b", "a\nb", "/a", "a/", "a//b", "x" * 201):
        with pytest.raises(ConfigError, match="name"):
            resources.publish(name, "x")
    assert resources.names() == ["p"]
    assert resources.aliases("p") == {"live": 1}


def test_forked_child_reads_and_publishes(resources: Resources) -> None:
    """What was read before the fork is known in the child, and its version counts."""
    resources.publish("p", "one")
    resources.assigned("key")
    child = os.fork()
    if not child:
        good = resources.publish("p", "two", alias="live").version == 2
        os._exit(0 if good and resources.assigned("key")["p"].version == 2 else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert resources.get("p").version == 2


def test_prompt_is_filled_in(resources: Resources) -> None:
    """Doubled braces are text, others stay; what is missing is named with the version."""
    prompt = Prompt('Solve {task} as {{"a": {"b": 1}}} {{task}}, {task}!')
    examples = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    chat = resources.publish("chat", [{"role": "system", "content": "Add {task}"}, *examples])

    assert prompt.placeholders == ("task",)
    assert prompt.format(task="2+2", more=1) == 'Solve 2+2 as {{"a": {"b": 1}}} {task}, 2+2!'
    assert chat.prompt.messages(task="it") == [{"role": "system", "content": "Add it"}, *examples]
    with pytest.raises(ConfigError, match=r"p@1 needs user, and was given task; format\(user=…\)"):
        resources.publish("p", "Solve {task} for {user}").format(task="2+2")
    with pytest.raises(ConfigError, match="no prompt but weights"):
        resources.publish("w", {"uri": "/w"}).format()

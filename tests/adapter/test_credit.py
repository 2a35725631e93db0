"""Which call each reward belongs to: drawn forests, with what each call earns under a rule.

An outcome names each call's reward, with the named rewards where they are not that one; after ``→``
the reward of each rollout, after ``!`` the rewards that were left out, and ``? skipped`` where one
skipped a failed call.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.adapter.forest import Forest, draw, reward_attributes, steps_of, text_of
from tests.viewer.browsing import KEY
from tests.viewer.client import Asking

from lightning_otel import Store, TripletAdapter, plot_training_metrics
from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.rewards import NO_STEP_BEFORE, with_evaluations
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.algorithms.groups import read_members
from lightning_otel.errors import ConfigError
from lightning_otel.resources.comparison import compare_versions
from lightning_otel.types import Call, Credit, CreditRule, Reward
from lightning_otel.types import conventions as c

ALL = " ".join(get_args(Credit))
REASONS = {
    "already": "its call already has a reward of that name, and the first one counts",
    "before": "no call of the same agent came before it",
    "final": "only the rollout's final reward counts under the rule 'last'",
    "unknown": "its link matches no span of the attempt it belongs to",
    "target": "its link names a span or response that made no transition",
    "failed": NO_STEP_BEFORE,
    "parent": "the call it was given in made no transition",
    "waits": "it waits: no call of its rollout, and nothing that its link names, is in the store",
    "retracted": "it was retracted",
    "infinite": "the reward's value is not finite",
    "3 for 2": "its sequence has 3 numbers for 2 steps",
    "2 for 1": "its sequence has 2 numbers for 1 steps",
    "2 for 3": "its sequence has 2 numbers for 3 steps",
}
PLACES = {
    # From another process, in a trace of its own, without a word of the rollout.
    "LATE": "#rollout=,attempt=,trace=f,process=p9,tick=900",
    "LATER": "#trace=e,process=p8,tick=950",
    "SECOND": "#rollout=r2,trace=b,process=p2,tick=100",
    "RETRY": "#attempt=2,trace=b,process=p2,tick=100",
    "THUMB": f"@.{c.FEEDBACK_RATING}=1",
    "RECEIVED": f"@.{c.RECEIVED}=otlp",
    "AGENT": "a<s:do|u:x b<s:do|u:x|a:a|u:y",
}
"""Words of the drawings."""
TABLE = Path(__file__).resolve().parents[1] / "data" / "rewards.txt"


def read_cases() -> Iterator[tuple[str, tuple[str, dict[str, str]]]]:
    """Yield each case: its name, and indented a drawing, and what comes of it by rules."""
    text = re.sub("^#.*\n", "", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block in re.split(r"\n(?!    )", text.strip()):
        name, drawing, *outcomes = block.split("\n    ")
        rules = (outcome.split(": ", 1) for outcome in outcomes)
        drawn = drawing.format(c=c, **PLACES)
        yield name, (drawn, {ALL if rule == "every" else rule: text for rule, text in rules})


CASES = dict(read_cases())
RUNS = [(name, rule) for name, (_, rules) in CASES.items() for key in rules for rule in key.split()]


def earned(found: Adaptation) -> str:
    """What each rollout earned, in the order of their names."""
    rewards = last_rewards(found.outcomes)
    names = sorted({each.key.rollout_id for each in found.outcomes})
    return ", ".join(f"{rewards[name]:g}" if name in rewards else "-" for name in names)


def outcome(found: Adaptation) -> str:
    """What each call earned, and each rollout, and why the other rewards did not count."""
    words = []
    for step in steps_of(found):
        worth = "-" if step.reward is None else f"{step.reward:g}"
        if step.rewards and step.rewards != {c.PRIMARY_REWARD: step.reward}:
            worth += (
                "(" + ",".join(f"{name}={value:g}" for name, value in step.rewards.items()) + ")"
            )
        words.append(f"{text_of(step.action)}={worth}")
    words.append(f"→ {earned(found)}")
    reasons = {text: name for name, text in REASONS.items()}
    left = [reasons[each.reason] for each in found.report.dropped if each.noun == "reward"]
    if left:
        words.append("! " + ", ".join(sorted(left)))
    if any(note.startswith("reward skipped a failed call") for note in found.report.notes):
        words.append("? skipped")
    return " ".join(words)


@pytest.mark.parametrize(("name", "rule"), RUNS)
@pytest.mark.pain(21)
def test_each_reward_goes_where_it_belongs(name: str, rule: Credit) -> None:
    """To one call, to several, or to none with a reason; never to another in silence."""
    drawing, expected = CASES[name]

    found = TripletAdapter(rule, 0.5).explain(with_evaluations(draw(drawing).spans))

    (wanted,) = (text for rules, text in expected.items() if rule in rules.split())
    assert outcome(found) == wanted


def test_every_door_says_the_same(
    store: Store, served: Callable[..., str], spawn: Callable[..., Any]
) -> None:
    """Steps and rollouts have one reward by Python, SQL, command line, HTTP, page and curve."""
    steps: dict[str, float | None] = {}
    homes: dict[str, tuple[str, str]] = {}
    expected: dict[str, float | None] = {}
    named: dict[AttemptKey, Mapping[str, float]] = {}
    for number, (drawing, rules) in enumerate(CASES.values()):
        texts = [text for rule, text in rules.items() if "previous" in rule.split()]
        if not texts:
            continue
        apart = re.sub(r"(@id=|rollout=)(?=\w)", rf"\g<1>{number}-", drawing)
        spans = draw(apart, rollout_id=f"{number}-r1", process=f"p{number}-").spans
        version = {c.RESOURCES: json.dumps({"*": {"p": str(1 + number % 2)}})}
        store.add([replace(each, attributes={**each.attributes, **version}) for each in spans])
        found = TripletAdapter().explain(with_evaluations(spans))
        named |= {each.key: each.rewards for each in found.outcomes}
        own = {step.span_id: (step.rollout_id, step.attempt_id) for step in steps_of(found)}
        steps |= {step.span_id: step.reward for step in steps_of(found)}
        homes |= {each.span_id: own[each.calls[0]] for each in found.credited}
        sums = re.findall(r"[-\d.]+", texts[0].partition("→")[2].partition(" !")[0])
        names = sorted({each.key.rollout_id for each in found.outcomes})
        rewards = [None if text == "-" else float(text) for text in sums]
        expected |= dict(zip(names, rewards, strict=True))
    store.writer().seal()
    store.settle()
    asking = Asking(served(store, "", key=KEY))

    def run(*args: str) -> Any:
        return json.loads(spawn(*args, "--store", store.name).stdout)

    placed = {row["span_id"]: row for row in store.sql("FROM rewards")}
    exported = spawn("export", "triplets", "--format", "jsonl", "--store", store.name).stdout
    doors: dict[str, Iterable[Mapping[str, Any]]] = {
        "transitions": store.transitions().dicts(),
        "narrow": store.transitions(bodies=False).dicts(),
        "export": map(json.loads, exported.splitlines()),
        "HTTP": map(
            json.loads,
            asking.get("/v1/transitions", Accept="application/x-ndjson").body.splitlines(),
        ),
    }
    assert {key: (placed[key]["rollout_id"], placed[key]["attempt_id"]) for key in homes} == homes
    for door, rows in doors.items():
        assert {row["span_id"]: row["reward"] for row in rows} == steps, door

    lists: dict[str, Iterable[Mapping[str, Any]]] = {
        "SQL": store.sql("FROM rollouts ORDER BY start_ns"),
        "ls": reversed(run("ls", "--all", "--format", "json")),
        "HTTP": reversed(json.loads(asking.get("/v1/rollouts?limit=1000").body)["rollouts"]),
    }
    same = pytest.approx({key: value for key, value in expected.items() if value is not None})
    judged = {
        door: {row["rollout_id"]: row["reward"] for row in rows} for door, rows in lists.items()
    }
    assert named == {
        AttemptKey(row["rollout_id"], row["attempt_id"]): json.loads(row["named_rewards"])
        for row in store.rollouts()
    }
    for door, rows in judged.items():
        assert rows.keys() == expected.keys(), door
    members = read_members(store, StepSelection())
    judged["batches"] = {name: each.reward for name, each in members.items()}
    paths = sorted(store.trajectories(), key=lambda path: path.attempt_id)
    judged["trajectories"] = {**expected, **{path.rollout_id: path.reward for path in paths}}
    for door, rewards in judged.items():
        assert {key: value for key, value in rewards.items() if value is not None} == same, door
    for name, reward in [*expected.items()][::10]:  # a page reads the whole store
        said = re.search(r" Reward (\S+) ", asking.get(f"/rollouts/{name}").words)
        assert said is not None
        assert said[1] == ("–" if reward is None else f"{reward:g}"), name
    (chart,) = plot_training_metrics(store, "reward", window=1)
    curve = sorted(point.value for series in chart.series for point in series.points)
    assert curve == pytest.approx(sorted(value for value in expected.values() if value is not None))
    found = compare_versions("p", 1, 2, store)
    assert found.left_out == {"without a reward": [*expected.values()].count(None)}


_PREFIX = c.REWARD_PREFIX
NOT_CHOSEN = "the credit function chose no call for it"
NO_PRIMARY = "the reward names values, but its first and primary one is missing"
NO_SEQUENCE = "the reward's steps are not a list of numbers and nulls under one name"


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({f"{_PREFIX}.0.value": 1, f"{_PREFIX}.1.value": 2}, {"primary": 1, "reward_1": 2}),
        (reward_attributes(("ok", 1.0), ("ok", 0.0)), {"ok": 1.0}),
        ({f"{_PREFIX}.1.value": 1.0}, NO_PRIMARY),
        ({"note": "fine"}, {}),
        ({**reward_attributes(1.5), c.REWARD_STEPS: [2]}, {"primary": 2.0}),
        ({**reward_attributes(1.5), c.REWARD_STEPS: "[0.5]"}, {"primary": 0.5}),
        *[
            ({**reward_attributes(1.5), c.REWARD_STEPS: steps}, NO_SEQUENCE)
            for steps in ("[]", "[null]", "[NaN]", "[1e999]", "[true]", '["1"]', "{}", "[", 3)
        ],
        ({**reward_attributes(("a", 1.0), ("b", 2.0)), c.REWARD_STEPS: "[1.0]"}, NO_SEQUENCE),
    ],
)  # fmt: skip
def test_what_an_annotation_says_of_a_reward(attributes: dict[str, Any], expected: Any) -> None:
    """Its named numbers, or the reason why they are none."""
    forest = draw("a")
    forest.make(c.SPAN_ANNOTATION, attributes)

    found = TripletAdapter().explain(forest.spans)

    assert (dict(steps_of(found)[0].rewards) or next(iter(found.report.reasons()), {})) == expected


# --- a rule of one's own -------------------------------------------------------------------------


def test_a_rule_of_ones_own_sees_the_calls_before_the_reward() -> None:
    """It is given those of the reward's agent that had ended, in order of their end."""
    seen: list[list[str]] = []

    def watch(reward: Reward, calls: Sequence[Call]) -> None:
        seen.append([text_of(call.action) for call in calls])
        assert [*calls[:1], *calls[1:]] == list(calls)

    spans = draw("root( A[ +slow quick -slow !1 ] B[ b !1 ] !1 )").spans

    found = TripletAdapter(watch).explain(spans)

    assert seen == [["quick", "slow"], ["b"], ["quick", "slow", "b"]]
    assert found.report.reasons() == {NOT_CHOSEN: 3}


@pytest.mark.parametrize(
    ("rule", "expected", "reasons"),
    [
        (lambda _, calls: calls, {"a": 0.5, "b": 1.0}, {}),
        (lambda _, calls: [], {"a": None, "b": None}, {NOT_CHOSEN: 2}),
        (
            lambda _, calls: calls[-2] if len(calls) > 1 else "too few calls",
            {"a": 1.0, "b": None},
            {"too few calls": 1},
        ),
    ],
)  # fmt: skip
def test_a_rule_of_ones_own_places_or_says_why_not(
    rule: CreditRule, expected: dict[str, float | None], reasons: dict[str, int]
) -> None:
    """One call, several, or a text that is the reason in the report."""
    found = TripletAdapter(rule).explain(draw("a !.5 b !1").spans)

    assert {text_of(step.action): step.reward for step in steps_of(found)} == expected
    assert found.report.reasons() == reasons
    assert {each.by for each in found.credited} <= {"custom"}


def test_a_rule_of_ones_own_is_not_asked_about_links_and_parents() -> None:
    """What a reward says itself is no matter of a rule."""
    adapter = TripletAdapter(lambda reward, calls: pytest.fail("asked"))

    assert outcome(adapter.explain(draw("a b@id=r2 a/!.5 !1@id=r2").spans)) == "a=0.5 b=1 → 1.5"


@pytest.mark.parametrize("answer", [3.0, [None]])
def test_a_rule_that_gives_no_call_is_an_error(answer: object) -> None:
    """What is neither a call it was given, nor a reason, is a mistake in the rule."""
    rule: CreditRule = lambda reward, calls: answer  # type: ignore[assignment, return-value]  # noqa: E731

    with pytest.raises((ConfigError, TypeError), match=r"credit function|not iterable"):
        TripletAdapter(rule).adapt(draw("a !1").spans)


# --- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", get_args(Credit))
def test_many_rewards_in_a_deep_chain_are_placed(rule: Credit) -> None:
    """Rewards at every depth of a chain with its only call at the top all find it or a reason."""
    depth = 4_000
    forest = Forest()
    parent = forest.open("top")
    forest.call("only", parent=parent)
    for _ in range(depth):
        parent = forest.open(parent=parent)
        forest.reward(1.0, parent=parent)

    found = TripletAdapter(rule).explain(forest.spans).report

    assert found.rewards == depth
    assert found.rewards_placed == 1
    assert len(found.dropped) == depth - 1


@pytest.mark.parametrize("how", ["agents in each other", "operations", "attributes"])
def test_many_rewards_each_find_their_call(how: str) -> None:
    """A thousand agents in each other, linked operations, or calls with a number of their own."""
    forest = Forest()
    parent = None
    for index in range(1_000):
        if how == "agents in each other":
            parent = forest.open("agent", {c.AGENT_NAME: f"agent {index}"}, parent=parent)
            forest.call(f"{index}", parent=parent)
            forest.reward(float(index), parent=parent)
        elif how == "operations":
            with forest.inside() as operation:
                forest.call(f"{index}")
            forest.reward(float(index), span_id=operation)
        else:
            forest.tag(forest.call(f"{index}"), item=str(index))
    for index in range(1_000) if how == "attributes" else ():
        forest.reward(float(index), match={"item": str(index)})

    found = TripletAdapter().explain(forest.spans)

    assert {text_of(step.action): step.reward for step in steps_of(found)} == {
        f"{index}": float(index) for index in range(1_000)
    }

"""The trainer: an agent or a store, an algorithm, resources that get better; nothing unasked."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Install
from tests.trainer.kills import forked
from tests.trainer.made import Better, Ledger, Seeing, polite, record, reward_later, spans_of
from tests.waiting import wait_until

import lightning_otel as lo
from lightning_otel import Store
from lightning_otel.algorithms import Batch, StepResult, checkpoint, promotion, run
from lightning_otel.algorithms.grpo import GRPO
from lightning_otel.algorithms.microsoft import Microsoft
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, NotFoundError, TrainingError
from lightning_otel.trainer import Trainer
from lightning_otel.types import Resource, Rollout, Trajectory


class Worse(Ledger):
    """Makes a prompt that nobody should be given."""

    def train_step(self, batch: Batch) -> StepResult:
        return StepResult({}, {"prompt": "bad"})


def test_fit_learns_from_tasks_and_publishes_as_canary(store: Store) -> None:
    """Each step runs the newest version; what came of it is live only after held-out reward."""
    trainer = Trainer(
        polite, Better(), store=store, resources={"prompt": "good"}, max_iterations=3, workers=2
    )

    fit = trainer.fit(["a", "b"])

    rewards = [each.value for each in trainer.metrics(["reward"])]
    assert rewards == pytest.approx([0.1, 0.2, 0.3])
    assert (fit.run.status, fit.run.step) == ("succeeded", 3)
    assert trainer.resources.get("prompt", "canary").body["template"] == "good " * 4
    assert trainer.resources.get("prompt").version == 1
    assert fit.promoted == ()
    assert "no held-out tasks" in fit.verdict.reason
    assert fit.resources["prompt"].parent == 3
    assert fit.resources["prompt"].run_id == fit.run.run_id
    steps = [step for path in store.trajectories(mode="train") for step in path.transitions]
    assert sorted(step.resources["prompt"] for step in steps) == ["1", "1", "2", "2", "3", "3"]


def keen(task: Any, resources: Mapping[str, Resource]) -> float:
    """Earn all or nothing: two good words are wanted."""
    prompt = resources["prompt"].format()
    lo.emit_action("say", prompt)
    return float(prompt.count("good") > 1)


@pytest.mark.parametrize(
    ("algorithm", "seed", "tasks", "min_gain", "becomes", "why"),
    [
        (Better, "good", 8, 0.05, "live", "0.000 → 1.000 over 8 tasks, a difference of +1.000 [+"),
        (Better, "good", 7, 0.05, "canary", "different: about 2 more tasks are needed"),
        (Better, "good", 8, 1.5, "canary", "and 1.5 is needed"),
        (Worse, "good good", 8, 0.0, "", "1.000 → 0.000 over 8 tasks, a difference of -1.000 ["),
        (Worse, "good good", 7, 0.0, "canary", "about 2 more tasks are needed"),
        (Worse, "good", 8, 0.0, "canary", "not significantly different, and no end is in sight"),
    ],
)
def test_held_out_rewards_decide(
    store: Store, algorithm: type[Ledger], seed: str, tasks: int, min_gain: float, becomes: str,
    why: str,
) -> None:  # fmt: skip
    """Evidence promotes or withdraws; until there is enough, how much more it takes is told."""
    trainer = Trainer(
        keen, algorithm(), store=store, resources={"prompt": seed}, min_gain=min_gain, workers=2
    )

    fit = trainer.fit(["a"], val=[f"v{number}" for number in range(tasks)])

    aliases = trainer.resources.aliases("prompt")
    assert why in fit.verdict.reason
    assert (fit.promoted, fit.withdrawn) == (
        ("prompt",) if becomes == "live" else (),
        () if becomes else ("prompt",),
    )
    assert aliases == {"live": 1, **({becomes: 2} if becomes else {})}
    kept = [each.reason for each in trainer.resources.withdrawals("prompt")]
    assert kept == ([] if becomes else [f"{fit.verdict.reason} ({fit.run.run_id})"])
    assert {step.mode for step in store.transitions()} == {"train", "val"}


@pytest.mark.parametrize(
    ("breaks", "tasks", "withdrawn", "why"),
    [
        ("hard", ["x", "hard"], (), "1 of 2 held-out tasks have a reward no more"),
        ("", [f"v{number}" for number in range(7)], (), "no held-out task has a reward from both"),
        ("", [f"v{number}" for number in range(8)], ("prompt",), "8 of 8 held-out tasks have"),
    ],
)
def test_candidate_under_which_the_agent_fails_is_not_promoted(
    store: Store, breaks: str, tasks: list[str], withdrawn: tuple[str, ...], why: str
) -> None:
    """A task without a reward is not left out in silence; eight that fail alone are no chance."""

    def fragile(task: str, resources: Mapping[str, Resource]) -> float:
        if task != "a" and breaks in task and resources["prompt"].version > 1:
            raise ValueError("too polite")
        return polite(task, resources)

    trainer = Trainer(fragile, Better(), store=store, resources={"prompt": "good"}, max_attempts=1)

    fit = trainer.fit(["a"], val=tasks)

    assert (fit.promoted, fit.withdrawn) == ((), withdrawn)
    assert why in fit.verdict.reason


@pytest.mark.parametrize("better", [1, 2])
@pytest.mark.parametrize("is_shared", [True, False])
def test_live_traffic_decides(store: Store, better: int, is_shared: bool) -> None:
    """Where no tasks are held out, what agents elsewhere earned with both versions tells."""

    class Watched(Worse):
        def save(self, folder: Path) -> None:
            """While the run goes on, agents elsewhere have worked with what it published."""
            super().save(folder)
            for number in range(9):
                for version in (1, 2):
                    with lo.auto_trace(
                        store=store, task=number if is_shared else f"{number} {version}",
                        mode="test", resources={"*": {"prompt": version}},
                    ):  # fmt: skip
                        lo.emit_action("say", "so")
                        lo.emit_reward(float(version == better))

    with pytest.raises(ConfigError, match="reward_range is 5; it must be tuple"):
        Trainer(polite, reward_range=5)
    trainer = Trainer(
        polite, Watched(), store=store, resources={"prompt": "good"}, reward_range=(0, 1)
    )

    fit = trainer.fit(["a"])

    assert "assumes" not in fit.verdict.reason
    told = {1: "worse in live traffic: prompt@2 − prompt@1 = -1", 2: "better in live traffic"}
    assert fit.verdict.reason.startswith(told[better])
    assert (fit.promoted, fit.withdrawn) == (
        ((), ("prompt",)) if better == 1 else (("prompt",), ())
    )
    assert trainer.resources.aliases("prompt") == {"live": better}


@pytest.mark.parametrize("apply", [True, None])
def test_unchanged_agent_is_trained_through_its_requests(
    store: Store, server: DemoServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch,
    apply: bool | None,
) -> None:  # fmt: skip
    """It takes a task and nothing else; each version reaches the server, where apply is on."""
    monkeypatch.delenv("LIGHTNING_OTEL_APPLY", raising=False)

    class Kinder(Better):
        def train_step(self, batch: Batch) -> StepResult:
            (text,) = super().train_step(batch).resources.values()
            return StepResult({}, {"system_prompt": text})

    def unchanged(task: str) -> float:
        said: Any = [{"role": "system", "content": "own"}, {"role": "user", "content": task}]
        client.chat.completions.create(model="toy", messages=said)
        request = server.log[-1].request or {}
        return str(request["messages"][0]["content"]).count("good") / 10

    trainer = Trainer(
        unchanged, Kinder(), store=store, resources={"system_prompt": "good"}, max_iterations=3,
        apply=apply, max_attempts=1,
    )  # fmt: skip

    if apply is None:
        with pytest.raises(TrainingError, match=r"needs|does not take.*apply=True"):
            trainer.fit(["a"])
        return
    fit = trainer.fit(["a"], val=["b"])

    assert [each.value for each in trainer.metrics(["reward"])] == pytest.approx([0.1, 0.2, 0.3])
    assert (fit.verdict.live, fit.verdict.candidate) == pytest.approx((0.1, 0.4))


@pytest.mark.parametrize("is_here", [True, False])
def test_tasks_that_nobody_waits_for_are_cancelled(store: Store, is_here: bool) -> None:
    """Those that ``run_agent`` asked for and did not finish are begun by no worker any more."""

    class Asking(lo.BaseAlgorithm):
        def run(self, context: lo.algorithms.Context) -> None:
            seen.extend(context.run_agent([1, 2, 3]))

    def act(task: int) -> float:
        is_begun.wait(20)
        fitting.stop()
        return 1.0

    seen: list[Any] = []
    is_begun = threading.Event()
    trainer = Trainer(act if is_here else None, Asking(), store=store, workers=int(is_here))
    fitting = trainer.fit_async()
    is_begun.set()
    if not is_here:
        wait_until(lambda: trainer.queue.counts()["queuing"] == 3)
        fitting.stop()
    fitting.wait(20)

    statuses = [each.rollout.status for each in seen]
    assert statuses == ["succeeded" if is_here else "cancelled", "cancelled", "cancelled"]
    assert {each.rollout.reason for each in seen[1:]} == {"whoever asked for it was stopped"}
    assert trainer.queue.counts()["cancelled"] == (0 if is_here else 3)


def test_interrupted_program_waits_for_no_attempt(store: Store) -> None:
    """Nothing more is begun; the run says that it was interrupted, and can be resumed."""

    def act(task: str) -> float:
        begun.append(task)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        is_told.wait(20)
        return 1.0

    begun: list[str] = []
    is_told = threading.Event()
    trainer = Trainer(act, Ledger(), store=store)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(["a", "b", "c"])
    is_told.set()
    time.sleep(0.3)

    run = trainer.runs.get("@last")
    assert (run.status, run.reason) == ("stopped", "interrupted")
    assert len(begun) == 1


def test_interrupted_wait_ends_the_run(store: Store) -> None:
    """Ctrl-C ends a run that waits for rollouts; the step that was done is kept."""
    record(store, {"a": [1.0], "b": [0.5]})
    trainer = Trainer(store=store, algorithm=Ledger(), min_batch_size=2)
    main_id = threading.main_thread().ident or 0
    trainer.progress = lambda *_: signal.pthread_kill(main_id, signal.SIGINT)
    fitting = trainer.fit_async()

    with pytest.raises(KeyboardInterrupt):
        fitting.wait(60)

    assert not fitting.is_running
    run = trainer.runs.get("@last")
    assert (run.status, run.step) == ("stopped", 1)


def test_fit_on_recorded_rollouts_takes_each_once(store: Store) -> None:
    """The seeds' form: a store and an algorithm; the next call trains on what is new."""
    record(store, {f"t{number}": [0.5] for number in range(5)})
    trainer = Trainer(store=store, algorithm=Ledger(), min_batch_size=2, max_iterations=10)

    first = trainer.train()
    store.add(spans_of("new", "another", 1.0))
    second = trainer.fit()

    assert (first.run.step, second.run.step) == (2, 1)
    assert isinstance(trainer.algorithm, Ledger)
    assert len(set(trainer.algorithm.rows)) == len(trainer.algorithm.rows) == 6


def run_elsewhere(store: Store, trainer: Trainer, *rewards: float | None) -> list[str]:
    """Run a task of the trainer's queue as a runner elsewhere does; return the rollouts' ids."""
    ids = [each.rollout_id for each in trainer.queue.put(["t"], samples=len(rewards))]
    for rollout_id, reward in zip(ids, rewards, strict=True):
        lease = trainer.queue.lease("w")
        assert lease is not None
        store.add(spans_of(rollout_id, "t", reward))
        trainer.queue.succeed(lease, reward)
    return ids


def test_group_waits_until_it_is_whole(store: Store) -> None:
    """A group with a rollout that has no reward yet is learnt from once the reward is there."""
    algorithm = Ledger(2)
    trainer = Trainer(store=store, algorithm=algorithm, samples=2, reward_timeout_s=60)
    ids = run_elsewhere(store, trainer, 1.0, None)
    fitting = trainer.fit_async()
    time.sleep(0.8)
    before = list(algorithm.rows)
    reward_later(store, ids[1], 0.0)
    wait_until(lambda: len(algorithm.rows) == 2)
    fitting.stop()
    fit = fitting.wait(20)

    assert before == []
    assert fit is not None
    assert fit.run.status == "stopped"
    assert sorted(algorithm.rows) == sorted(ids)


def test_groups_of_another_trainer_stay_groups(store: Store) -> None:
    """What was run as samples of one task at one step is compared by whoever learns from it."""
    algorithm = Seeing(2)
    first = Trainer(polite, Ledger(2), store=store, resources={"prompt": "x"}, max_iterations=2)
    first.fit(["a"])
    fit = Trainer(store=store, algorithm=algorithm).fit()

    assert fit.run.step == 1
    assert [len(ids) for ids in algorithm.batch.groups.values()] == [2, 2]


def test_rest_of_a_queued_group_is_counted(store: Store) -> None:
    """Where others ran it: what has no reward is left out of a group that is trained on."""
    algorithm = Ledger(2)
    trainer = Trainer(store=store, algorithm=algorithm)
    ids = run_elsewhere(store, trainer, 1.0, None, 0.0)

    fit = trainer.fit()

    assert sorted(algorithm.rows) == sorted([ids[0], ids[2]])
    assert fit.left_out == {"no reward in time": 1}
    assert trainer.runs.claims(fit.run).counts() == {"trained": 2, "no reward in time": 1}


def test_reward_that_comes_after_training_is_counted(store: Store) -> None:
    """It is not trained on again unless somebody says so."""

    class Late(Ledger):
        def train_step(self, batch: Batch) -> StepResult:
            (step,) = batch[0].transitions
            reward_later(store, batch.rollout_ids[0], -1.0, step.span_id)
            return StepResult()

    record(store, {"t": [1.0]})

    fit = Trainer(store=store, algorithm=Late()).fit()

    assert fit.metrics["late_rewards"] == 1


class Exact(Ledger):
    """Needs tokens, and the probabilities they were sampled with."""

    needs = "exact"
    needs_logprobs = True


class Dry(GRPO):
    """Takes the rows and trains no weights, which would need torch."""

    def __init__(self, **others: Any) -> None:
        super().__init__("any", **others)
        self.seen: list[list[str]] = []
        self.rows: list[str] = []  # type: ignore[assignment]  # of all, as Ledger has them

    def _open(self) -> None: ...

    def train_step(self, batch: Batch) -> StepResult:
        self.seen.append(batch.rollout_ids)
        self.rows += batch.rollout_ids
        return StepResult({}, {"weights": {"uri": f"after {len(self.seen)}"}})

    def save(self, folder: Path) -> None:
        """Write nothing."""


def rollouts(**tasks: list[float | None]) -> list[dict[str, Any]]:
    """Return what :func:`spans_of` takes, of each task's rewards; ids are r0, r1, …."""
    pairs = [(task, reward) for task, rewards in tasks.items() for reward in rewards]
    return [
        {"rollout_id": f"r{n}", "task": task, "reward": reward}
        for n, (task, reward) in enumerate(pairs)
    ]


def exactly(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one rollout with tokens, and others of the same task."""
    found = rollouts(t=[1.0] * (1 + len(more)))
    return [each | own for each, own in zip(found, ({"tokens": True}, *more), strict=True)]


TOKENS = {"tokens": True}
FLAT = "no difference: all rollouts of its group earned the same"
RECORDED: dict[str, tuple[list[dict[str, Any]], Callable[[], Any], dict[str, Any], Any, str]] = {
    # Rollouts, algorithm and options; the batches, what is left out, or why nothing is learnt.
    "val and test stay out": (
        [
            each | {"mode": mode}
            for each, mode in zip(
                rollouts(t=[1.0] * 4), ("train", "val", "test", None), strict=True
            )
        ],
        Ledger, {}, ["r0", "r3"], "",
    ),
    "nothing": ([], Ledger, {}, None, r"needs 1 rewarded rollouts .* has 0 new ones"),
    "no reward": (
        rollouts(a=[None]), Ledger, {}, None, r"1 new ones, 1 of them over and 0 with a reward",
    ),
    "too few": (
        rollouts(a=[1.0]), Ledger, {"min_batch_size": 3}, None,
        r"needs 3 rewarded .* 1 with a reward",
    ),
    "groups of one": (
        rollouts(a=[1.0], b=[0.0]), lambda: Ledger(2), {}, None,
        r"2 rewarded .* groups of at most 1, .*samples",
    ),
    "text among tokens": (
        exactly({}), Exact, {"min_batch_size": 2}, None,
        "mixed capture levels: 1 of 2 rollouts .*text only: no token ids",
    ),
    "raw logprobs": (
        exactly(TOKENS | {"temperature": 0.7, "logprobs_mode": "raw"}), Exact,
        {"min_batch_size": 2}, None, "of the wrong mode: raw",
    ),
    "logprobs of any mode": (
        exactly(TOKENS | {"temperature": 0.7}), Exact, {"min_batch_size": 2}, None,
        "logprobs of an unknown mode",
    ),
    "text after the first step": (
        exactly(TOKENS, {}, TOKENS), Exact, {"min_batch_size": 1}, ["r0", "r1", "r3"],
        "text only: no token ids",
    ),
    "no answer, tokens wanted": (
        [rollouts(t=[1.0])[0] | {"tokens": ()}], Exact, {}, None, "no token ids",
    ),
    "no answer, text wanted": ([rollouts(t=[1.0])[0] | {"tokens": ()}], Ledger, {}, ["r0"], ""),
    "groups that earned the same": (
        [
            each | TOKENS
            for each in rollouts(a=[1, 1], b=[0, 1], c=[0, 0], d=[1, 0.5], e=[0, 1])
        ],
        Dry, {"min_batch_size": 4, "max_iterations": 1}, ["r2", "r3", "r6", "r7"], FLAT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_rollouts_are_learnt_from_or_left(store: Store, case: str) -> None:
    """Refused before a step, and then nothing stays claimed; or trained, the others counted."""
    spans, make, options, rows, why = RECORDED[case]
    for each in spans:
        store.add(spans_of(**each))
    algorithm = make()
    trainer = Trainer(store=store, algorithm=algorithm, **options)

    if rows is None:
        with pytest.raises(TrainingError, match=why):
            trainer.fit()
        assert trainer.runs.claims(trainer.runs.get("@last")).counts() == {}
    else:
        left_out = list(trainer.fit().left_out)
        assert len(left_out) == bool(why)
        assert "".join(left_out).startswith(why)
    assert algorithm.rows == (rows or [])


def test_next_run_keeps_what_was_learnt_from_its_beginning(store: Store, tmp_path: Path) -> None:
    """Before a step of its own; else a kill would lose it, and its rollouts do not come again."""
    (known,) = record(store, {"a": [1.0]})
    trainer = Trainer(store=store, algorithm=Ledger())
    trainer.fit()
    with pytest.raises(TrainingError, match="0 new ones"):
        trainer.fit()
    trainer.save_checkpoint(tmp_path / "kept")
    record(store, {"a": [1.0], "b": [0.5]})
    other = Ledger()

    Trainer(store=store, algorithm=other).resume_from_checkpoint(tmp_path / "kept").fit()

    assert other.rows == [known, "r1-b"]


def test_fresh_rollouts_come_first(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Stale ones use up no step: they are left out with the reason once nothing else is there."""
    old = [f"old {number}" for number in range(6)]
    new = [f"new {number}" for number in range(4)]
    algorithm = Dry(max_staleness=2)
    trainer = Trainer(store=store, algorithm=algorithm, min_batch_size=2, max_iterations=3)
    for number in range(5):
        trainer.resources.publish("weights", {"uri": f"before {number}"}, alias="live")
    for rollout_id, version in [*((each, 2) for each in old), *((each, 4) for each in new)]:
        task = rollout_id if rollout_id in new[2:] else rollout_id[:3]
        store.add(
            spans_of(
                rollout_id, f"{task}?", float(rollout_id[-1]), tokens=True,
                resources={"weights": version},
            )
        )  # fmt: skip
    store.add(spans_of("new 9", "new 2?", 1.0, tokens=True, resources={"weights": 5}))

    fit = trainer.fit()

    assert algorithm.seen == [["new 2", "new 9"], ["new 0", "new 1"]]
    stale = {"stale: sampled by weights more than max_staleness versions old": 6}
    assert fit.left_out == stale
    assert trainer.runs.claims(fit.run).counts() == {"trained": 4, **stale}
    assert caplog.text.count("6 rollouts are left out: stale") == 1


def test_rows_of_unknown_age_are_left_out(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Spans without a version are no fresh ones; without a limit they train, and are counted."""
    for number in range(4):
        store.add(spans_of(f"r{number}", "q?", float(number), tokens=True))
    trainer = Trainer(store=store, algorithm=Dry(max_staleness=2), min_batch_size=2)
    trainer.resources.publish("weights", {"uri": "first"}, alias="live")

    with pytest.raises(TrainingError, match=r"4 × unknown version"):
        trainer.fit()

    assert "--apply" in caplog.text
    assert "LIGHTNING_OTEL_STATE" in caplog.text


def test_a_trainer_that_announces_sets_the_share_it_needs(store: Store) -> None:
    """All rollouts get what is announced, unless a canary stands with a share of its own."""
    shares = []
    for share in (None, 0.25):
        for number in range(2):
            store.add(spans_of(f"{share}-{number}", "q?", float(number), tokens=True))
        algorithm = Dry(announce=lambda _: {})
        trainer = Trainer(store=store, algorithm=algorithm, min_batch_size=2, max_iterations=1)
        if share is not None:
            trainer.resources.set_alias("weights", "canary", 1, weight=share)
        trainer.fit()
        shares.append(trainer.resources.canary_weight("weights"))

    assert shares == [1.0, 0.25]


def raise_memory() -> StepResult:
    """Fail as a trainer does."""
    raise RuntimeError("no memory left")


class Broken(Ledger):
    """Does in its step what it is given, and remembers what it is given."""

    extra = "train"

    def __init__(self, act: Callable[[], object], state: object = None) -> None:
        super().__init__()
        self.act, self.state = act, state

    def train_step(self, batch: Batch) -> Any:
        super().train_step(batch)
        return self.act()

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def publishing(resources: dict[str, Any]) -> Broken:
    """Return an algorithm that makes these."""
    return Broken(lambda: StepResult({}, resources))


@pytest.mark.parametrize(
    ("algorithm", "error", "message"),
    [
        (publishing({"prompt": {"template": 5}}), ConfigError, "prompt"),
        (
            publishing({"prompt": {"model": "m"}}),
            ConfigError,
            "prompt is prompt, and what the step made is endpoint",
        ),
        (publishing({"agent/": "text"}), ConfigError, "has an empty part"),
        (Broken(raise_memory), RuntimeError, "no memory left"),
        (
            Broken(lambda: __import__("no_such_library")),
            ConfigError,
            r"no_such_library.*pip install .*\[train\]'",
        ),
        (
            Broken(StepResult, threading.Lock()),
            ConfigError,
            r"state_dict\(\) of Broken is no JSON.*save\(\)",
        ),
    ],
)
def test_step_that_fails_is_not_kept(
    store: Store, algorithm: Broken, error: type[Exception], message: str
) -> None:  # fmt: skip
    """Nothing is acknowledged, so that it can be taken again; who waits for the run is told."""
    record(store, {"t": [1.0]})
    trainer = Trainer(store=store, algorithm=algorithm, resources={"prompt": "good"})

    with pytest.raises(error, match=message) as raised:
        trainer.fit_async(follow=False).wait(20)

    run = trainer.runs.get("@last")
    assert (run.status, run.step) == ("failed", 0)
    assert run.reason.startswith(f"{raised.type.__name__}: ")
    assert trainer.runs.claims(run).counts() == {}


def test_rollouts_of_a_step_that_are_of_no_use_are_told_of(store: Store) -> None:
    """One that raises, hangs or has no reward is data, as long as others of the step are."""

    async def agent(task: str) -> float | None:
        lo.emit_action("say", task)
        if task == "bad":
            raise ValueError("no idea")
        await asyncio.sleep(60 if task == "slow" else 0)
        return None if next(numbers) == 1 else 1.0

    numbers = itertools.count()
    trainer = Trainer(
        agent, Ledger(2), store=store, samples=3, max_attempts=1, timeout_s=2, workers=3,
        reward_timeout_s=0.3,
    )  # fmt: skip

    fit = trainer.fit(["good", "bad", "slow"])

    assert fit.left_out == {"failed": 6, "no reward in time": 1}
    assert (fit.metrics["rollouts"], fit.metrics["reward"]) == (2, 1.0)
    assert fit.metrics["left_out/no reward in time"] == 1
    slow = trainer.evaluate(["slow"])
    assert slow.unrewarded == {"timed out: the attempt took longer than 2 s": 1}
    with pytest.raises(TrainingError, match=r"none of the 6 .* step 1 .*ValueError: no idea"):
        trainer.fit(["bad", "bad"])
    assert trainer.runs.get("@last").status == "failed"


def test_advantages_compare_the_rollouts_of_the_batch(store: Store) -> None:
    """Groups are those that were claimed, whatever else the store holds."""
    record(store, {"t": [0.0, 1.0, 2.0], "u": [5.0]})
    algorithm = Seeing(2)

    Trainer(
        store=store, algorithm=algorithm, max_iterations=1, select={"advantage": "dr_grpo"}
    ).fit()

    batch = algorithm.batch
    found = {p.rollout_id: p.transitions[0].advantage for p in batch}
    assert found == {"r0-t": -1.0, "r1-t": 0.0, "r2-t": 1.0}
    assert batch.rewards == {"r0-t": 0.0, "r1-t": 1.0, "r2-t": 2.0}
    assert {p.transitions[0].group_id for p in batch} == set(batch.groups)


def test_rollouts_of_a_task_claimed_at_two_looks_are_all_kept(store: Store) -> None:
    """What comes while a batch is gathered joins its group, and none of it is trained on again."""

    class Picky(Ledger):
        def unfit(self, trajectories: Sequence[Trajectory]) -> str:
            if trajectories[0].rollout_id != "r2-t":
                return ""
            store.add([*spans_of("late-1", "t", 0.5), *spans_of("late-2", "t", 0.7)])
            return "of no use"

    record(store, {"t": [0.0, 1.0, 2.0]})
    algorithm = Picky(2)
    trainer = Trainer(store=store, algorithm=algorithm, min_batch_size=3)

    fit = trainer.fit()

    assert sorted(algorithm.rows) == ["late-1", "late-2", "r0-t", "r1-t"]
    assert (fit.metrics["rollouts"], fit.left_out) == (4, {"of no use": 1})
    with pytest.raises(TrainingError, match="has 0 new ones"):
        trainer.fit()


def test_a_batch_that_stays_too_small_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was claimed for it is there for others while the result is still compared."""
    taken: list[set[str]] = []

    class Picky(Ledger):
        def unfit(self, trajectories: Sequence[Trajectory]) -> str:
            return "of no use" if trajectories[0].rollout_id == "r3-d" else ""

    def promote(found: run.Run) -> Any:
        taken.append(set(found._claims.read_taken()))
        return promotion.promote(found)

    monkeypatch.setattr(run, "promote", promote)  # the comparison may take hours
    record(store, {"a": [1.0], "b": [0.5], "c": [1.0], "d": [0.0]})

    Trainer(store=store, algorithm=Picky(), min_batch_size=2).fit()

    assert taken == [{"r0-a", "r1-b", "r3-d"}]


def test_fit_async_follows_a_store_that_is_written_on(store: Store) -> None:
    """Experience that comes while it waits is trained on; stopping keeps what was learnt."""
    algorithm = Ledger()
    trainer = Trainer(store=store, algorithm=algorithm, min_batch_size=2)
    fitting = trainer.fit_async()
    agent = subprocess.Popen([sys.executable, "-c", AGENT, store.name])
    wait_until(lambda: bool(trainer.runs.all()) and trainer.runs.get("@last").step == 2)
    is_writing = agent.poll() is None
    fitting.stop()

    fit = asyncio.run(awaited(fitting))

    assert fit.run.status == "stopped"
    assert not fitting.is_running
    assert fit.run.step >= 2
    assert algorithm.rows == [f"r{number}" for number in range(2 * fit.run.step)]
    assert is_writing
    agent.kill()
    agent.wait()


AGENT = """
import itertools, sys, time
import lightning_otel as lo
for number in itertools.count():
    with lo.auto_trace(store=sys.argv[1], rollout_id=f"r{number}", task=number):
        lo.emit_action("say", number)
        lo.emit_reward(1.0)
    time.sleep(0.2)
"""


async def awaited(given: Any) -> Any:
    return await given


def test_store_of_another_machine_is_learnt_from(
    store: Store,
    served: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rollouts come over HTTP; what was claimed and learnt lies where the trainer is."""
    monkeypatch.chdir(tmp_path)
    record(store, {"a": [1.0, 0.0], "b": [0.5]})
    remote = Store(served(store))
    algorithm = Ledger(2)

    fit = Trainer(store=remote, algorithm=algorithm).train()

    assert sorted(algorithm.rows) == ["r0-a", "r1-a"]
    assert (fit.run.status, fit.run.step) == ("succeeded", 1)
    assert (tmp_path / ".lightning" / "runs" / fit.run.run_id / "checkpoints").is_dir()


def test_resume_goes_on_where_the_run_was(store: Store, tmp_path: Path) -> None:
    """From a saved checkpoint, elsewhere; rows after it come again, those before do not."""
    record(store, {f"t{number}": [1.0] for number in range(4)})
    trainer = Trainer(store=store, algorithm=Ledger(), min_batch_size=1, max_iterations=2)
    trainer.fit()
    saved = trainer.save_checkpoint(tmp_path / "latest.pt")
    more = Trainer(store=store, algorithm=Ledger(), min_batch_size=1, max_iterations=3)
    more.resume_from_checkpoint().fit()

    again = Trainer(store=store, algorithm=Ledger(), min_batch_size=1)
    fit = again.resume_from_checkpoint(saved).fit()

    assert isinstance(again.algorithm, Ledger)
    assert again.algorithm.rows == ["r0-t0", "r1-t1", "r2-t2", "r3-t3"]
    assert len(trainer.runs.all()) == 1
    assert (fit.run.run_id, fit.run.step) == (trainer.runs.all()[0].run_id, 4)
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} == {".json", ".txt"}
    trainer.save_checkpoint(saved)  # it may be replaced


def test_checkpoint_of_another_algorithm_is_refused(store: Store, tmp_path: Path) -> None:
    """As are one that is damaged, one of a later release, and what is none."""
    record(store, {"t": [1.0]})
    trainer = Trainer(store=store, algorithm=Ledger())
    trainer.fit()
    saved = trainer.save_checkpoint(tmp_path / "saved")
    other = Trainer(store=store, algorithm="baseline")
    same = Trainer(store=store, algorithm=Ledger())

    for place in (saved, "@last"):
        with pytest.raises(TrainingError, match="of Ledger, not of baseline"):
            other.resume_from_checkpoint(place)
    with pytest.raises(TrainingError, match="no checkpoint at"):
        same.resume_from_checkpoint(tmp_path / "nosuch")
    with pytest.raises(NotFoundError, match="no training run"):
        same.resume_from_checkpoint("nosuch")
    header = saved / "checkpoint.json"
    found = json.loads(header.read_text())
    for text, message in (
        (header.read_text()[:-5], "is damaged"),
        (json.dumps({**found, "format": 9}), "has format 9"),
    ):
        header.write_text(text)
        with pytest.raises(TrainingError, match=message):
            same.resume_from_checkpoint(saved)
    with pytest.raises(TrainingError, match="is there and no checkpoint"):
        trainer.save_checkpoint(tmp_path)


def test_resume_elsewhere_begins_a_run_with_what_was_learnt(store: Store, tmp_path: Path) -> None:
    """A checkpoint that was carried to another place is kept there at once."""
    record(store, {"t": [1.0]})
    first = Trainer(store=store, algorithm=Ledger())
    first.fit()
    saved = first.save_checkpoint(tmp_path / "saved")
    other = Store(tmp_path / "other")
    with pytest.raises(TrainingError, match="needs 1 rewarded"):
        Trainer(store=other, algorithm=Ledger()).resume_from_checkpoint(saved).fit()

    record(other, {"u": [1.0]})
    again = Trainer(store=other, algorithm=Ledger())
    again.resume_from_checkpoint().fit()

    assert isinstance(again.algorithm, Ledger)
    assert again.algorithm.rows == ["r0-t", "r0-u"]


def run_killed(store: Store, begun: Path, *, is_killed: bool) -> None:
    """Train three steps of two tasks; kill this process in the second rollout of the second."""

    def act(task: str, resources: Mapping[str, Resource], rollout: Rollout) -> float:
        with begun.open("a") as file:
            file.write(f"{rollout.rollout_id} {rollout.attempts}\n")
        if is_killed and len(begun.read_text().splitlines()) == 4:
            helper = os.fork()  # as agents do that work in processes
            if not helper:
                time.sleep(60)
                os._exit(0)
            begun.with_suffix(".helper").write_text(str(helper))
            os.kill(os.getpid(), signal.SIGKILL)
        return polite(task, resources)

    trainer = Trainer(act, Ledger(), store=store, resources={"prompt": "good"}, max_iterations=3)
    if not is_killed:
        trainer.resume_from_checkpoint()
    trainer.fit(["a", "b"])


def test_killed_and_resumed_run_trains_on_every_task_once(store: Store, tmp_path: Path) -> None:
    """What had ended is not run again, what was cut short is tried again, whoever outlived it."""
    begun = tmp_path / "begun"

    ended = forked(lambda: run_killed(store, begun, is_killed=True))
    again = forked(lambda: run_killed(store, begun, is_killed=False))
    os.kill(int(begun.with_suffix(".helper").read_text()), signal.SIGKILL)

    assert (os.WTERMSIG(ended), again) == (signal.SIGKILL, 0)
    tried = [line.split() for line in begun.read_text().splitlines()]
    ids = [rollout_id for rollout_id, _ in tried]
    assert [attempt for _, attempt in tried] == ["1", "1", "1", "1", "2", "1", "1"]
    assert ids[3] == ids[4]
    (trainer_run,) = (runs := Trainer(store=store).runs).all()
    held = checkpoint.read(Path(runs.checkpoints(trainer_run.run_id)[0].place))
    assert sorted(held.state["rows"]) == sorted(set(ids))
    assert len(set(ids)) == 6


def test_failed_step_is_taken_again_with_its_rollouts(store: Store) -> None:
    """A resumed run tells its progress on, and runs no task of the failed step twice."""

    class Stumbling(Ledger):
        stumbles = True

        def train_step(self, batch: Batch) -> StepResult:
            if batch.number == 2 and Stumbling.stumbles:
                raise RuntimeError("no memory left")
            return super().train_step(batch)

    told: list[tuple[int, int | None, float]] = []
    first = Trainer(polite, Stumbling(), store=store, resources={"prompt": "x"}, max_iterations=3)
    first.progress = lambda step, of, metrics: told.append((step, of, metrics["rollouts"]))
    with pytest.raises(RuntimeError):
        first.fit(["a", "b"])
    Stumbling.stumbles = False
    again = Trainer(polite, Stumbling(), store=store, max_iterations=3, progress=first.progress)
    again.resume_from_checkpoint().fit(["a", "b"])

    rollouts = [row["rollout_id"] for row in store.rollouts()]
    assert isinstance(again.algorithm, Ledger)
    assert sorted(again.algorithm.rows) == sorted(rollouts)
    assert len(rollouts) == 6
    assert told == [(1, 3, 2.0), (2, 3, 2.0), (3, 3, 2.0)]


def test_run_that_goes_back_takes_the_rollouts_it_ran(store: Store, tmp_path: Path) -> None:
    """Those of steps after an older checkpoint are there already, and no attempt is made twice."""
    first = Trainer(polite, Ledger(), store=store, resources={"prompt": "x"}, max_iterations=1)
    first.fit(["a"])
    saved = first.save_checkpoint(tmp_path / "saved")
    for _ in range(2):
        trainer = Trainer(polite, Ledger(), store=store, max_iterations=3)
        fit = trainer.resume_from_checkpoint(saved).fit(["a"])

    assert fit.run.step == 3
    rows = store.rollouts().rows()
    assert len(rows) == 3
    assert {row["spans"] for row in rows} == {rows[0]["spans"]}
    assert isinstance(trainer.algorithm, Ledger)
    assert sorted(trainer.algorithm.rows) == sorted(row["rollout_id"] for row in rows)


def test_two_processes_are_not_at_work_on_one_run(store: Store) -> None:
    """The second is refused, and the first does not notice."""
    trainer = Trainer(store=store, algorithm=Ledger())
    fitting = trainer.fit_async()
    wait_until(lambda: bool(trainer.runs.all()) and lock_of(store).exists())
    time.sleep(0.1)
    other = Trainer(store=store, algorithm=Ledger())

    with pytest.raises(TrainingError, match="another process is at work"):
        other.resume_from_checkpoint().fit()

    fitting.stop()
    fit = fitting.wait(20)
    assert fit is not None
    assert fit.run.status == "stopped"


def lock_of(store: Store) -> Path:
    assert store.layout is not None
    return next((store.layout.root / "runs").glob("*/lock"), Path("nosuch"))


def test_evaluate_says_what_the_agent_earns(store: Store) -> None:
    """Of what is live, or of a version that is named; failures are counted, not averaged."""

    def agent(task: str, resources: Mapping[str, Resource]) -> float:
        if task == "hard":
            raise ValueError("no idea")
        return polite(task, resources)

    trainer = Trainer(agent, store=store, resources={"prompt": "good"}, max_attempts=1)
    trainer.resources.publish("prompt", "good good good")

    live = trainer.evaluate(["a", "hard"])
    newer = trainer.evaluate(["a"], {"prompt": 2})

    assert live.reward == pytest.approx(0.1)
    assert live.unrewarded == {"ValueError: no idea": 1}
    assert newer.reward == pytest.approx(0.3)
    assert [len(each.trajectories) for each in newer.rollouts] == [1]
    assert {step.mode for step in store.transitions()} == {"test"}


def test_evaluation_gives_pass_at_k_and_means_by_task(store: Store) -> None:
    """Two of four samples pass one task, none another; one fails and is no zero in the mean."""
    earned = {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.5, None, 0.5, 0.5]}

    def agent(task: str) -> float:
        reward = earned[task].pop(0)
        if reward is None:
            raise ValueError("no idea")
        return reward

    found = Trainer(agent, store=store, max_attempts=1).evaluate(["a", "b"], samples=4)

    assert found.mean()[0::3] == (0.5, (0.5, 0.5))
    assert found.pass_at(1)[:3] == pytest.approx((0.25, 0.0, 0.74), abs=1e-2)
    assert found.pass_at(1).tasks == (0.5, 0.0)
    assert found.pass_at(2).tasks == pytest.approx((1 - 1 / 6, 0.0))
    assert found.pass_at(2, threshold=0.5).tasks == pytest.approx((1 - 1 / 6, 1.0))
    assert found.unrewarded == {"ValueError: no idea": 1}
    with pytest.raises(ConfigError, match=r"pass@5 of 4 samples .* evaluate\(samples=5\)"):
        found.pass_at(5)


def test_recorded_rollouts_are_trained_on_where_recording_is_off(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training reads what is kept; a former switch of its own is named and refuses nothing."""
    record(store, {"t": [1.0]})
    monkeypatch.setenv("LIGHTNING_OTEL", "0")
    monkeypatch.setenv("LIGHTNING_OTEL_TRAIN", "0")

    assert Trainer(store=store, algorithm=Ledger()).fit().run.step == 1
    assert "LIGHTNING_OTEL_TRAIN is gone: nothing trains unasked" in caplog.text


def test_rollouts_are_taken_by_a_runner_elsewhere(store: Store) -> None:
    """With no workers of its own, the trainer waits for those that others run."""
    from lightning_otel import Runner

    trainer = Trainer(store=store, algorithm=Better(), resources={"prompt": "good"}, workers=0)
    runner = Runner(polite, store=store, queue=trainer.queue, resources=trainer.resources)
    stop = threading.Event()
    thread = threading.Thread(target=lambda: runner.run(until_empty=False, stop=stop))
    thread.start()

    fit = trainer.fit(["a"])
    stop.set()
    thread.join(20)

    assert fit.metrics["reward"] == pytest.approx(0.1)


def test_seeds_names_work(store: Store) -> None:
    """An agent may be added later, and trained from a program with an event loop."""
    trainer = Trainer(store=store, algorithm="baseline")
    trainer.add_agent(lambda task: float(task))

    fit = asyncio.run(trainer.run([1, 2, 3]))

    assert fit.metrics["mean_reward"] == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "nosuch"}, "no algorithm 'nosuch'"),
        ({"algorithm": "baselin"}, "did you mean 'baseline'"),
        ({"algorithm": "baseline", "epochs": 3}, "Baseline has no option .epochs."),
        ({"algorithm": Ledger(), "epochs": 3}, "Ledger has no option .epochs."),
        ({"algorithm": Ledger(), "max_iteration": 3}, "did you mean .max_iterations."),
        ({"algorithm": Ledger(2), "samples": 1}, "compares 2 rollouts"),
        ({"min_batch_size": 0}, "min_batch_size is 0"),
        ({"select": {"agent": "x"}}, "no option .agent.; did you mean .agents."),
        ({"resources": {"other": {"template": 5}}}, "other"),
        ({"algorithm": Ledger()}, "there is no agent"),
    ],
)
def test_wrong_options_are_refused(store: Store, given: dict[str, Any], message: str) -> None:
    """When the trainer is made, and not after an hour; without an agent no task can be run."""
    with pytest.raises(ConfigError, match=message):
        Trainer(store=store, **given).fit(["a"])
    with pytest.raises(ConfigError, match=message):
        Trainer(store=store, **given).evaluate(["a"])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Trainers end with all they began."""
    yield
    left = [each.name for each in threading.enumerate() if each.name.startswith("lightning-otel")]
    assert left == []


def test_algorithms_of_agent_lightning_are_its_backends(
    install_agentlightning: Install, store: Store
) -> None:
    """An instance that it made is taken where it runs, and refused where ours do."""
    install_agentlightning("0.3.1")

    trainer = Trainer(lambda task: 1.0, object(), backend="microsoft", store=store)

    assert isinstance(trainer.algorithm, Microsoft)
    with pytest.raises(ConfigError, match=r"algorithm is <object object.*; it must be str"):
        Trainer(lambda task: 1.0, object(), store=store)


def test_hooks_are_refused_by_agent_lightning(
    install_agentlightning: Install, store: Store
) -> None:
    """Its runners call none of ours, and no rollout is run as if they did."""
    install_agentlightning("0.3.1")
    trainer = Trainer(
        lambda task: 1.0, "baseline", backend="microsoft", store=store, hooks=[lo.Hook()]
    )

    with pytest.raises(ConfigError, match="do not call hooks"):
        trainer.fit(["task"])

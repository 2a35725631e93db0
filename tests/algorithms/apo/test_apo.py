"""APO on a scripted task: a real server, a real store, real GEPA; and what users get wrong."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.algorithms.apo.desk import desk

from lightning_otel import Resources, Store, auto_trace, emit_message, emit_reward
from lightning_otel.algorithms import get
from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.state import State
from lightning_otel.trainer import Fit, Trainer
from lightning_otel.types import Rollout

APO: Any = get("apo")

DESK = desk()
Given = Mapping[str, Any]
Act = Callable[..., float | None]


def trainer_of(store: Store, agent: Act | None, apo: Any, **options: Any) -> Trainer:
    """A trainer whose prompt is the example's, tried once a task."""
    resources = options.pop("resources", {"system_prompt": DESK.SEED})
    return Trainer(agent, apo, store=store, resources=resources, max_attempts=1, **options)


def never(prompt: str) -> str:
    """A model that must not be asked."""
    raise AssertionError("the model was asked")


def test_a_wrong_key_is_found_before_agents_run(store: Store) -> None:
    """A server that refuses the key of the writing model is asked first."""

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

    begun: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        apo = APO(model="writer", base_url=f"http://127.0.0.1:{server.server_port}/v1")
        trainer = trainer_of(store, lambda task: begun.append(task), apo)
        with pytest.raises(ConfigError, match="refuses the key"):
            trainer.fit(["a", "b"], ["c", "d"])
        server.shutdown()

    assert begun == []


def test_apo_lifts_the_reward_of_tasks_it_never_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example: prompts tried over HTTP, written anew by what was recorded, and promoted."""
    DESK.main(tmp_path)

    assert "on tasks never seen: 0.00 -> 1.00" in capsys.readouterr().out
    trainer = Trainer(store=Store(tmp_path / "traces.duckdb"))
    (run,) = trainer.runs.all()
    versions = trainer.resources.versions("system_prompt")
    assert [each.parent for each in versions] == [None, 1, 2]
    assert trainer.resources.get("system_prompt") == versions[-1]
    assert versions[-1].run_id == run.run_id
    curve = [each.value for each in trainer.runs.metrics(run.run_id, names=["val_reward"])]
    assert curve == [0.0, 0.5, 1.0]
    curve = [each.value for each in trainer.runs.metrics(run.run_id, names=["reward"])]
    assert curve == [0.0, 0.5]
    store = trainer.store
    calls = store.sql("SELECT agent, count(*) AS n FROM calls GROUP BY agent").rows()
    assert {each["agent"]: each["n"] for each in calls}["apo"] == 2
    assert {step.agent for step in store.transitions(bodies=False).rows()} == {"agent"}


def test_apo_works_on_an_agent_that_knows_nothing_of_it(
    server: DemoServer, client: openai.OpenAI, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `apply` is on, what is tried and what was found replace the agent's own prompt."""
    server.policy = DESK.Model()
    monkeypatch.setenv("LIGHTNING_OTEL_APPLY", "1")

    def agent(task: Any) -> float:
        own = {"role": "system", "content": "Answer."}
        asked = {"role": "user", "content": "What is the capital of Peru?"}
        reply = client.chat.completions.create(model="clerk", messages=[own, asked])
        return float(reply.choices[0].message.content == "LIMA")

    apo = APO(
        model="writer", base_url=server.base_url, candidates=["Write the answer in capitals."]
    )
    fit = trainer_of(store, agent, apo).fit([1], [2])

    assert (fit.verdict.live, fit.verdict.candidate) == (0.0, 1.0)
    end_s, reward = time.monotonic() + 20, 0.0
    while not reward:  # what is live is read in the background, once a second
        assert time.monotonic() < end_s
        with auto_trace(store=store):
            reward = agent(3)
        time.sleep(0.05)


def polite(task: Any, resources: Given) -> float:
    """An agent that calls no model; it is worth as much as its prompt is polite."""
    text = resources["system_prompt"].format()
    emit_message("Hint: say please.")
    return float("please" in text)


def test_apo_tries_given_texts_first_on_one_task_alone(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that somebody wrote needs no model; without validation tasks nothing goes live."""
    apo = APO(reflection_lm=never, candidates=["Answer.", "Answer, please."])

    with caplog.at_level(logging.WARNING):
        fit = (trainer := trainer_of(store, polite, apo)).fit([{"only": "one"}])

    assert "no validation tasks" in caplog.text
    assert fit.metrics["train_reward"] == 1.0
    assert fit.resources["system_prompt"].body["template"] == "Answer, please."
    assert not fit.promoted
    assert trainer.resources.get("system_prompt").version == 1
    assert trainer.resources.get("system_prompt", "canary") == fit.resources["system_prompt"]


def test_apo_learns_from_what_agents_were_asked(store: Store) -> None:
    """Without tasks it takes the recorded ones, of which a third is held out."""
    for n in range(7):
        with auto_trace(store=store, task={"n": n % 6}, mode="test" if n == 5 else None):
            pass
    seen: dict[str, set[int]] = {"train": set(), "val": set()}

    def agent(task: dict[str, int], resources: Given, rollout: Rollout) -> float:
        seen[rollout.mode].add(task["n"])
        return polite(task, resources)

    steps: list[int] = []
    apo = APO(reflection_lm=never, candidates=["Answer, please."], reflection_minibatch_size=9)
    fit = trainer_of(store, agent, apo, progress=lambda step, *_: steps.append(step)).fit()

    assert steps == [1]
    assert seen == {"train": {0, 1, 3, 4}, "val": {2}}
    assert fit.metrics["val_reward"] == 1.0
    assert not fit.promoted


def test_apo_makes_the_prompt_of_one_agent_better(store: Store) -> None:
    """A target may name the agent, as ``agent.name`` too; the next fit begins with what is live."""
    apo = APO(
        reflection_lm=never,
        candidates=["Answer, please."],
        optimization_target="polite.system_prompt",
    )
    trainer = trainer_of(store, polite, apo, resources={"polite/system_prompt": DESK.SEED})

    fit = trainer.fit([1, 2], list(range(3, 11)))
    again = trainer.fit([4], [5])

    assert fit.promoted == ("polite/system_prompt",)
    assert again.verdict.reason == "nothing better was made"
    assert [each.value for each in trainer.metrics(["val_reward"])] == [1.0]


class Mimic:
    """A model that answers as it is shown, or at random where nothing is shown."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """The word asked for, in the case of the last example, if there is one."""
        said = [str(each["content"]) for each in body["messages"]]
        shown = [str(each["content"]) for each in body["messages"] if each["role"] == "assistant"]
        is_large = shown[-1].isupper() if shown else said[-1] < "m"
        return Reply(text=said[-1].upper() if is_large else said[-1])


def test_apo_draws_examples_from_what_went_well(
    store: Store, server: DemoServer, client: openai.OpenAI
) -> None:
    """What earned a reward in training is shown, and other tasks are done like it."""
    server.policy = Mimic()

    def agent(task: Any, resources: Given) -> float:
        asked = [*resources["system_prompt"].prompt.messages(), {"role": "user", "content": task}]
        reply = client.chat.completions.create(model="mimic", messages=asked)
        return float((reply.choices[0].message.content or "").isupper())

    apo = APO(reflection_lm=lambda prompt: DESK.SEED, few_shot=1, num_candidates=4)
    fit = trainer_of(store, agent, apo).fit(["apple", "tea", "corn"], ["wine", "bread"])

    assert fit.verdict.live == 0.5
    assert fit.verdict.candidate == 1.0
    asked, answered = fit.resources["system_prompt"].body["examples"]
    assert (asked["role"], answered["role"]) == ("user", "assistant")
    assert asked["content"] in ("apple", "corn")
    assert answered["content"] == asked["content"].upper()


def test_apo_tells_the_model_why_the_agent_failed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that raised is worth nothing, is counted, and its error is read."""
    asked = []

    def agent(task: int, resources: Given) -> float:
        if task == 2 and "carefully" not in resources["system_prompt"].format():
            raise ValueError("the sum is missing")
        return 0.5

    def model(prompt: str) -> str:
        asked.append(prompt)
        return "Work carefully."

    trainer = trainer_of(store, agent, APO(reflection_lm=model), max_iterations=1)
    fit = trainer.fit([1, 2], [2, 3])

    assert "the sum is missing" in asked[0]
    assert "1 validation tasks are training tasks, too" in caplog.text
    assert fit.metrics["val_reward"] == 0.5
    assert fit.metrics["failed"] == 2
    assert fit.resources["system_prompt"].body["template"] == "Work carefully."


def test_apo_stops_amid_tasks_that_are_not_done(store: Store) -> None:
    """What was left undone is no failure of the agent, and judges nothing."""
    started, released = threading.Event(), threading.Event()

    def agent(task: int, resources: Given) -> float:
        started.set()
        released.wait(20)
        return 0.5

    fitting = trainer_of(store, agent, APO(reflection_lm=never)).fit_async([1], [2, 3])
    started.wait(20)
    fitting.stop()
    released.set()
    fit = fitting.wait(30)

    assert fit is not None
    assert fit.run.status == "stopped"
    assert fit.metrics == {}


@pytest.mark.parametrize(
    ("agent", "options", "why"),
    [
        (lambda task, resources: None, {}, "none of 1 rollouts has a reward; return a number"),
        (
            lambda task, resources: 1 / 0,
            {},
            "the agent failed on each of 1 tasks.*division by zero",
        ),
        (lambda task, resources: 7.0, {}, "a reward is 7.0, above the perfect_score 1.0"),
        (
            lambda task, resources: {"exact": 1.0, "short": 0.0},
            {"evaluation_metric": "kind"},
            "named 'kind'; they have exact, short",
        ),
    ],
)
def test_apo_refuses_rewards_that_teach_nothing(
    agent: Act, options: dict[str, Any], why: str, store: Store
) -> None:
    """The first run of the agent shows it, and the model is not asked at all."""
    trainer = trainer_of(store, agent, APO(reflection_lm=never, **options))

    with pytest.raises((TrainingError, ConfigError), match=why):
        trainer.fit([1, 2], [3])

    (run,) = trainer.runs.all()
    assert run.status == "failed"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "it answered nothing"),
        (None, "it answered nothing"),
        ("``````", "the text is empty"),
        ("Go on.", r"the placeholders \{task\} are gone"),
        ("Do {task} for {you}.", r"nobody fills in \{you\}"),
        (LookupError("no such shelf"), "LookupError: no such shelf"),
    ],
)
def test_a_writer_that_gives_nothing_is_given_up(store: Store, answer: Any, why: str) -> None:
    """Three answers in a row without a usable text are enough, and the last reason is told."""
    prompts: list[str] = []

    def writer(prompt: str) -> Any:
        prompts.append(prompt)
        if len(prompts) == 2:
            return "Now do {task}."
        if isinstance(answer, Exception):
            raise answer
        return answer

    trainer = trainer_of(
        store, lambda task, resources: 0.0, APO(reflection_lm=writer),
        resources={"system_prompt": "Do {task}."},
    )  # fmt: skip

    with pytest.raises(TrainingError, match=f"nothing usable 3 times in a row.*{why}"):
        trainer.fit([1], [2])

    assert len(prompts) == 5
    assert "{task} stand for what is filled in" in prompts[0]


@pytest.mark.parametrize(("candidates", "times"), [(1, "the one time"), (2, "2 times in a row")])
def test_a_search_that_tried_no_text_fails(store: Store, candidates: int, times: str) -> None:
    """However few may be tried: an endpoint that is down is no success."""

    def writer(prompt: str) -> str:
        raise ConnectionError("down")

    trainer = trainer_of(
        store, lambda task, resources: 0.0,
        APO(reflection_lm=writer, num_candidates=candidates),
        resources={"system_prompt": "Do {task}."},
    )  # fmt: skip

    with pytest.raises(TrainingError, match=f"{times}.*ConnectionError: down"):
        trainer.fit([1], [2])


class Answerer:
    """A model that says please where it is told to, and not where it is told not to."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        system = str(body["messages"][0]["content"])
        return Reply(text="please" if "please" in system else "now")


@pytest.mark.parametrize(
    ("own", "written", "becomes"),
    [
        ("You answer {politely}.", "Say please.", "live"),
        ("Say please.", "Be quick.", ""),
        ("Say please.", "Say please, please.", "canary"),
    ],
)
def test_apo_learns_from_recorded_runs_alone(
    store: Store, server: DemoServer, client: openai.OpenAI, own: str, written: str, becomes: str
) -> None:
    """Recorded prompt and rewards, a text as canary, and verdict by what unchanged runs emit."""
    server.policy = Answerer()
    prompts: list[str] = []

    def writer(prompt: str) -> str:
        prompts.append(prompt)
        return written

    def run(count: int, *, apply: bool) -> None:
        for number in range(count):
            with auto_trace(store=store, apply=apply, agent="clerk"):
                said: Any = [
                    {"role": "system", "content": own},
                    {"role": "user", "content": f"What of {number}?"},
                ]
                reply = client.chat.completions.create(model="clerk", messages=said)
                emit_reward(0.9 * (reply.choices[0].message.content == "please"))

    def train() -> Fit:
        apo = APO(reflection_lm=writer, optimization_target="system_prompt")
        return Trainer(store=store, algorithm=apo).train()

    run(6, apply=False)
    first = train()
    resources = Resources(State.beside(store))
    resources.set_alias("system_prompt", "canary", 2, weight=0.5)
    waiting = train()
    run(44, apply=True)
    second = train()
    sent = Counter(str((each.request or {})["messages"][0]["content"]) for each in server.log)

    assert resources.get("system_prompt", 1).prompt.format() == own
    assert resources.get("system_prompt", 2).body["template"] == written
    assert [own in prompts[0].replace("{{", "{").replace("}}", "}"), len(prompts)] == [True, 1]
    assert "What of 3?" in prompts[0]
    assert "Reward: 0" in prompts[0]
    assert first.resources["system_prompt"].version == 2
    assert "system_prompt@2 is the canary, which 10% of the runs with apply" in first.verdict.reason
    assert "system_prompt@2 is the canary, which 50%" in waiting.verdict.reason
    assert sent[own] + sent[written] == 50
    assert sent[written] > 8
    assert (second.promoted, second.withdrawn) == (
        ("system_prompt",) if becomes == "live" else (),
        () if becomes else ("system_prompt",),
    )
    word = {"live": "better", "canary": "not significantly different", "": "worse"}[becomes]
    assert second.verdict.reason.startswith(f"{word}")
    assert resources.aliases("system_prompt") == {"live": 1, **({becomes: 2} if becomes else {})}


@pytest.mark.parametrize(
    ("systems", "why"),
    [([], "no recorded call has a system message"), (list("abc"), "3 different system messages")],
)
def test_apo_refuses_recorded_runs_without_a_prompt(
    store: Store, client: openai.OpenAI, systems: list[str], why: str
) -> None:
    """What to publish by hand is said."""
    for system in systems or [""]:
        said: Any = [{"role": "system" if system else "user", "content": system or "hi"}]
        with auto_trace(store=store):
            client.chat.completions.create(model="clerk", messages=said)
            emit_reward(0.0)

    with pytest.raises(TrainingError, match=f"{why}.*resources publish system_prompt"):
        Trainer(store=store, algorithm=APO(reflection_lm=never)).train()


class Erring:
    """A model that is of no use at first: it is late, unreachable, or says what is no text."""

    def __init__(self, first: object) -> None:
        # The client of a server tries three times before it gives up.
        self.first = [first] * (3 if first == "slow" else 1)

    def write(self, prompt: str) -> Any:
        answer = self.first.pop() if self.first else "Answer, please."
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """Behind a server."""
        answer = self.write("")
        if answer == "slow":
            time.sleep(1)
        return Reply(text=answer)


@pytest.mark.parametrize(
    ("first", "is_server"),
    [
        (ConnectionError("gone"), False),
        (TimeoutError("late"), False),
        ({"text": "please"}, False),
        ("Answer, \ud800 please.", False),
        ("Answer, \ud800 please.", True),
        ("slow", True),
    ],
)
def test_apo_loses_one_proposal_to_a_writer_that_errs(
    store: Store, server: DemoServer, first: object, is_server: bool
) -> None:
    """The next one is as good as ever, and the run goes on to its end."""
    server.policy = erring = Erring(first)
    http = APO(model="writer", base_url=server.base_url, timeout_s=0.3)
    apo = http if is_server else APO(reflection_lm=erring.write)
    fit = trainer_of(store, polite, apo).fit([1], [2])

    assert fit.run.status == "succeeded"
    assert fit.resources["system_prompt"].body["template"] == "Answer, please."


def test_apo_says_what_a_server_refused(store: Store, server: DemoServer) -> None:
    """A model that cannot be reached is given up like one that says nothing."""
    apo = APO(model="fail-400", base_url=server.base_url)

    with pytest.raises(TrainingError, match=r"3 times in a row.*BadRequestError"):
        trainer_of(store, polite, apo).fit([1], [2])


ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "model": "toy"}


@pytest.mark.parametrize(
    ("options", "train", "why"),
    [
        ({}, [], "given none to learn from, and none are recorded"),
        ({"few_shot": 2}, [1], "no others to judge it by"),
        ({"max_metric_calls": 3}, [1], "takes 4 runs of the agent"),
        (
            {"optimization_target": "system"},
            [1],
            "no resource 'system'.*endpoint, form, system_prompt",
        ),
        ({"optimization_target": "endpoint"}, [1], "is no prompt but endpoint"),
        ({"optimization_target": "form", "candidates": ["Hi."]}, [1], r"\{name\} are gone"),
        ({"candidates": ["Hi {you}."]}, [1], r"nobody fills in \{you\}"),
        ({"candidates": [{"form": "Hi."}]}, [1], "names 'form'; there are system_prompt"),
        (
            {"candidates": ["Hi."], "optimization_target": ["system_prompt", "form"]},
            [1],
            "give text by name",
        ),
        ({"category": "kind"}, [{"x": 1}], "a task has no 'kind'"),
        ({"category": str}, ["a/b"], "cannot be part of a resource's name"),
        ({"reflection_lm": None}, [1], "no call is recorded; give model="),
    ],
)
def test_apo_refuses_before_the_agent_is_run(
    options: dict[str, Any], train: list[Any], why: str, store: Store
) -> None:
    """What cannot lead anywhere costs nothing."""

    def agent(task: Any) -> float:
        raise AssertionError("the agent was run")

    resources = {"system_prompt": DESK.SEED, "form": "Dear {name},", "endpoint": ENDPOINT}
    apo = APO(**{"reflection_lm": never, **options})
    trainer = trainer_of(store, agent, apo, resources=resources)

    with pytest.raises((ConfigError, TrainingError), match=why):
        trainer.fit(train)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": "m"}, "export OPENAI_API_KEY"),
        ({"model": "m", "reflection_lm": never}, "two writers"),
        ({"reflection_lm": never, "num_candidates": 0}, "num_candidates=0"),
        ({"reflection_lm": never, "reflection_prompt_template": "<curr_param>"}, "no <side_info>"),
        ({"reflection_lm": never, "beam_width": 4}, "no option 'beam_width'; there are optimizat"),
        ({"num_candidate": 4}, "no option 'num_candidate'; did you mean 'num_candidates'?"),
        ({"use_merg": True}, "did you mean 'use_merge'?"),
        ({"reflection_lm": never, "run_dir": "/tmp"}, "no option 'run_dir'"),
    ],
)
def test_apo_refuses_options_that_mean_nothing(options: dict[str, Any], why: str) -> None:
    """It is said where APO is made."""
    with pytest.raises(ConfigError, match=why):
        APO(**options)

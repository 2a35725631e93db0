"""A service that writes better prompts, takes feedback, and improves: uvicorn app:app

What users say of a request is its reward. A training run has the model rewrite the instructions of
a category; half of the next requests use them, and the next run decides on them by those rewards.
"""

import threading
import uuid
from collections import defaultdict
from statistics import fmean
from typing import Literal

import openai
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

import lightning_otel as lo
from lightning_otel.errors import ConfigError, LightningOtelError, NotFoundError

MODEL = "gpt-5-mini"
KINDS = ("image", "video", "text")
SEEDS = {f"system_prompt[{kind}]": f"Make the prompt for {kind} better." for kind in KINDS}
THERE = {f"{it}_available": True for it in ("agent_lightning", "store", "trainer")}
WRITER = "You improve instructions. Answer with better instructions and nothing else."
SAID = """SELECT rollout_id, attributes->>'$."lightning.feedback.text"' AS said FROM spans"""

app, client, store, prompts = FastAPI(), openai.OpenAI(), lo.Store(), lo.Resources()
store.add([])  # so that it can be read before anything was asked


class Asked(BaseModel):
    prompt: str = Field(min_length=1, max_length=10_000)
    category: Literal[KINDS] = "text"


class Metadata(BaseModel):
    rating: float | None = Field(None, ge=0, le=5)
    satisfied: bool | None = None
    used_result: bool | None = None


class Feedback(BaseModel):
    task_id: str
    reward: float | None = Field(None, ge=-1, le=1)
    feedback_text: str | None = Field(None, max_length=10_000)
    metadata: Metadata = Metadata()


def answered(system, user):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content


class Rewrite(lo.BaseAlgorithm):
    """Has the model rewrite the instructions of each category from what was said of its answers."""

    def train_step(self, batch):
        said = {row["rollout_id"]: row["said"] for row in store.sql(SAID) if row["said"]}
        heard = defaultdict(list)
        for rollout, category in {path.rollout_id: path.agent for path in batch}.items():
            heard[category].append(f"- {batch.rewards[rollout]:+.1f}: {said.get(rollout, '')}")
        better = {}
        for category, lines in heard.items():
            name = f"system_prompt[{category}]"
            told = "\n".join(sorted(lines)[:50])
            current = prompts.get(name).format()
            text = answered(WRITER, f"Instructions:\n{current}\nUsers said:\n{told}")
            better |= {name: text} if text != current else {}
        return lo.StepResult({"reward": batch.metrics()["reward"]}, better)


trainer = lo.Trainer(store=store, algorithm=Rewrite(), resources=SEEDS, max_iterations=1)
training = {"lock": threading.Lock(), "latest": "nothing was trained yet"}


@app.post("/optimize")
def optimize(asked: Asked):
    task_id = uuid.uuid4().hex
    used = prompts.assigned(task_id)[f"system_prompt[{asked.category}]"]
    known = {"agent": asked.category, "task": asked.model_dump(), "rollout_id": task_id}
    stamped = {"*": {used.name: str(used.version)}}
    with lo.auto_trace(store=store, resources=stamped, **known) as recording:
        text = answered(used.format(), asked.prompt)
    known = lo.learned(asked.category, resources=prompts, store=store)
    mean = next((each.mean for each in known.versions if each.version == used.version), 0.0)
    answer = {"optimized_prompt": text, "task_id": task_id, "version": str(used)}
    (step,) = recording.trajectories()[0].transitions
    return {**answer, "span_id": step.span_id, "quality_score": 50 * (mean + 1)}


@app.post("/feedback")
def feedback(said: Feedback):
    is_stated = said.reward is not None  # and then it is the reward, whatever the stars
    told = {"quality_score": 50 * (said.reward + 1)} if is_stated else said.metadata.model_dump()
    words = {"text": said.feedback_text, "rollout_id": said.task_id, "store": store}
    try:
        return {"status": "kept", "span_id": lo.emit_feedback(**told, **words)}
    except (ConfigError, NotFoundError) as exc:
        raise HTTPException(404 if isinstance(exc, NotFoundError) else 422, str(exc)) from exc


@app.get("/training/status")
def status():
    earned, steps = defaultdict(list), list(store.transitions(bodies=False))
    for step in (step for step in steps if step.reward is not None):
        for key in ("all", step.agent, *(f"{name}@{v}" for name, v in step.resources.items())):
            earned[key].append(step.reward)
    means = {key: fmean(values) for key, values in earned.items()}
    counts = {"answers": len(steps), "total_spans": sum(row["spans"] for row in store.rollouts())}
    rewards = {"average_reward": round(means.get("all", 0.0), 6), "average_rewards": means}
    return {**THERE, **counts, **rewards, "training": training["latest"]}


@app.post("/training/trigger", status_code=202)
def trigger():
    if not training["lock"].acquire(blocking=False):
        raise HTTPException(409, "a training run is under way; see /training/status")
    training["latest"] = "running"
    threading.Thread(target=train).start()
    return {"status": training["latest"], "reason": ""}


def train():
    try:
        told = [judge(name) for name in SEEDS if "canary" in prompts.aliases(name)]
        for name, made in {} if told else trainer.fit().resources.items():
            prompts.set_alias(name, "canary", made.version, weight=0.5)
            told.append(f"{made} is the canary")
        training["latest"] = ", ".join(told) or "no change"
    except (LightningOtelError, openai.OpenAIError) as exc:
        training["latest"] = f"failed: {exc}"
    finally:
        training["lock"].release()


def judge(name):
    found = prompts.compare(name, store=store)
    if found.is_better or found.is_worse:
        (prompts.promote if found.is_better else prompts.withdraw)(name)
    return f"{name}@{found.b} is {found.verdict}"

"""Spans into transitions: ``TripletAdapter`` beside Agent Lightning 0.3's ``TracerTraceToTriplet``.

Both are given the same calls, each in the form its own tracer records: 512 prompt and 128 response
ids and four messages a call, under one root, with one reward at the end or one after every call.
Agent Lightning has an environment of its own, whose OpenTelemetry it still works with.
"""

import gc
import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import peers

THEIRS_NEED = (
    "agentlightning==0.3.0",
    "opentelemetry-api==1.44.0",
    "opentelemetry-sdk==1.44.0",
    "opentelemetry-exporter-otlp==1.44.0",
)
OURS_NEED = (
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
    "-e",
    str(peers.ROOT),
)
# litellm, which it imports, would else ask the network for a list of prices.
SETTINGS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_LOG_LEVEL": "CRITICAL"}
SHAPES = {"one": "one reward", "step": "a reward a call", "chain": "nested spans"}
CALL_EVERY = 100
"""In the chain, how many spans stand between two calls."""
SECOND = 1_000_000_000
BEGAN_NS = 1_700_000_000 * SECOND


# --- the same rollout, told in neutral terms -----------------------------------------------------


def rollout(shape: str, size: int) -> list[dict[str, Any]]:
    """The spans of a rollout as plain facts, in order of their start."""
    if shape == "chain":
        return _chain(size)
    rng = random.Random(1)
    facts = [_fact("root", 0, None, 0, 2 * size + 3)]
    for number in range(size):
        at = 2 * number + 1
        facts.append(_call(rng, len(facts), 0, at, at + 0.5))
        if shape == "step" or number == size - 1:
            facts.append(_reward(rng, len(facts), 0, at + 1))
    return facts


def _chain(size: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    facts = [_fact("root", 0, None, 0, 3 * size)]
    for depth in range(1, size):
        begin, end = depth, 3 * size - depth
        if depth % CALL_EVERY == 0:
            facts.append(_call(rng, depth, depth - 1, begin, end))
        else:
            facts.append(_fact("step", depth, depth - 1, begin, end))
    return facts


def _fact(kind: str, number: int, parent: int | None, begin: float, end: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "span_id": f"{number + 1:016x}",
        "parent": None if parent is None else f"{parent + 1:016x}",
        "start_ns": BEGAN_NS + int(begin * SECOND),
        "end_ns": BEGAN_NS + int(end * SECOND),
    }


def _call(rng: random.Random, number: int, parent: int, begin: float, end: float) -> dict[str, Any]:
    words = [f"word{rng.randrange(10_000)}" for _ in range(160)]
    texts = [" ".join(words[at : at + 32]) for at in range(0, 160, 32)]
    return {
        **_fact("call", number, parent, begin, end),
        "response_id": f"chatcmpl-{number}",
        "messages": list(zip(("system", "user", "assistant", "user"), texts, strict=False)),
        "answer": texts[4],
        "prompt_ids": [rng.randrange(150_000) for _ in range(512)],
        "response_ids": [rng.randrange(150_000) for _ in range(128)],
    }


def _reward(rng: random.Random, number: int, parent: int, at: float) -> dict[str, Any]:
    return {**_fact("reward", number, parent, at, at), "value": rng.random()}


# --- ours ----------------------------------------------------------------------------------------


def our_span(fact: dict[str, Any]) -> Any:
    """The fact as our instrumentor records it."""
    from lightning_otel.adapter.tokens import encode_ids
    from lightning_otel.types import Span

    attributes: dict[str, Any] = {
        "agentlightning.rollout_id": "rollout-1",
        "agentlightning.attempt_id": "1",
    }
    name = {"reward": "agentlightning.annotation", "call": "chat demo-1"}.get(fact["kind"], "step")
    if fact["kind"] == "call":
        given = [_message(role, text) for role, text in fact["messages"]]
        answered = [_message("assistant", fact["answer"])]
        attributes |= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "demo-1",
            "gen_ai.response.model": "demo-1",
            "gen_ai.response.id": fact["response_id"],
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.input_tokens": 512,
            "gen_ai.usage.output_tokens": 128,
            "gen_ai.input.messages": json.dumps(given),
            "gen_ai.output.messages": json.dumps(answered),
            "lightning.prompt.token_ids": encode_ids([fact["prompt_ids"]]),
            "lightning.response.token_ids": encode_ids([fact["response_ids"]]),
        }
    elif fact["kind"] == "reward":
        attributes["agentlightning.reward.0.name"] = "primary"
        attributes["agentlightning.reward.0.value"] = fact["value"]
    return Span(
        trace_id="1" * 32,
        span_id=fact["span_id"],
        parent_span_id=fact["parent"],
        name=name,
        start_ns=fact["start_ns"],
        end_ns=fact["end_ns"],
        attributes=attributes,
    )


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def adapt_ours(spans: list[Any]) -> tuple[int, int]:
    """How many transitions, and how many of them carry a reward."""
    from lightning_otel import TripletAdapter

    steps = [step for path in TripletAdapter().adapt(spans) for step in path.transitions]
    # Taken out, so that nothing is left to be decoded later.
    assert all(step.prompt_ids[511] >= 0 and step.response_ids[127] >= 0 for step in steps)
    return len(steps), sum(step.reward is not None for step in steps)


# --- theirs --------------------------------------------------------------------------------------


def their_span(fact: dict[str, Any]) -> Any:
    """The fact as Agent Lightning's tracer records it."""
    from agentlightning.types import OtelResource, Span, TraceStatus

    attributes: dict[str, Any] = {}
    name = {"reward": "agentlightning.annotation", "call": "openai.chat.completion"}.get(
        fact["kind"], "step"
    )
    if fact["kind"] == "call":
        for number, (role, text) in enumerate(fact["messages"]):
            attributes[f"gen_ai.prompt.{number}.role"] = role
            attributes[f"gen_ai.prompt.{number}.content"] = text
        attributes |= {
            "gen_ai.request.model": "demo-1",
            "gen_ai.response.model": "demo-1",
            "gen_ai.response.id": fact["response_id"],
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": fact["answer"],
            "gen_ai.completion.0.finish_reason": "stop",
            "gen_ai.usage.prompt_tokens": 512,
            "gen_ai.usage.completion_tokens": 128,
            "prompt_token_ids": fact["prompt_ids"],
            "response_token_ids": fact["response_ids"],
        }
    elif fact["kind"] == "reward":
        attributes["agentlightning.reward.0.name"] = "primary"
        attributes["agentlightning.reward.0.value"] = fact["value"]
    return Span(
        rollout_id="rollout-1",
        attempt_id="1",
        sequence_id=int(fact["span_id"], 16),
        trace_id="1" * 32,
        span_id=fact["span_id"],
        parent_id=fact["parent"],
        name=name,
        status=TraceStatus(status_code="OK"),
        attributes=attributes,
        events=[],
        links=[],
        start_time=fact["start_ns"] / SECOND,
        end_time=fact["end_ns"] / SECOND,
        context=None,
        parent=None,
        resource=OtelResource(attributes={}, schema_url=""),
    )


def adapt_theirs(spans: list[Any]) -> tuple[int, int]:
    """How many triplets, and how many of them carry a reward."""
    from agentlightning.adapter import TracerTraceToTriplet

    steps = TracerTraceToTriplet().adapt(spans)
    assert all(
        step.prompt["token_ids"][511] >= 0 and step.response["token_ids"][127] >= 0
        for step in steps
    )
    return len(steps), sum(step.reward is not None for step in steps)


# --- worker and driver ---------------------------------------------------------------------------


def timed(worker: str, shape: str, size: int, budget_s: float) -> dict[str, Any]:
    """Seconds of each repetition, at least one, as many as the budget allows up to thirty."""
    make: Callable[[dict[str, Any]], Any]
    make, adapt = (our_span, adapt_ours) if worker == "ours" else (their_span, adapt_theirs)
    spans = [make(fact) for fact in rollout(shape, size)]
    if shape != "chain":
        adapt(spans[:3])
    seconds: list[float] = []
    while not seconds or (sum(seconds) + seconds[-1] < budget_s and len(seconds) < 30):
        gc.collect()
        began = time.perf_counter()
        try:
            transitions, rewarded = adapt(spans)
        except RecursionError:
            return {"error": "RecursionError"}
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "transitions": transitions, "rewarded": rewarded}


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--shape")
    parser.add_argument("--size", type=int)
    parser.add_argument("--budget-s", type=float)
    options = parser.parse_args()
    if options.worker:
        peers.report(timed(options.worker, options.shape, options.size, options.budget_s))
        return
    ours = peers.environment(options.env, "adapter-ours", OURS_NEED)
    theirs = peers.environment(options.env, "adapter-agentlightning", THEIRS_NEED)
    most = 1000 if options.quick else 5000
    both = [(shape, n) for shape in ("one", "step") for n in (10, 100, 1000, 5000) if n <= most]
    alone = [("one", 50_000), ("step", 50_000)]
    figures = []
    for shape, size in [*both, *alone, ("chain", 100_000)]:
        peers.say(f"{size:,} {'spans' if shape == 'chain' else 'calls'}, {SHAPES[shape]}")
        budget_s = 2 if options.quick else 6
        given = ("--shape", shape, "--size", size, "--budget-s", budget_s)
        row = {"shape": shape, "size": size, "ours": peers.run(ours, __file__, "ours", *given)}
        if (shape, size) not in alone:
            row["theirs"] = peers.run(theirs, __file__, "theirs", *given, settings=SETTINGS)
        figures.append(row)
    show(figures)
    where = peers.facts(theirs, "agentlightning", "opentelemetry-sdk")
    peers.finish(options.json, where, figures)


def show(figures: list[dict[str, Any]]) -> None:
    """The table: milliseconds of each, and how many times faster ours is."""
    rows = []
    for row in figures:
        ours, theirs = row["ours"], row.get("theirs", {})
        is_compared = "seconds" in ours and "seconds" in theirs
        if is_compared and any(ours[k] != theirs[k] for k in ("transitions", "rewarded")):
            raise SystemExit(f"the two disagree: {row}")
        times = (
            f"{median(theirs['seconds']) / median(ours['seconds']):,.0f} ×" if is_compared else "-"
        )
        per_call = median(ours["seconds"]) / row["size"] * 1e6
        kind = "spans" if row["shape"] == "chain" else "calls"
        rows.append(
            [
                f"{row['size']:,} {kind}, {SHAPES[row['shape']]}",
                _milliseconds(ours),
                f"{per_call:,.1f}",
                _milliseconds(theirs),
                times,
            ]
        )
    peers.table(
        "Milliseconds from spans to transitions: median of repetitions (lowest to highest)",
        ["rollout", "lightning-otel", "µs a call or span", "Agent Lightning 0.3", "faster"],
        rows,
    )


def _milliseconds(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return found.get("error", "not run")
    return peers.with_spread([value * 1e3 for value in found["seconds"]], 2)


if __name__ == "__main__":
    main()

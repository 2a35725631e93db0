"""Checks that recorded log-probabilities are comparable with a trainer's.

They are if the model's own distribution was sampled, at the trainer's temperature. Anything else
gives ratios that are wrong from the first step, in silence: 1.47 where 1 was right.

Source: vLLM's ``--logprobs-mode``; measured with a tiny model at temperature 0.7 and top_p 0.9.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_otel.adapter.exactness import PENALISED, TRUNCATED, notes_of
from lightning_otel.types import Transition

RAW: Final = (
    "logprobs of the wrong mode: raw ones at a temperature other than 1; serve with "
    "--logprobs-mode processed_logprobs, or sample at 1"
)
UNKNOWN: Final = (
    "logprobs of an unknown mode: the temperature is not 1; say it: "
    "OTEL_RESOURCE_ATTRIBUTES=lightning.logprobs.mode=processed"
)
GREEDY: Final = "not sampled: temperature 0 has one answer; sample with the trainer's temperature"
TEMPERATURE: Final = "sampled at another temperature than the trainer's; set temperature={:g}"
FILLED: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)
"""Settings that vLLM and SGLang take from a model's ``generation_config.json`` where a request
leaves them out.

Source: vLLM's ``ModelConfig.get_diff_sampling_param``.
"""
WHOLE: Final = (
    "sample with top_p=1, top_k=-1, min_p=0, repetition_penalty=1 and without penalties, all said "
    "in the request: what it leaves out the server fills from the model's generation_config.json"
)
NO_LOGPROBS: Final = "no logprobs; ask the server for them: logprobs=True, top_logprobs=0"


def fault_of(step: Transition, temperature: float, filled: Mapping[str, Any] | None = None) -> str:
    """Return why a step's log-probabilities cannot be compared; empty if they can.

    Args:
        step: The step.
        temperature: The trainer's.
        filled: What the server sampled with where the request did not say.
    """
    if len(step.logprobs) != len(step.response_ids):
        return NO_LOGPROBS
    if filled:
        step = replace(step, sampling={**filled, **step.sampling})
    for note in notes_of(step):
        if note in (TRUNCATED, PENALISED):
            return f"{note}; {WHOLE}"
    asked = step.sampling.get("temperature", 1.0)
    if asked == 0.0:
        return GREEDY
    if asked != 1.0 and step.sampling.get("logprobs_mode") != "processed":
        return RAW if step.sampling.get("logprobs_mode") == "raw" else UNKNOWN
    return "" if asked == temperature else TEMPERATURE.format(asked)

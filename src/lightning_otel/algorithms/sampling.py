"""Whether recorded log-probabilities are those that a trainer compares its own with.

They are if the model's own distribution was sampled, at the trainer's temperature. Anything else
gives ratios that are wrong from the first step, in silence: 1.47 where 1 was right.

Source: vLLM's ``--logprobs-mode``; measured with a tiny model at temperature 0.7 and top_p 0.9.
"""

from typing import Final

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
NO_LOGPROBS: Final = "no logprobs; ask the server for them: logprobs=True, top_logprobs=0"


def fault_of(step: Transition, temperature: float) -> str:
    """Why a step's log-probabilities cannot be compared with a trainer's; empty if they can.

    Args:
        step: The step.
        temperature: The trainer's.
    """
    if len(step.logprobs) != len(step.response_ids):
        return NO_LOGPROBS
    for note in notes_of(step):
        if note in (TRUNCATED, PENALISED):
            return f"{note}; sample with top_p=1, top_k=-1, min_p=0 and without penalties"
    asked = step.sampling.get("temperature", 1.0)
    if asked == 0.0:
        return GREEDY
    if asked != 1.0 and step.sampling.get("logprobs_mode") != "processed":
        return RAW if step.sampling.get("logprobs_mode") == "raw" else UNKNOWN
    return "" if asked == temperature else TEMPERATURE.format(asked)

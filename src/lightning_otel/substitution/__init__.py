"""Substitution of assigned resources into an unchanged agent's requests.

Two resources are substituted, by these names: the prompt ``system_prompt``, with its examples, and
the endpoint ``endpoint``, with its model, sampling and address. Others are for agents that take
``(task, resources)``. The formats of requests are the instrumentors' business.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from lightning_otel.types import Resource

SYSTEM_PROMPT: Final = "system_prompt"
ENDPOINT: Final = "endpoint"
SUBSTITUTED: Final = (SYSTEM_PROMPT, ENDPOINT)


class Given(NamedTuple):
    """The assigned values of one request.

    Attributes:
        prompt: The system prompt; None leaves the agent's.
        endpoint: The model; None likewise.
    """

    prompt: Resource | None
    endpoint: Resource | None

    @classmethod
    def of(cls, resources: Mapping[str, Any]) -> "Given":
        """Collect the assigned resources that can be substituted."""
        prompt, endpoint = resources.get(SYSTEM_PROMPT), resources.get(ENDPOINT)
        return cls(
            prompt if prompt is not None and prompt.kind == "prompt" else None,
            endpoint if endpoint is not None and endpoint.kind == "endpoint" else None,
        )


def pins(named: Mapping[str, str], agent: str | None) -> tuple[dict[str, int], frozenset[str]]:
    """Return the pinned versions, and the names that are not ours.

    Args:
        named: Versions by name, as ``resources=`` of the recording says for the agent.
        agent: Who acts.

    Returns:
        Versions by name, and the names whose version is no number: the agent has its own.
    """
    own = {name: f"{agent}/{name}" for name in SUBSTITUTED} if agent else {}
    held = {
        name: version
        for name, version in named.items()
        if name in SUBSTITUTED or name in own.values()
    }
    numbers = {name: int(text) for name, text in held.items() if text.isdecimal()}
    foreign = {name.rpartition("/")[2] for name in held.keys() - numbers.keys()}
    return numbers, frozenset(foreign)

"""One step as a prompt and its completion, which several formats begin with."""

from lightning_otel.formats.chat import UnheldError, for_templates, has_messages, tools_of
from lightning_otel.formats.format import NO_MESSAGES, LeftOut, Row, origin
from lightning_otel.types import Transition


def answered(step: Transition) -> Row | LeftOut:
    """``prompt``, ``completion`` and ``tools`` as chat templates take them, and where it is from.

    Args:
        step: The step; its first choice counts.
    """
    if not has_messages(step):
        return LeftOut(step, NO_MESSAGES)
    try:
        row: Row = {
            "prompt": for_templates(step.observation),
            "completion": for_templates(step.action[:1]),
        }
    except UnheldError as exc:
        return LeftOut(step, str(exc))
    if step.tools:
        row["tools"] = tools_of(step.tools)
    return {**row, **origin(step, step.reward)}

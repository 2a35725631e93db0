"""Conversations as the rows of a table."""

from collections.abc import Mapping
from typing import Any

from lightning_otel.types import Conversation

MESSAGE_COLUMNS: Mapping[str, str] = {
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "agent": "VARCHAR",
    "branch": "INTEGER",
    "step": "INTEGER",
    "messages": "JSON",
    "tools": "JSON",
    "reward": "DOUBLE",
    "answers": "INTEGER[]",
    "rewards": "DOUBLE[]",
    "alternatives": "JSON",
    "span_ids": "VARCHAR[]",
    "model": "VARCHAR",
    "resource_version": "VARCHAR",
}


def message_row(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a flat row of JSON values, in the order of ``MESSAGE_COLUMNS``."""
    row = {name: getattr(conversation, name) for name in MESSAGE_COLUMNS}
    row["alternatives"] = [
        {"answer": position, "message": said} for position, said in conversation.alternatives
    ]
    return row

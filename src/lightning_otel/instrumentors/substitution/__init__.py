"""Assignment of resource versions to requests: pure, so that all processes and threads agree.

Substituted into an unchanged agent's requests are ``system_prompt``, with its examples, and
``endpoint``, with its model, sampling and address. Agents with ``(task, resources)`` take others.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from lightning_otel.types import Resource

SYSTEM_PROMPT: Final = "system_prompt"
ENDPOINT: Final = "endpoint"
SUBSTITUTED: Final = (SYSTEM_PROMPT, ENDPOINT)
LIVE: Final = "live"
CANARY: Final = "canary"
READ_STANDINGS: Final = """
SELECT a.alias, a.weight, r.* FROM lightning_resource_aliases a
JOIN lightning_resources r ON r.name = a.name AND r.version = a.version
WHERE a.alias IN ('live', 'canary')"""
"""Reads, from SQLite and PostgreSQL alike, the rows that :func:`standings_of` takes."""


class Standing(NamedTuple):
    """The assignable versions of one resource.

    Attributes:
        live: The version by default; None leaves it to the agent.
        canary: The version of a share.
        weight: That share, 0 to 1.
    """

    live: Resource | None = None
    canary: Resource | None = None
    weight: float = 0.0

    def choose(self, key: str) -> Resource | None:
        """Return the version of a key; canaries draw anew, larger weights keep their keys."""
        if self.canary is not None and _share_of(f"{self.canary}\0{key}") < self.weight:
            return self.canary
        return self.live


def _share_of(text: str) -> float:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def standings_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Standing]:
    """Return the assignable versions by name."""
    standings: dict[str, Standing] = {}
    for row in rows:
        version = {key: value for key, value in row.items() if key not in ("alias", "weight")}
        values: dict[str, Any] = {row["alias"]: resource_of(version)}
        if row["alias"] == CANARY:
            values["weight"] = row["weight"]
        standings[row["name"]] = standings.get(row["name"], Standing())._replace(**values)
    return standings


def resource_of(row: Mapping[str, Any]) -> Resource:
    """Return the version of a row of the table of versions."""
    body, metrics = json.loads(row["body"]), json.loads(row["metrics"])
    return Resource(**{**row, "body": body, "metrics": metrics})


def assign_versions(
    standings: Mapping[str, Standing],
    key: str,
    agent: str | None,
    pinned: Mapping[str, Resource],
) -> dict[str, Resource]:
    """Return the version of each resource that a key is given, by name.

    ``agent/name`` is the acting agent's ``name``; ``pinned`` versions precede all others.
    """
    versions = {name: version for name in standings if (version := standings[name].choose(key))}
    versions.update(pinned)
    prefix = f"{agent}/" if agent else None
    if prefix is not None:
        # What is pinned by its plain name was pinned for whoever acts.
        for name in [name for name in versions if name.startswith(prefix)]:
            plain = name.removeprefix(prefix)
            if name in pinned or plain not in pinned:
                versions[plain] = versions[name]
    return versions


def stamps(resources: Mapping[str, Resource]) -> dict[str, dict[str, str]]:
    """Return versions as ``context(resources=…)`` takes them: each resource's, by agent."""
    result: dict[str, dict[str, str]] = {}
    prefixed = {resource.name for name, resource in resources.items() if name != resource.name}
    for resource in resources.values():
        agent = resource.name.rpartition("/")[0] if resource.name not in prefixed else ""
        result.setdefault(agent or "*", {})[resource.name] = str(resource.version)
    # The first pattern that names a resource counts.
    return {agent: result[agent] for agent in sorted(result, key=lambda agent: agent == "*")}

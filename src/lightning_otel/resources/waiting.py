"""Conditions that a canary's verdict waits for, and that do not come true by waiting."""

from typing import TYPE_CHECKING, Final

from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.resources import Resources

_COUNTS: Final = f"""
SELECT count(DISTINCT rollout_id) AS every, count(DISTINCT rollout_id) FILTER (
    WHERE contains(attributes->>'$."{c.RESOURCES}"', ?)) AS stamped,
    (SELECT count(*) FROM rewards) AS rewards
FROM spans"""


def explain_waiting(resources: "Resources", name: str, store: "Store") -> str:
    """Return why no more rollouts will decide on a canary; empty if they will."""
    aliases = resources.aliases(name)
    if "canary" not in aliases or (store.layout is not None and not store.layout.exists()):
        return ""
    canary = f"{name}@{aliases['canary']}"
    if not resources.canary_weight(name):
        return (
            f"nobody is given {canary}, whose share is 0 %; lightning-otel resources alias {name} "
            f"canary {aliases['canary']} --weight 0.1"
        )
    # A version that is stamped by hand may be named without its agent.
    needle = name.rpartition("/")[2] + '"'
    (row,) = store.sql(_COUNTS, [needle])
    if row["every"] and not row["stamped"]:
        return (
            f"0 of {row['every']} rollouts had apply: none was made with a version of {name}; run "
            "agents with auto_trace(apply=True), run --apply or LIGHTNING_OTEL_APPLY=1"
        )
    if row["stamped"] and not row["rewards"]:
        return (
            f"0 of {row['every']} rollouts have a reward; call emit_reward() in the agent, or "
            "lightning-otel apply-rewards"
        )
    return ""

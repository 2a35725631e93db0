"""GEPA's state as JSON.

GEPA keeps its state as a pickle, and to read one runs whatever it says. It is never read but from a
folder of ours into which it was written a moment before; what checkpoints hold is this JSON.
"""

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import TrainingError
from lightning_otel.store.layout import write_private

if TYPE_CHECKING:
    from gepa.core.state import GEPAState

_FILE: Final = "gepa_state.bin"
_NOT_KEPT: Final = ("_budget_hooks", "evaluation_cache")


def encode_state(state: "GEPAState[Any, Any]") -> dict[str, Any]:
    """GEPA's state as JSON."""
    return {key: _to_json(value) for key, value in vars(state).items() if key not in _NOT_KEPT}


def write_state(kept_state: Mapping[str, Any] | None, folder: Path) -> None:
    """Make a folder for GEPA: with the state to go on from, or with none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    if kept_state is not None:
        write_private(folder / _FILE, pickle.dumps(decode_state(kept_state)))


def decode_state(kept_state: Mapping[str, Any]) -> dict[str, Any]:
    """GEPA's state as it was, by attribute."""
    try:
        found = {key: _from_json(value) for key, value in kept_state.items()}
    except (TypeError, ValueError, AttributeError) as exc:
        raise TrainingError(
            f"the search to go on with is damaged ({exc}); resume from another checkpoint"
        ) from exc
    return {**found, "evaluation_cache": None}


def _to_json(value: Any) -> Any:
    """JSON has lists and texts as keys; what else there is says what it is."""
    if isinstance(value, Mapping):
        return {"map": [[_to_json(key), _to_json(each)] for key, each in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(_to_json, value))}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(each) for each in value]}
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "map":
        return {_from_json(key): _from_json(each) for key, each in held}
    if kind not in ("set", "tuple"):
        raise ValueError(f"there is no {kind!r} in it")
    return (set if kind == "set" else tuple)(map(_from_json, held))

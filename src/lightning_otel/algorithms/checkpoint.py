"""Checkpoints: a folder of JSON and the algorithm's own files; nothing in it is ever run.

A folder is written under a temporary name and renamed once it is whole, so that one with its final
name is never half there.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.store.layout import write_private

FORMAT: Final = 1
_HEADER: Final = "checkpoint.json"
_FILES: Final = "files"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An algorithm's state after a step.

    Attributes:
        algorithm: The algorithm's name.
        run_id: The run.
        consumer: Whose claims the run works with.
        step: The steps it holds.
        state: What ``state_dict`` gave.
        resources: Versions by name that the run had made by then, or that its steps began with.
        format: How it is written.
    """

    algorithm: str
    run_id: str
    consumer: str
    step: int
    state: Mapping[str, Any]
    resources: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT


def write(folder: Path, checkpoint: Checkpoint, save: Callable[[Path], object]) -> None:
    """Write a checkpoint; one that stands there already is replaced.

    Args:
        folder: Where.
        checkpoint: What is remembered.
        save: Writes the algorithm's own files into a folder.

    Raises:
        ConfigError: The state is no JSON.
        TrainingError: It cannot be written.
    """
    try:
        text = json.dumps(asdict(checkpoint), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"state_dict() of {checkpoint.algorithm} is no JSON: {exc}; write what is none into "
            "files, in save()"
        ) from exc
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.mkdir(mode=0o700)
        (new / _FILES).mkdir(mode=0o700)
        save(new / _FILES)
        write_private(new / _HEADER, text.encode(), is_synced=True)
        put_in_place(new, folder)
    except OSError as exc:
        raise TrainingError(
            f"cannot write the checkpoint {folder}: {exc.strerror or exc}; is there room?"
        ) from exc
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Give a folder its final name; one that stands there is gone.

    Args:
        new: The folder, whole.
        folder: The name it gets.
    """
    old = folder.with_name(f".{folder.name}.old.{secrets.token_hex(4)}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        TrainingError: There is none, it is damaged, or a newer version wrote it.
    """
    try:
        found = json.loads((folder / _HEADER).read_bytes())
        checkpoint = Checkpoint(**found)
    except OSError as exc:
        raise TrainingError(
            f"no checkpoint at {folder}: {exc.strerror or exc}; name a folder that "
            "save_checkpoint() made"
        ) from exc
    except (ValueError, TypeError) as exc:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {exc!s:.200}; resume from another one"
        ) from exc
    if checkpoint.format != FORMAT:
        raise TrainingError(
            f"the checkpoint {folder} has format {checkpoint.format}, and this release reads "
            f"{FORMAT}; pip install --upgrade lightning-otel"
        )
    return checkpoint


def check(checkpoint: Checkpoint, algorithm: str, folder: Path) -> None:
    """Refuse a checkpoint of another algorithm.

    Raises:
        TrainingError: It is one.
    """
    if checkpoint.algorithm != algorithm:
        raise TrainingError(
            f"the checkpoint {folder} is one of {checkpoint.algorithm}, not of {algorithm}; make "
            f"the trainer with that algorithm, or start anew"
        )


def clear(folder: Path, kept: Collection[Path]) -> None:
    """Take away what a killed process left: checkpoints that do not count, whole or not.

    Args:
        folder: Where a run has its checkpoints.
        kept: Those that stay.
    """
    if not folder.exists():
        return
    for found in folder.iterdir():
        if found not in kept:
            shutil.rmtree(found, ignore_errors=True)


def files(folder: Path) -> Path:
    """Return the folder of the algorithm's own files in a checkpoint."""
    return folder / _FILES


def copy(folder: Path, to: Path) -> None:
    """Copy a checkpoint to a place of the user's, whole or not at all.

    Raises:
        TrainingError: Something else stands there, or it cannot be written.
    """
    if to.exists() and not (to / _HEADER).exists():
        raise TrainingError(f"{to} is there and no checkpoint; name another place")
    new = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, new)
        new.chmod(stat.S_IRWXU)
        put_in_place(new, to)
    except OSError as exc:
        raise TrainingError(f"cannot write {to}: {exc.strerror or exc}; is there room?") from exc
    finally:
        shutil.rmtree(new, ignore_errors=True)

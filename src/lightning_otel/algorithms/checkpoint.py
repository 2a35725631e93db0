"""Checkpoints: folders of JSON and the algorithm's files, renamed into place when complete."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import ConfigError, NotFoundError, TrainingError, disk_remedy
from lightning_otel.store.files import write_private

if TYPE_CHECKING:
    from lightning_otel.state.runs import Runs, TrainingRun

FORMAT: Final = 1
FILES: Final = "files"
_HEADER: Final = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An algorithm's state after a step, and the versions made by then."""

    algorithm: str
    run_id: str
    consumer: str
    step: int
    state: Mapping[str, Any]
    resources: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT


def write(folder: Path, checkpoint: Checkpoint, save: Callable[[Path], object]) -> None:
    """Write a checkpoint in place of any other; ``save`` writes the algorithm's files."""
    try:
        text = json.dumps(asdict(checkpoint), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"state_dict() of {checkpoint.algorithm} is no JSON: {exc}; write what is none into "
            "files, in save()"
        ) from exc
    with replace_folder(folder, "checkpoint") as new:
        new.mkdir(mode=0o700)
        (new / FILES).mkdir(mode=0o700)
        save(new / FILES)
        write_private(new / _HEADER, text.encode(), is_synced=True)


def copy(folder: Path, to: Path) -> None:
    """Copy a checkpoint to a place of the user's, whole or not at all."""
    if to.exists() and not (to / _HEADER).exists():
        raise TrainingError(f"{to} is there and no checkpoint; name another place")
    with replace_folder(to, "checkpoint") as new:
        shutil.copytree(folder, new)
        new.chmod(stat.S_IRWXU)


@contextlib.contextmanager
def replace_folder(folder: Path, noun: str) -> Iterator[Path]:
    """Give the name of a new folder, which takes the place of one once it is whole."""
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield new
        put_in_place(new, folder)
    except OSError as exc:
        raise TrainingError(
            f"cannot write the {noun} {folder}: {exc.strerror or exc}; "
            + disk_remedy(exc, "name another place")
        ) from exc
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Give a folder its final name, durably; one that stands there is gone."""
    old = folder.with_name(f".{folder.name}.old.{secrets.token_hex(4)}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path, algorithm: str = "") -> Checkpoint:
    """Return the checkpoint in a folder, if it is one of an algorithm."""
    try:
        checkpoint = Checkpoint(**json.loads((folder / _HEADER).read_bytes()))
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
    if algorithm and checkpoint.algorithm != algorithm:
        raise TrainingError(
            f"the checkpoint {folder} is one of {checkpoint.algorithm}, not of {algorithm}; make "
            "the trainer with that algorithm, or start anew"
        )
    return checkpoint


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The start of a run: its predecessor, the checkpoint, and its content."""

    run: "TrainingRun | None" = None
    folder: Path | None = None
    kept: Checkpoint | None = None


def find_origin(runs: "Runs", place: str | os.PathLike[str], algorithm: str) -> RunOrigin:
    """Find the start of a run's id, its beginning, ``@last`` or a checkpoint's folder."""
    path = Path(place)
    if path.is_dir():
        point = read(path, algorithm)
        try:
            return RunOrigin(replace(runs.get(point.run_id), step=point.step), path, point)
        except NotFoundError:
            return RunOrigin(
                None, path, point
            )  # it was made elsewhere: a run of its own begins here
    if len(path.parts) > 1:
        raise TrainingError(f"no checkpoint at {path}; name a folder that save_checkpoint() made")
    try:
        run = runs.get(os.fspath(place))
    except NotFoundError as exc:
        raise NotFoundError(f"no checkpoint at {path.absolute()}, and {exc}") from exc
    if run.algorithm != algorithm:
        raise TrainingError(
            f"{run.run_id} is a run of {run.algorithm}, not of {algorithm}; make the trainer "
            "with that algorithm, or start anew"
        )
    latest = next(iter(runs.checkpoints(run.run_id)), None)
    if latest is None:
        return RunOrigin(replace(run, step=0))
    folder = Path(latest.place)
    return RunOrigin(run, folder, read(folder, algorithm))


_locks: Final[set[int]] = set()


@contextlib.contextmanager
def lock_folder(run_dir: Path) -> Iterator[None]:
    """Keep other processes of this machine from the folder of a run."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise TrainingError(
                f"another process is at work on {run_dir.name}; stop it, or begin a run of its own"
            ) from exc
        yield
    finally:
        if descriptor in _locks:
            _locks.remove(descriptor)
            os.close(descriptor)


def _leave_locks() -> None:
    # A child that an agent forked may outlive a killed trainer, and would hold its lock.
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_locks)

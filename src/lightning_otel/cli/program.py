"""The program under ``run``: found, started, sent the signals we get, waited for; its processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lightning_otel import config
from lightning_otel.errors import LightningOtelError

_HANDED_ON = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_NOT_FOUND = 127
_NOT_RUNNABLE = 126
_MOST_ADDRESSES = 3
"""How many unread addresses are named: those that were asked most."""


class ProgramError(LightningOtelError):
    """The program could not be started."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find_program(command: Sequence[str]) -> list[str]:
    """The command with its program found: our own Python, its scripts, or anything on the path.

    Raises:
        ProgramError: There is no such program.
    """
    name, *arguments = command
    if name in ("python", "python3"):
        return [sys.executable, *arguments]
    if name.endswith(".py") and Path(name).is_file():
        if _is_script(Path(name)):
            return [os.path.abspath(name), *arguments]
        return [sys.executable, name, *arguments]
    folder = str(Path(sys.executable).parent)
    path = shutil.which(name) or shutil.which(name, path=folder)
    if path is None:
        what = f"no file {name!r}" if name.endswith(".py") else f"no program {name!r} on the PATH"
        raise ProgramError(f"{what}; lightning-otel run -- python your_agent.py", _NOT_FOUND)
    return [path, *arguments]


def _is_script(path: Path) -> bool:
    if not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def program_name(command: Sequence[str]) -> str:
    """Return the program's name: the script or module, not the interpreter."""
    program = Path(command[0]).name
    if not program.startswith("python"):
        return program
    words = [word for word in command[1:] if not word.startswith("-")]
    return program if not words or "-c" in command[1:2] else Path(words[0]).name


def child_environment(
    *,
    store: str,
    rollout_id: str,
    attempt_id: str,
    trace_parent: str,
    startup: Path,
    children: str = "all",
    agent: str | None = None,
    transforms: Sequence[str] = (),
    enable_retokenization_fix: bool = False,
    apply: bool = False,
    debug: bool = False,
) -> dict[str, str]:
    """Return the environment in which ``lightning-otel run`` starts its child.

    What the environment asks for already stays: a run around this one may have named the agent,
    transforms and switches. The ``sitecustomize`` of the folder ``startup`` switches tracing on.
    Where not all children are to be recorded, one variable holds all others, for it to take away.
    """
    transform_names = ",".join((*config.TRANSFORMS.read(), *transforms))
    is_on = {
        config.RETOKENIZATION_FIX: enable_retokenization_fix,
        config.APPLY: apply,
        config.DEBUG: debug,
    }
    program_id = config.PROCESS.read().partition(":")[2]
    settings = {
        **config.handed_settings(),
        **({config.RUN_AGENT.name: agent} if agent else {}),
        **({config.TRANSFORMS.name: transform_names} if transform_names else {}),
        **{setting.name: "1" for setting, is_wanted in is_on.items() if is_wanted},
        config.STORE.name: store,
        config.RUN.name: "1",
        config.ROLLOUT.name: rollout_id,
        config.ATTEMPT.name: attempt_id,
        "TRACEPARENT": trace_parent,
        config.CHILDREN.name: children,
        config.PROCESS.name: f":{program_id}",  # the program is none that we execute
    }
    paths = [str(startup), os.environ.get("PYTHONPATH")]
    if children != "all":
        # A unit separator: no path, id or name of a function has one.
        pairs = (f"{name}={value}" for name, value in settings.items())
        settings = {config.HANDED.name: "\x1f".join(pairs)}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_child(program: Sequence[str], environment: Mapping[str, str] | None) -> int:
    """Run the program to its end, handing on the signals we get; gives its return code.

    Raises:
        ProgramError: The system refuses to start it.
    """
    child: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            pending.append(number)
        elif number not in (signal.SIGINT, signal.SIGQUIT) or not _is_foreground():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    # What is ignored stays ignored, for us and for the child, as under nohup. A handler set before
    # the start is the default again in the child.
    handlers = [
        number for number in _HANDED_ON if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    previous = {number: signal.signal(number, hand_on) for number in handlers}
    try:
        try:
            child = subprocess.Popen(program, env=environment)
        except OSError as exc:
            raise ProgramError(
                f"cannot run {program[0]}: {exc.strerror}; is it a program for this machine?",
                _NOT_RUNNABLE,
            ) from exc
        for number in pending:
            hand_on(number, None)
        return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def take_unrecorded(notes: Path) -> list[str]:
    """Return what is to be said of processes that could not record, and remove their notes."""
    counts: Counter[str] = Counter()
    addresses: Counter[str] = Counter()
    libraries: dict[str, set[str]] = {}
    try:
        lines = notes.read_text(errors="replace").splitlines()
        notes.unlink()
    except OSError:
        return []
    for line in lines:
        library, _, python = line.partition("\t")
        if python.startswith("\t"):
            addresses[f"{library} asked {python[1:]}"] += 1
            continue
        counts[python] += not library
        libraries.setdefault(python, set()).update({library} - {""})
    messages = []
    for python, count in counts.items():
        names = ", ".join(sorted(libraries[python]))
        warning, imported = ("warning: ", f", which imported {names}") if names else ("", "")
        noun = "1 process" if count < 2 else f"{count:,} processes"
        messages.append(
            f"  {warning}not recorded: {noun} of {python}, without lightning-otel{imported}"
        )
    for request, count in addresses.most_common(_MOST_ADDRESSES):
        times = "once" if count < 2 else f"{count:,} times"
        messages.append(f"  warning: not recorded: {request} {times}, a path of no known dialect")
    return messages


def shell_exit_code(return_code: int) -> int:
    """A return code as a shell would give it: 128 and the signal's number if one ended it."""
    return 128 - return_code if return_code < 0 else return_code


def _is_foreground() -> bool:
    """Return whether the terminal's keys reach us, and so the child too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)

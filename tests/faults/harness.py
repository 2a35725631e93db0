"""What every fault row shares: a host program, run bare and recorded, and what must hold after.

A row writes a program that knows nothing of us, but OpenTelemetry's API; the harness runs it in a
process of its own with a wall limit. ``check`` holds what is common to all rows: the same result as
without us, every acknowledged span stored once before settling and after, nothing on stderr from
us but one warning where something was lost.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import lightning_otel.provider.startup
from lightning_otel import Store, config
from lightning_otel.cli.program import child_environment
from lightning_otel.store.counts import Accounting
from lightning_otel.store.layout import Layout

IS_FULL: Final = bool(os.environ.get("LIGHTNING_TEST_FAULTS"))
"""Whether rows run with the numbers of the table instead of small ones."""
PRELUDE: Final = '''\
"""A host program: spans by OpenTelemetry's API, each acknowledged when ``end()`` has returned."""
import os, signal, sys, threading, time
from opentelemetry import trace
tracer = trace.get_tracer("host")
_acks = os.open(os.environ["FAULT_ACKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def acknowledge(count=1):
    os.write(_acks, b"." * count)
def end(name="work", size=0, **attributes):
    tracer.start_span(name, attributes={"text": "x" * size, **attributes}).end()
    acknowledge()
'''


class Outcome(NamedTuple):
    """How a host program ended."""

    code: int
    output: str
    errors: str
    wall_s: float


class Counts(NamedTuple):
    """What became of a row's spans: a line of the table."""

    ended: int
    stored: int
    lost: int
    doubled: int


def note(row: str, counts: Counts, tries: int = 1, *, counted: int = 0) -> None:
    """Add to the table, if one is being made, what became of a row's spans."""
    path = os.environ.get("LIGHTNING_FAULTS_TABLE")
    if path:
        with Path(path).open("a") as file:
            found = counts._replace(lost=counts.lost - counted)._asdict()
            file.write(json.dumps({"row": row, "trials": tries, "counted": counted, **found}))
            file.write("\n")


def trials(full: int, few: int) -> int:
    """How often, or with how many, a row is tried: few by default, all for the table."""
    return full if IS_FULL else few


class Host:
    """A program with a store and acknowledgements of its own."""

    def __init__(self, folder: Path, *parts: str) -> None:
        """Write the program, part after part; nothing is run yet."""
        self.folder = folder
        self.path = folder / "host.py"
        self.path.write_text(PRELUDE + "".join(map(textwrap.dedent, parts)))
        self.store = Store(folder / "store" / "traces.duckdb")
        self._acks = folder / "acks"

    @property
    def layout(self) -> Layout:
        """The store's paths."""
        assert self.store.layout is not None
        return self.store.layout

    @property
    def acked(self) -> int:
        """How many spans the recorded program knows to have ended."""
        return self._acks.stat().st_size if self._acks.exists() else 0

    def environment(self, *, is_recorded: bool = True) -> dict[str, str]:
        """What the program finds around it: that of a child of ``run``, or nothing of ours."""
        acks = self._acks if is_recorded else self.folder / "bare-acks"
        if not is_recorded:
            return {**os.environ, config.ENABLED.name: "0", "FAULT_ACKS": str(acks)}
        found = child_environment(
            store=self.store.name,
            rollout_id="r-fault",
            attempt_id="1",
            trace_parent=f"00-{'1' * 32}-{'1' * 16}-01",
            startup=Path(lightning_otel.provider.startup.__path__[0]),
        )
        return {**found, "FAULT_ACKS": str(acks)}

    def start(
        self, *arguments: object, is_recorded: bool = True, extra: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """The started program, in a process group of its own."""
        return subprocess.Popen(
            # Of a fork in a process with threads, which is what is tested, Python 3.12 warns.
            [sys.executable, "-Wignore::DeprecationWarning", str(self.path), *map(str, arguments)],
            env={**self.environment(is_recorded=is_recorded), **(extra or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        *arguments: object,
        is_recorded: bool = True,
        limit_s: float = 50,
        extra: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run it to its end, which must come within the limit."""
        began = time.monotonic()
        child = self.start(*arguments, is_recorded=is_recorded, extra=extra)
        return finished(child, began, limit_s)

    def check(
        self,
        *arguments: object,
        limit_s: float = 50,
        warnings: int = 0,
        lost: int = 0,
        is_compared: bool = True,
        extra: Mapping[str, str] | None = None,
        row: str = "",
        tries: int = 1,
    ) -> Outcome:
        """Run it recorded, and once without us; the result is the same and the spans are there.

        Args:
            *arguments: The program's.
            limit_s: Wall limit of either run.
            warnings: How many lines it may say on stderr that it does not say without us.
            lost: How many acknowledged spans may be missing, each of them counted.
            is_compared: Whether to run it without us too; not where its output tells of us.
            extra: Environment of both runs.
            row: The row of the table that its counts go to.
            tries: How often the program brings its fault about.
        """
        done = self.run(*arguments, limit_s=limit_s, extra=extra)
        said: list[str] = []
        if is_compared:
            bare = self.run(*arguments, is_recorded=False, limit_s=limit_s, extra=extra)
            assert (done.code, done.output) == (bare.code, bare.output), done.errors
            said = bare.errors.splitlines()
        ours = [line for line in done.errors.splitlines() if line not in said]
        assert len(ours) <= warnings, done.errors
        counts = self.settled_counts(lost=lost)
        if row:
            note(row, counts, tries, counted=lost)
        return done

    def settled_counts(self, *, lost: int = 0, extra: int = 0) -> Counts:
        """What became of the spans; the same before settling and after it."""
        before = self.accounted()
        counts = self.counts()
        self.store.settle()
        after = self.accounted()
        assert counts == self.counts()
        assert counts.doubled == 0, counts
        assert 0 <= counts.stored + lost - counts.ended <= extra, (counts, after)
        assert before == after
        assert sum(after.dropped.values()) == lost, after
        return counts

    def accounted(self) -> Accounting:
        """The store's accounting, which must balance and say what the views say."""
        found = self.store.accounting()
        (row,) = self.store.sql("SELECT count(end_ns) AS n FROM spans")
        assert found.is_balanced, found
        assert found.stored == row["n"]
        for each in self.store.accounting_by_process().values():
            assert each.is_balanced, each
        return found

    def counts(self) -> Counts:
        """What the store holds of the spans that the program made."""
        (row,) = self.store.sql(
            "SELECT count(*) AS stored, count(*) - count(DISTINCT (trace_id, span_id)) AS doubled "
            "FROM spans WHERE end_ns IS NOT NULL"
        )
        distinct = row["stored"] - row["doubled"]
        return Counts(self.acked, distinct, max(0, self.acked - distinct), row["doubled"])


def finished(child: "subprocess.Popen[str]", began: float, limit_s: float) -> Outcome:
    """How a started program ended, within the limit."""
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        raise AssertionError(f"hung for {limit_s} s: {output[-500:]} {errors[-2000:]}") from None
    return Outcome(child.returncode, output, errors, time.monotonic() - began)

"""Files as spans: documents one after the other, and sessions of coding agents as they grow."""

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.cli.documents import Refuse, is_packed, open_lines, read_documents
from lightning_otel.cli.output import print_note, progress_bar
from lightning_otel.errors import ReceiveError, StoreError
from lightning_otel.messages import object_of, objects
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.receivers.coding_agents import SessionReader
    from lightning_otel.receivers.sessions import SessionLinks, SessionSpans
    from lightning_otel.types import Span

_BATCH: Final = 1000
_BATCH_CHARACTERS: Final = 32 << 20
_QUIET_S: Final = 600
"""The longest that either program waits for an answer."""
_CALLS: Final = """
SELECT trace_id, span_id, parent_span_id, response_id, rollout_id,
  json_array_length(output_messages, '$[0].parts') AS parts, {columns}
FROM spans WHERE operation IN ('chat', 'execute_tool', 'invoke_agent')
  AND attributes->>'$."gen_ai.conversation.id"' = rollout_id
ORDER BY length(response_id), response_id"""
"""Calls, tools and agents of sessions, and what tells copies of calls."""
_REWARDS: Final = "SELECT trace_id, span_id, reward FROM spans WHERE reward IS NOT NULL"


class _Growth:
    """A session file that is followed, and how far it was read.

    Attributes:
        reader: None for a file that is no session.
        end: The byte after its last line that was read.
        line: That line; where it stands no more, the file was rewritten.
        is_over: Whether it was when it was flushed; None while something comes.
    """

    def __init__(self, reader: "SessionReader | None") -> None:
        self.reader = reader
        self.end = self.lines = 0
        self.line = b""
        self.is_over: bool | None = None


class FileReader:
    """Reads files into a store.

    Attributes:
        known: Attempts that were not read, as the store recorded them itself.
        open: Answers of sessions that were not read, as they may be half written.
        grown: Answers of which the store has less than their session.
    """

    def __init__(self, opened: "Store", limit_bytes: int, *, is_following: bool) -> None:
        from lightning_otel.receivers.sessions import SessionLinks

        self._opened = opened
        self._is_following = is_following
        self._limit_bytes = limit_bytes
        self._traces: dict[tuple[str, str], set[str]] | None = None
        self._links = SessionLinks()
        self._growths: dict[Path, _Growth] = {}
        self._sessions: list[SessionSpans] = []
        self._rewards: dict[tuple[str, str], float] | None = None
        self._lengths: dict[tuple[str, str], int] | None = None
        self.known = self.open = self.grown = 0

    def keep_spans(self, path: Path, refuse: Refuse) -> int:
        """Keep the spans of a file, and return how many there are."""
        reader, is_packed = open_session_file(path, self._links)
        if reader is not None and self._lengths is None:
            self._lengths = self._load_calls()
        if self._is_following and reader is not None and not is_packed:
            self._growths[path] = _Growth(reader)
            return self.keep_growth(path, refuse)
        size, is_over = path.stat().st_size, _is_quiet(path)
        with progress_bar(path.name.replace("[", r"\[")) as progress:

            def read() -> "Iterator[Span]":
                for text, number, end in read_documents(path, refuse, self._limit_bytes):
                    yield from self._read_spans(text, partial(refuse, number), reader)
                    if progress is not None:
                        progress(end, size)
                if reader is not None:
                    yield from self._end_session(path, reader, is_over=is_over)

            return self._keep_all(read())

    def keep_growth(self, path: Path, refuse: Refuse) -> int:
        """Keep what came to a session since it was read; what nothing came to is flushed."""
        growth = self._growths.get(path)
        try:
            # Its first lines may come late.
            if growth is None or growth.reader is None or not growth.reader.session.id:
                reader, is_packed = open_session_file(path, self._links)
                growth = self._growths[path] = _Growth(None if is_packed else reader)
            if growth.reader is None or not growth.reader.session.id:
                return 0
            if _is_rewritten(path, growth):
                print_note(f"  {path} was rewritten: it is read again from its start")
                del self._growths[path]
                ended = self._end_session(path, growth.reader, is_over=True)
                return self._keep_all(ended) + self.keep_growth(path, refuse)
            if path.stat().st_size <= growth.end:
                return self._flush_growth(path, growth, growth.reader)
            return self._keep_all(self._read_growth(path, growth, growth.reader, refuse))
        except OSError:
            return self._end_growth(path)

    def end_missing(self, paths: Collection[Path]) -> int:
        """Keep what followed sessions say that are no more; return how many spans that are."""
        return sum(self._end_growth(path) for path in [*self._growths] if path not in paths)

    def _end_growth(self, path: Path) -> int:
        growth = self._growths.pop(path, None)
        if growth is None or growth.reader is None:
            return 0
        print_note(f"  {path} cannot be read any more: what was read of it is kept")
        return self._keep_all(self._end_session(path, growth.reader, is_over=True))

    def _read_growth(
        self, path: Path, growth: _Growth, reader: "SessionReader", refuse: Refuse
    ) -> "Iterator[Span]":
        growth.is_over = None
        with path.open("rb") as file:
            file.seek(growth.end)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                growth.end += len(line)
                growth.lines += 1
                growth.line = line
                if not line.isspace():
                    yield from self._read_spans(line, partial(refuse, growth.lines), reader)

    def _flush_growth(self, path: Path, growth: _Growth, reader: "SessionReader") -> int:
        is_over = _is_quiet(path)
        if growth.is_over is is_over:
            return 0
        growth.is_over = is_over
        return self._keep_all(reader.flush(is_over=is_over))

    def _end_session(
        self, path: Path, reader: "SessionReader", *, is_over: bool
    ) -> "Iterator[Span]":
        yield from reader.flush(is_over=is_over)
        self.open += reader.count_open()
        self._sessions.append(reader.session)
        if reader.session.others["system/microcompact_boundary"]:
            print_note(f"  {path}: results of tools that were cleared stand in full")
        if not reader.session.agents:
            print_note(f"  {path}: nothing to take: a session without a conversation")

    def end_sessions(self) -> int:
        """Keep what the ends of sessions complete; return how many spans that are."""
        from lightning_otel.receivers.sessions import make_agents

        def read() -> "Iterator[Span]":
            for path, growth in self._growths.items():
                if growth.reader is not None:
                    is_over = not path.is_file() or _is_quiet(path)
                    yield from self._end_session(path, growth.reader, is_over=is_over)
            yield from make_agents(self._sessions, self._links)

        return self._keep_all(read())

    def _load_calls(self) -> dict[tuple[str, str], int]:
        """Note the answers that the store has; return how many parts each has, others none."""
        from lightning_otel.receivers import codex
        from lightning_otel.receivers.claude_code import RECORD_IDS

        names = *RECORD_IDS, codex.ITEMS
        columns = ", ".join(f"""attributes->>'$."{name}"' AS "{name}\"""" for name in names)
        lengths: dict[tuple[str, str], int] = {}
        for row in self._query(_CALLS.format(columns=columns)):
            lengths[row["trace_id"], row["span_id"]] = row["parts"] or 0
            if row["response_id"] is None:
                continue
            if row[codex.ITEMS]:
                session_id = row["response_id"].rpartition("/")[0]
                self._links.items.setdefault(session_id, []).extend(row[codex.ITEMS].split())
            uuid, digest = (row[name] for name in RECORD_IDS)
            if uuid:
                message_id = row["response_id"].removesuffix(f"/{uuid}")
                ids = [uuid, digest]
                if message_id == row["response_id"]:
                    ids.append(row["rollout_id"])
                owner = row["rollout_id"], row["parent_span_id"], uuid
                self._links.claim_answer(message_id, ids, owner)
        return lengths

    def _query(self, sql: str) -> Iterable[Mapping[str, Any]]:
        layout = self._opened.layout
        return self._opened.sql(sql) if layout is not None and layout.exists() else ()

    def _keep_all(self, spans: "Iterable[Span]") -> int:
        count = characters = 0
        batch: list[Span] = []
        for span in spans:
            if (length := (self._lengths or {}).get((span.trace_id, span.span_id))) is not None:
                self.grown += _count_parts(span) > length
                count += 1
                continue
            batch.append(span)
            values = span.attributes.values()
            characters += sum(len(value) for value in values if isinstance(value, str))
            if len(batch) >= _BATCH or characters >= _BATCH_CHARACTERS:
                count += self._keep_batch(batch)
                batch, characters = [], 0
        return count + self._keep_batch(batch)

    def _keep_batch(self, batch: "list[Span]") -> int:
        try:
            self._opened.writer().add_all(batch)
        except OSError as exc:
            raise StoreError(
                f"cannot write to {self._opened.name}: {exc.strerror or exc}; make room and import "
                "again: what is there already is not stored twice"
            ) from exc
        return len(batch)

    def _read_spans(
        self, text: bytes, refuse: Callable[[str], None], reader: "SessionReader | None"
    ) -> "Iterator[Span]":
        from lightning_otel.receivers import Rejected, coding_agents, documents

        try:
            if reader is not None:
                records = coding_agents.read_line(reader, text)
            else:
                records = documents.decode_spans(text, self._is_recorded)
            for record in records:
                if not isinstance(record, Rejected):
                    if self._is_changed(record):
                        refuse("the score is another since it was imported; the first one stands")
                    else:
                        yield record
                elif record.is_known:
                    self.known += 1
                else:
                    refuse(record.reason)
        except ReceiveError as exc:
            refuse(exc.what)

    def _is_changed(self, span: "Span") -> bool:
        if span.name != c.SPAN_ANNOTATION:
            return False
        if self._rewards is None:
            rows = self._query(_REWARDS)
            self._rewards = {(row["trace_id"], row["span_id"]): row["reward"] for row in rows}
        former = self._rewards.get((span.trace_id, span.span_id))
        return former not in (None, span.attributes.get(f"{c.REWARD_PREFIX}.0.value"))

    def _is_recorded(self, span: "Span") -> bool:
        if self._traces is None:
            self._traces = {}
            for row in self._query("SELECT DISTINCT rollout_id, attempt_id, trace_id FROM spans"):
                attempt = row["rollout_id"] or row["trace_id"], row["attempt_id"] or "1"
                self._traces.setdefault(attempt, set()).add(row["trace_id"])
        traces = self._traces.get((span.rollout_id, span.attempt_id), set())
        return bool(traces - {span.trace_id})


def _count_parts(span: "Span") -> int:
    answer = objects(parse_json(span.attributes.get(c.OUTPUT_MESSAGES)))
    return sum(len(message["parts"]) for message in answer)


def _is_quiet(path: Path) -> bool:
    """Return whether a file was not written to for so long that no answer is being written."""
    return time.time() - path.stat().st_mtime > _QUIET_S


def _is_rewritten(path: Path, growth: _Growth) -> bool:
    with path.open("rb") as file:
        file.seek(growth.end - len(growth.line))
        return file.read(len(growth.line)) != growth.line


def open_session_file(path: Path, links: "SessionLinks") -> "tuple[SessionReader | None, bool]":
    """Return a reader of a session file, None for another; and whether it is compressed."""
    from lightning_otel.receivers.coding_agents import open_session

    metadata = path.with_suffix(".meta.json")
    try:
        about = object_of(parse_json(metadata.read_text()) if metadata.is_file() else None)
        with open_lines(path) as (lines, _):
            return open_session(lines, about, links), is_packed(path)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, ReceiveError):
        return None, False  # who reads it all says why

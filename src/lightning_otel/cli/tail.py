"""``tail``: what agents do just now, for a person who looks on or for a program."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.names import AGENT
from lightning_otel.cli.options import SignalStop, When, store_option
from lightning_otel.cli.output import (
    count_noun,
    json_text,
    line_printer,
    print_note,
    suggest,
)
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.store.follow import Follower
    from lightning_otel.store.layout import Layout
    from lightning_otel.types import Span

_LONGEST_NS: Final = 86_400_000_000_000
"""Of spans that ended since a time, those that began earlier than this before it are not found."""
_MOST_TRACES: Final = 10_000
_WORDS: Final = (
    ("call", "call"), ("tool", "tool call"), ("reward", "reward"), ("error", "error"),
)  # fmt: skip


@click.command()
@click.option("--errors", is_flag=True, help="Only failures.")
@click.option("--conversation", metavar="ID", help="Only this conversation; any unique prefix.")
@click.option("--agent", type=AGENT, metavar="PATTERN", help="Only these agents (a pattern).")
@click.option("--since", type=When(), metavar="TIME",
              help="Start with spans that ended after: 10m, 2h, today, 2026-11-01.")  # fmt: skip
@click.option("--once", is_flag=True, help="Stop after the spans stored so far.")
@click.option("--jsonl", is_flag=True, help="Print whole spans as JSON lines.")
@click.option("--consumer", metavar="NAME",
              help="Print every span as a JSON line, each once: started again under this name, "
              "continue where it stopped.")  # fmt: skip
@store_option
def tail(
    since: int | None, once: bool, jsonl: bool, consumer: str | None, store: str | None,
    **filters: Any,
) -> None:  # fmt: skip
    """Watch agents live: messages, tool calls and rewards as they arrive.

    Starts now, or at --since, and saves no position; a program that must miss nothing names itself
    with --consumer. Ends with Ctrl-C and prints counts.
    """
    from lightning_otel.cli.spans import ChatLines, sdk_json

    if consumer is not None:
        if since is not None or any(filters.values()):
            raise ConfigError("a consumer gets every span; leave out --since and what selects")
        _print_spans_once(Store(store), consumer, is_once=once)
        return

    layout = Store(store).layout
    if layout is None:
        raise ConfigError("tail needs a store on this disk; name one with --store")
    chat, is_wanted, print_line = ChatLines(), _make_filter(**filters), line_printer()
    shown_spans = passed = 0
    with SignalStop() as stop, _open_follower(layout, stop, since, is_once=once) as follower:
        print_note(f"⚡ {layout.catalogue}{'' if once else ': Ctrl-C ends it'}")
        for span in follower:
            lines = chat.lines(span) if is_wanted(span) else None
            if lines is None:
                passed += 1
                continue
            shown_spans += bool(lines) or jsonl
            if jsonl:
                click.echo(json_text(sdk_json(span)))
            else:
                for line in lines:
                    print_line(line)
            sys.stdout.flush()
    counts = [count_noun(chat.counts.get(kind, 0), word) for kind, word in _WORDS]
    remainder = f"; {count_noun(passed, 'span')} of others" if passed else ""
    whole = sum(number for kind, number in chat.counts.items() if kind != "error")
    print_note(
        f"⚡ {count_noun(whole, 'span')}, {shown_spans} shown: {', '.join(counts)}{remainder}"
    )
    suggest("show @last", store)


def _wait_for_store(layout: "Layout", stop: SignalStop) -> bool:
    """Wait for a store that nothing was recorded into yet; whether it was waited for."""
    if layout.exists():
        return False
    print_note(f"nothing is recorded in {layout.catalogue} yet: waiting; Ctrl-C ends it")
    while not layout.exists():
        if stop.is_set():
            raise KeyboardInterrupt
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _open_follower(
    layout: "Layout", stop: SignalStop, since: int | None, *, is_once: bool
) -> Iterator["Follower"]:
    from lightning_otel.store.follow import Follower

    is_new = not is_once and _wait_for_store(layout, stop)
    layout.require()
    follower = Follower(
        layout,
        None,
        idle_s=0 if is_once else None,
        since_ns=0 if since is None else max(0, since - _LONGEST_NS),
        select=None if since is None else lambda span: (span.end_ns or 0) >= since,
    )
    try:
        # Of a store that was waited for nothing is old.
        if since is None and not is_once and not is_new:
            follower.skip()
        stop.follower = follower
        if stop.is_set():
            follower.stop()
        yield follower
    finally:
        follower.close()


def _make_filter(
    *, agent: str | None, conversation: str | None, errors: bool
) -> "Callable[[Span], bool]":
    """Return a filter of spans; of a conversation, its whole trace once it is known."""
    from lightning_otel.types import conventions as c

    traces: dict[str, None] = {}

    def is_wanted(span: "Span") -> bool:
        get = span.attributes.get
        if errors and span.status != "ERROR":
            return False
        if agent is not None and not fnmatchcase(str(get(c.AGENT_NAME) or ""), agent):
            return False
        if conversation is None or span.trace_id in traces:
            return True
        conversation_id = get(c.CONVERSATION_ID)
        if not isinstance(conversation_id, str) or not conversation_id.startswith(conversation):
            return False
        if len(traces) >= _MOST_TRACES:
            traces.pop(next(iter(traces)))
        traces[span.trace_id] = None
        return True

    return is_wanted


def _print_spans_once(opened: Store, name: str, *, is_once: bool) -> None:

    from lightning_otel.cli.spans import sdk_json

    with SignalStop() as stop, opened.follow(name, idle_s=0 if is_once else None) as follower:
        stop.follower = follower
        for span in follower:
            click.echo(json_text(sdk_json(span)))
            sys.stdout.flush()

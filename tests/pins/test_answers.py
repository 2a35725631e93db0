"""What the command line, HTTP and Python answer of a store that an older commit wrote.

    WRITE_PINS=1 pytest tests/pins/test_answers.py    # write the answers down anew

``make_store.py`` wrote the store: it holds a conversation of every convention and every example
program. The answers are one text, a block each; see them with ``xz -dc tests/data/pins/*.txt.xz``.
"""

import difflib
import json
import lzma
import os
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.command import invoke
from tests.viewer.browsing import KEY
from tests.viewer.client import Asking

from lightning_otel import Queue, Resources, State, Store

DATA = Path(__file__).resolve().parents[1] / "data" / "pins"
ANSWERS = DATA / "answers.txt.xz"
_HEAD = "#### "
_SIZES = re.compile(r'"bytes": \d+|\d+ [kM]?B$', re.MULTILINE)

COMMANDS = (
    "ls --json",
    "ls traces --jsonl --all",
    "stats",
    "stats --json",
    "show @last --json",
    "show @last~2 --transitions",
    "show nothing",
    "analyze @last~1 --json",
    "diff @last~1 @last~2",
    "export sft -",
    "export kto -",
    "export grpo -",
    "export openai-sft -",
    "resources list --json",
    "resources show system_prompt",
    "resources diff system_prompt",
    "queue --json",
    "redact --list --json",
    "plot --json",
)
QUERIES = (
    "SELECT name, count(*) AS n, sum(input_tokens) AS tokens FROM spans GROUP BY ALL ORDER BY ALL",
    "SELECT agent, model, count(*) AS n FROM calls GROUP BY ALL ORDER BY ALL",
    "SELECT * FROM rewards ORDER BY ALL",
    "SELECT * FROM rollouts ORDER BY ALL",
)
LOOKS = (
    "show {}",
    "show {} --tree --json",
    "show {} --transitions",
    "show {} --findings --json",
    "show {} --svg -",
)
"""What is shown of a rollout, whatever its form."""
TABS = ("tree", "waterfall", "chat", "tools", "rewards")
_ROLLOUTS = "SELECT DISTINCT coalesce(rollout_id, trace_id) AS id FROM spans ORDER BY 1"
_TRACES = "SELECT trace_id AS id FROM spans GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 12"
_AGES = re.compile(r"\b(?:\d+ \w+ ago|began \d+ \w+)\b")
ROUTES = (
    "rollouts?limit=3",
    "transitions?limit=2",
    "resources",
    "resources/system_prompt",
    "resources/system_prompt@2",
    "nothing",
)


def unpack_store(folder: Path) -> Store:
    """Return the pinned store, fresh from its tar file."""
    with tarfile.open(DATA / "store-f4d8ed8.tar.xz") as tar:
        tar.extractall(folder)
    return Store(folder / "store" / "traces.duckdb")


def answer_command(store: Store, *arguments: str) -> str:
    """Return what a command prints on stdout, and how it ends."""
    done = invoke(*arguments, "--store", store.name)
    text = _SIZES.sub("SIZE", done.stdout)  # compression is no part of the answer
    return f"{text.rstrip()}\nexit {done.returncode}".replace(str(Path(store.name).parent), "STORE")


def answer_route(url: str, route: str) -> str:
    bare, _, host = url.partition("://")[2].rpartition("@")
    request = urllib.request.Request(f"http://{host}/v1/{route}")
    request.add_header("Authorization", f"Bearer {bare.lstrip(':')}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            code, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        code, body = exc.code, exc.read().decode()
    return f"{code}\n{body.rstrip()}".replace(host, "HOST")


def transitions_of(store: Store) -> list[str]:
    rows = [json.loads(line) for line in store.transitions(include_incomplete=True).lines()]
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def read_answers() -> dict[str, str]:
    """Return the answers as they are written down."""
    blocks = lzma.decompress(ANSWERS.read_bytes()).decode().split(f"\n{_HEAD}")
    return dict(block.removeprefix(_HEAD).split("\n", 1) for block in blocks)


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, str]]:
    """The answers as they are written down; with ``WRITE_PINS``, those of this run are."""
    if "WRITE_PINS" not in os.environ:
        yield read_answers()
        return
    found: dict[str, str] = _Written()
    yield found
    text = "\n".join(f"{_HEAD}{asked}\n{found[asked]}" for asked in sorted(found))
    ANSWERS.write_bytes(lzma.compress(text.encode(), preset=9))


class _Written(dict[str, str]):
    """Answers that become right by being given."""


def check(kept: dict[str, str], asked: str, answer: str) -> None:
    """Compare an answer with the one that is written down, or write it down."""
    if isinstance(kept, _Written):
        kept[asked] = answer
    elif answer != kept[asked]:
        changes = difflib.unified_diff(kept[asked].splitlines(), answer.splitlines(), n=0)
        pytest.fail("\n".join([asked, *(line[:2000] for line in islice(changes, 40))]))


@pytest.fixture
def pinned(tmp_path: Path) -> Store:
    """The pinned store, fresh from its tar file."""
    return unpack_store(tmp_path)


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The same for tests that only read, settled, which makes reading it quick."""
    store = unpack_store(tmp_path_factory.mktemp("settled"))
    store.settle()
    return store


@pytest.mark.parametrize("command", COMMANDS)
def test_command_answers_as_it_did(command: str, settled: Store, kept: dict[str, str]) -> None:
    """Say of the older store what was said."""
    check(kept, command, answer_command(settled, *command.split()))


@pytest.mark.parametrize("query", QUERIES)
def test_sql_answers_as_it_did(query: str, settled: Store, kept: dict[str, str]) -> None:
    """The views hold the rows that they held."""
    check(kept, query, "\n".join(map(json.dumps, settled.sql(query).rows())))


def test_http_answers_as_it_did(
    settled: Store, served: Callable[..., str], kept: dict[str, str]
) -> None:
    """Each route gives what it gave."""
    pytest.importorskip("hypercorn")
    url = served(settled)
    for route in ROUTES:
        check(kept, f"GET /v1/{route}", answer_route(url, route))


@pytest.mark.parametrize("look", LOOKS)
def test_a_rollout_looks_as_it_did(look: str, settled: Store, kept: dict[str, str]) -> None:
    """The terminal, programs and pictures say of every rollout what they said."""
    ids = [row["id"] for row in settled.sql(_ROLLOUTS)]
    told = (answer_command(settled, *look.format(each).split()) for each in ids)
    check(kept, look, "\n".join(told))


def test_a_trace_looks_as_it_did(
    settled: Store, served: Callable[..., str], kept: dict[str, str]
) -> None:
    """The pages of a trace, and a notebook, say what they said."""
    pytest.importorskip("hypercorn")
    ids = [row["id"] for row in settled.sql(_TRACES)]
    asking = Asking(served(settled, "", key=KEY))
    for tab in TABS:
        pages = (asking.get(f"/traces/{each}?tab={tab}").words for each in ids)
        check(kept, f"tab {tab}", "\n".join(_AGES.sub("AGE", page) for page in pages))
    drawn = (settled.spans(trace_id=each)._repr_html_() for each in ids)  # type: ignore[attr-defined]
    check(kept, "notebook", "\n".join(drawn))


@pytest.mark.pain(18)
@pytest.mark.parametrize("act", [Store.rollouts, Store.settle, Store.compact, Store.repair])
def test_store_is_brought_up_to_date_with_nothing_changed(
    act: Callable[[Any], object], pinned: Store, kept: dict[str, str]
) -> None:
    """What rewrites files leaves transitions, and where a consumer stands, as they were."""
    act(pinned)

    check(kept, "transitions", "\n".join(transitions_of(pinned)))
    check(kept, "report", f"{pinned.report()}")
    with pinned.follow("pinned") as follower:
        spans = follower.batch()
    assert (len(spans), len({span.span_id for span in spans})) == (305, 305)


def test_resources_and_rollouts_go_on(pinned: Store) -> None:
    """The older database of resources and rollouts takes what comes next."""
    state = State.beside(pinned)
    resources, queue = Resources(state), Queue(state)
    resources.promote("system_prompt")

    assert resources.get("system_prompt").version == 2
    lease = queue.lease("worker")
    assert lease is not None
    assert queue.succeed(lease, 1.0)
    state.close()

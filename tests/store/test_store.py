"""The store as a user meets it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapter.forest import SECOND, draw

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError, NotFoundError, StoreError
from lightning_otel.types import Span


def test_store_is_named_by_path_environment_or_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path wins over the environment, and that over ``.lightning/``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(tmp_path / "env.duckdb"))
    given, from_environment = Store(tmp_path / "given"), Store()
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    default = Store()

    assert given.name == str(tmp_path / "given" / "traces.duckdb")
    assert from_environment.name == str(tmp_path / "env.duckdb")
    assert default.name == str(tmp_path / ".lightning" / "traces.duckdb")
    assert repr(given) == f"Store({given.name!r})"
    assert list(tmp_path.iterdir()) == []


def test_url_of_an_unknown_engine_is_refused_without_its_password() -> None:
    """Errors end in logs; who named a password shall not find it there."""
    with pytest.raises(ConfigError, match=r"no engine for 'redis://…@host/0'.*ducklake") as raised:
        Store("redis://me:hunter2@host/0?password=hunter2")

    assert "hunter2" not in str(raised.value)


def test_spans_come_in_order_of_their_start(store: Store, make_span: Callable[..., Span]) -> None:
    """By time, then by the process's own count."""
    late = make_span(start_ns=9, sequence=3)
    first = make_span(start_ns=5, sequence=1, process="p")
    second = make_span(start_ns=5, sequence=2, process="p")
    store.add([late, second, first])

    assert store.spans().rows() == [first, second, late]


def test_sql_takes_parameters(store: Store, make_span: Callable[..., Span]) -> None:
    """Values are bound, not pasted."""
    store.add(make_span(name=name) for name in ("a", "b", "'; DROP VIEW spans; --"))

    rows = store.sql("SELECT name FROM spans WHERE name > ? ORDER BY name", ["a"]).rows()
    odd = store.sql("SELECT count(*) AS n FROM spans WHERE name = ?", ["'; DROP VIEW spans; --"])

    assert rows == [{"name": "b"}]
    assert odd.rows() == [{"n": 1}]


def test_rollouts_have_one_row_each(store: Store) -> None:
    """Status, times and counts of each rollout and attempt."""
    ok = f"{c.SPAN_ROLLOUT}@{c.TASK}=solve("
    call = f"a[ ok@tokens=5@{c.OUTPUT_TOKENS}=7 ]"
    failed = f"#rollout=s,attempt=2,trace=b {c.SPAN_ROLLOUT}@error( )"
    store.add(draw(f"{ok} {call} ) {failed}").spans)

    first, second = store.rollouts().rows()

    assert (first["rollout_id"], first["attempt_id"], first["status"]) == ("r1", "1", "succeeded")
    times = first["start_ns"] // SECOND, first["end_ns"] // SECOND
    assert (times, first["spans"], first["calls"]) == ((1, 6), 3, 1)
    assert (first["input_tokens"], first["output_tokens"], first["agents"]) == (5, 7, "a")
    assert first["task"] == "solve"
    assert (second["rollout_id"], second["attempt_id"], second["status"]) == ("s", "2", "failed")


def test_writing_where_nothing_can_be_made_is_an_error(tmp_path: Path) -> None:
    """Who asks for a writer hears that there is none."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match="cannot make the store"):
        Store(tmp_path / "file" / "x.duckdb").writer()


@pytest.mark.parametrize(
    "use",
    [
        "con, table = store.connect(), store.sql('SELECT * FROM spans'); table.rows()",
        "half = iter(store.spans()); next(half); stream = store.spans().__arrow_c_stream__()",
        "frames = store.spans().pl(), store.spans().arrow(), store.spans().df()",
        "for span in store.spans(): raise SystemExit(0)",
        "import builtins; builtins.kept = store.spans(); list(builtins.kept); store.settle()",
    ],
)
def test_using_a_store_leaves_nothing_on_stderr_at_exit(
    tmp_path: Path, run_python: Callable[..., str], use: str
) -> None:
    """DuckDB 2 tells of what is alive when the interpreter ends: nothing of ours is."""
    script = f"""
from lightning_otel import Store
from lightning_otel.types import Span
import sys
store = Store(sys.argv[1])
store.add(Span(f"{{n:032x}}", f"{{n:016x}}", None, "s", n, n + 1) for n in range(1, 3000))
{use}
"""

    assert run_python(script, tmp_path / "traces.duckdb") == ""


def test_find_says_why_nothing_is_found(
    store: Store, make_span: Callable[..., Span], tmp_path: Path
) -> None:
    """A prefix is taken by the letter; of several candidates a few are listed, in order."""
    store.add([make_span(attributes={c.ROLLOUT_ID: "run-1"})])
    store.add(make_span(attributes={c.ROLLOUT_ID: f"job-{number}"}) for number in range(20, 40))
    store.add([make_span(attributes={c.ROLLOUT_ID: "job-2"})])
    empty = Store(tmp_path / "empty.duckdb")
    empty.writer()

    assert store.find("job-2") == ("rollout", "job-2")
    for prefix in ("x", "RUN", "' OR 1=1 --", "%", "run-1x"):
        with pytest.raises(NotFoundError, match="no rollout, trace, span or response id begins"):
            store.find(prefix)
    with pytest.raises(NotFoundError, match=r"several rollout ids: job-2, job-20, .*more"):
        store.find("job")
    with pytest.raises(NotFoundError, match="no span yet"):
        empty.find("@last")

"""E1, E3 and E9: no secret in any stored byte, no file of ours for others, no pickle anywhere."""

import ast
import contextlib
import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import conftest as processes

import lightning_otel
from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import LightningOtelError
from lightning_otel.types import Span

AGENT = Path(__file__).with_name("telling_agent.py")
BARE = "canaryBareHidden"
"""A secret of no shape that could be known: it may stand where no value is kept."""
SHAPED = "sk-proj-" + "canaryShapedHidden0" * 2
WAYS = {"alone": (sys.executable,), **processes.WAYS}
del WAYS["auto_trace"]
SOURCE = Path(lightning_otel.__file__).parent
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "numpy.load", "np.load", "yaml.load"}


@pytest.mark.parametrize("way", WAYS)
def test_no_secret_reaches_a_stored_byte(tmp_path: Path, way: str) -> None:
    """Keys in headers, queries, bodies, URLs, environments and errors are nowhere that we write."""
    store = tmp_path / "store" / "traces.duckdb"
    environment = {
        **os.environ,
        "LIGHTNING_OTEL_STORE": str(store),
        "BARE_SECRET": BARE,
        "OPENAI_API_KEY": BARE,
        "AZURE_OPENAI_AD_TOKEN": BARE,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={BARE}",
    }
    with DemoServer() as server:
        done = subprocess.run(
            [*WAYS[way], str(AGENT), server.base_url, SHAPED, f"--api-key={BARE}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            cwd=tmp_path,
        )
        paths = [exchange.path for exchange in server.log]

    assert done.returncode == 0, done.stderr
    # The canaries were sent: what follows looks for something that was there.
    assert any(BARE in path for path in paths)
    opened = Store(store)
    spans = opened.spans().rows()
    assert sum("[redacted:" in str(span.attributes) for span in spans) > 10
    assert any(span.status == "ERROR" for span in spans)
    ours = [line for line in done.stderr.splitlines() if "lightning_otel" in line]
    assert traces_of_canaries(store.parent) == []
    assert [line for line in ours if BARE in line or SHAPED in line] == []

    opened.writer().seal()
    opened.settle()
    opened.pack(tmp_path / "packed.duckdb")
    opened.spans().to_parquet(tmp_path / "spans.parquet")
    opened.transitions().to_parquet(tmp_path / "transitions.parquet")

    assert list((store.parent / "traces.duckdb.d" / "data").glob("[!_]*.parquet"))
    assert traces_of_canaries(tmp_path) == []
    text = "".join(map(str, opened.connect().sql("SELECT * FROM spans").fetchall()))
    text += "".join(map(str, opened.transitions().dicts()))
    assert "[redacted:api_key]" in text
    assert BARE not in text
    assert "canaryShapedHidden" not in text


def traces_of_canaries(folder: Path) -> list[str]:
    """Files in which a canary stands, as it was or in base64."""
    wanted = [BARE.encode(), b"canaryShapedHidden"]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(each in path.read_bytes() for each in wanted)
    ]


@pytest.fixture
def make_span() -> Callable[..., Span]:
    numbers = itertools.count(1)

    def make() -> Span:
        number = next(numbers)
        return Span(
            trace_id=f"{number:032x}",
            span_id=f"{number:016x}",
            parent_span_id=None,
            name="work",
            start_ns=1_000 * number,
            end_ns=1_000 * number + 500,
        )

    return make


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_nothing_we_make_is_for_others(tmp_path: Path, make_span: Callable[..., Span]) -> None:
    """Segments, data, catalogue, packs and exports are the user's alone under any umask."""
    home = tmp_path / "home"
    store = Store(home / "deeper" / "traces.duckdb")

    for _ in range(2):
        store.add([make_span()])
        store.writer().seal()
        store.settle()
        store.add([make_span()])
        store.connect().close()
    store.pack(home / "packed.duckdb")
    store.spans().to_parquet(home / "spans.parquet")
    command = (sys.executable, "-m", "lightning_otel", "export")
    for target, name in (("spans", "s.jsonl"), ("spans", "s.parquet"), ("triplets", "t.jsonl")):
        done = subprocess.run(
            [*command, target, "-o", str(home / name), "--store", store.name],
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == (0 if target == "spans" else 3), done.stderr  # 3: no transition

    made = [home, *home.rglob("*")]
    assert len(made) > 12
    assert [(str(path), oct(path.stat().st_mode)) for path in made if is_open(path)] == []


def is_open(path: Path) -> bool:
    """Whether a file or folder grants anything to anybody but its owner."""
    return bool(stat.S_IMODE(path.lstat().st_mode) & 0o077)


def test_what_stood_there_keeps_its_rights(tmp_path: Path, make_span: Callable[..., Span]) -> None:
    """A file the user made to be shared is still shared when an export is written into it."""
    shared = tmp_path / "shared.parquet"
    shared.touch()
    shared.chmod(0o664)
    store = Store(tmp_path / "traces.duckdb")
    store.add([make_span()])

    store.spans().to_parquet(shared)

    assert stat.S_IMODE(shared.stat().st_mode) == 0o664


@pytest.mark.parametrize(
    "place",
    [
        "traces.duckdb", "traces.duckdb.d/catalogue.stamp", "traces.duckdb.d/settler.lock",
        "traces.duckdb.d/data/_empty.parquet", "traces.duckdb.d/manifest.ndjson",
        "traces.duckdb.d/live/_empty.ndjson", ".gitignore", "traces.duckdb.d/.gitignore",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_dangling", [False, True], ids=["file", "nothing"])
def test_no_link_leads_our_writing_elsewhere(
    tmp_path: Path, make_span: Callable[..., Span], place: str, *, is_dangling: bool
) -> None:
    """A symbolic link planted where we write is refused or replaced, never written through."""
    victim = tmp_path / "victim"
    if not is_dangling:
        victim.write_bytes(b"precious")
    store = Store(tmp_path / "home" / "traces.duckdb")
    store.add([])
    planted = tmp_path / "home" / place
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim)

    acts: list[Callable[[], object]] = [
        lambda: store.add([make_span()]), lambda: store.writer().seal(), store.settle, store.connect
    ]  # fmt: skip
    for act in acts:
        with contextlib.suppress(LightningOtelError, OSError):
            act()

    assert victim.exists() != is_dangling
    assert is_dangling or victim.read_bytes() == b"precious"


def test_nothing_of_ours_reads_code_from_data() -> None:
    """No module imports pickle or its like, evaluates text, or loads with what can run code."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if is_unsafe(node)
    ]
    writing = SOURCE / "algorithms/apo/search.py"

    assert found == ["algorithms/apo/search.py:6"]
    assert "pickle.load" not in writing.read_text()
    assert len(list(SOURCE.rglob("*.py"))) > 100


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(p, weights_only=False)",
        "import pickle", "import os, pickle as p", "from pickle import loads", "import dill.source",
        "from multiprocessing import pickle", "eval('1')", "builtins.exec(x)", "torch.load(p)",
        "importlib.import_module('pickle')", "__import__('marshal')", "pandas.read_pickle(p)",
        "numpy.load(p, allow_pickle=True)", "frame.to_pickle(p)",
    ],
)  # fmt: skip
def test_the_gate_knows_what_is_unsafe(text: str) -> None:
    """The gate closes on each way in."""
    assert any(is_unsafe(node) for node in ast.walk(ast.parse(text)))


def is_unsafe(node: ast.AST) -> bool:
    """Whether a node of a program brings in what can run code that lies in data."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in UNSAFE for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names} | {(node.module or "").partition(".")[0]}
        return not node.level and bool(names & UNSAFE)
    if isinstance(node, ast.Constant):
        return node.value in UNSAFE
    if isinstance(node, ast.Attribute):
        return node.attr in {"read_pickle", "to_pickle", "loads_pickle", "exec", "eval"}
    if isinstance(node, ast.keyword):
        return node.arg == "allow_pickle" and getattr(node.value, "value", True) is not False
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in UNSAFE_CALLS:
        return False
    # So it reads numbers alone.
    return not any(
        each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords
    )

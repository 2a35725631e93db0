"""Certificates of exports: an in-toto Statement of the files, their rows, and the law they obey.

It is unsigned: it finds accidents, not forgers; tools of in-toto sign it as it is. A row counts by
its values, however their JSON is spelled; a column without a value may be missing.

Source: in-toto Attestation Framework, Statement v1.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from lightning_otel.dataset import formats
from lightning_otel.dataset.card import Facts
from lightning_otel.dataset.census import mark_step
from lightning_otel.dataset.tables import is_parquet, read_parquet
from lightning_otel.errors import (
    CertificateError,
    ConfigError,
    LightningOtelError,
    NotFoundError,
    QueryError,
)
from lightning_otel.types import Report

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

IN_FOLDER: Final = "certificate.json"
_STATEMENT: Final = "https://in-toto.io/Statement/v1"
_PREDICATE: Final = "urn:lightning-otel:certificate:v1"
_SORTED: Final = orjson.OPT_SORT_KEYS
_BLOCKS: Final = 64
_MOST_BYTES: Final = 10_000
_MOST_REASONS: Final = 16
_LONGEST: Final = 120
_MOST_OPTION_BYTES: Final = 1500
_FUNNEL: Final = ("rollouts", "calls", "transitions", "exact", "rewards", "rewards_placed")
_ABSENT: Final = """
SELECT span_id FROM (SELECT unnest(?::VARCHAR[]) AS span_id) AS named
ANTI JOIN spans USING (span_id) ORDER BY 1"""


def find_certificate(path: Path) -> Path:
    """Return where the certificate of an export stands: in its folder, or beside its file."""
    return path / IN_FOLDER if path.is_dir() else path.with_name(f"{path.name}.{IN_FOLDER}")


def write_certificate(facts: Facts, texts: Mapping[str, bytes], source: str) -> bytes:
    """Read the files that were written, and return their certificate, of 10 kB at most.

    ``texts`` are files beside those of rows, by name; ``source`` is the store's name.

    Raises:
        CertificateError: The rows do not account for every step, or are not those that were made.
    """
    census, split, reasons = facts.census, facts.split, facts.census.list_reasons()
    if not census.is_lawful:
        raise CertificateError(
            f"{census.in_rows} steps in rows and {sum(reasons.values())} left out are not the "
            f"{census.steps} that came; the format {facts.format} loses or repeats some"
        )
    subject = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    rows: dict[str, Any] = {}
    for part in facts.parts:
        rows[part.name] = _digest_rows(part.path, part.rows, is_ours=True)
        subject[part.name] = _digest_file(part.path)
        if rows[part.name]["rows"] != part.rows:
            raise CertificateError(f"{part.name} lost rows on the disk; export again")
    report = Report.total(census.reports)
    tasks = {side: len(names) for side, names in split.tasks.items()}
    predicate = {
        "format": facts.format,
        "law": {
            "steps": census.steps,
            "in_rows": census.in_rows,
            "left_out": _shorten_reasons(reasons),
            "has_span_ids": census.has_span_ids,
            "marks": [f"{mark:x}" for mark in census.marks],
            "last_ns": census.times_ns[1],
        },
        "funnel": {name: getattr(report, name) for name in _FUNNEL},
        "rows": rows,
        "rewards": census.describe_rewards(),
        "split": {"share": split.share, "seed": split.seed, "tasks": tasks},
        "options": _bound_options(facts.options),
        "store": Path(source).name[-_LONGEST:],
        "versions": {name: version(name) for name in ("lightning-otel", "duckdb")},
    }
    text = _canonical_text({
        "_type": _STATEMENT,
        "predicateType": _PREDICATE,
        "subject": [{"name": k, "digest": {"sha256": v}} for k, v in sorted(subject.items())],
        "predicate": predicate,
    })  # fmt: skip
    if len(text) > _MOST_BYTES:
        raise CertificateError(f"the certificate takes {len(text)} bytes; shorten the file's name")
    return text


def _canonical_text(statement: Mapping[str, Any]) -> bytes:
    predicate = {**statement["predicate"], "digest": None}
    bare = orjson.dumps({**statement, "predicate": predicate}, option=_SORTED)
    predicate["digest"] = hashlib.sha256(bare).hexdigest()
    options = _SORTED | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps({**statement, "predicate": predicate}, option=options)


def _shorten_reasons(reasons: Mapping[str, int]) -> dict[str, int]:
    short: Counter[str] = Counter()
    for place, (reason, number) in enumerate(reasons.items()):
        short[ascii(reason)[1:_LONGEST] if place < _MOST_REASONS else "other reasons"] += number
    return short


def _bound_options(options: Mapping[str, Any]) -> Any:
    text = orjson.dumps(dict(options), lambda value: {"object": type(value).__qualname__}, _SORTED)
    is_short = len(text) <= _MOST_OPTION_BYTES
    return orjson.loads(text) if is_short else {"sha256": hashlib.sha256(text).hexdigest()}


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_rows(path: Path, count: int, *, is_ours: bool = False) -> dict[str, Any]:
    """Return digests of the rows of a file: over all in order, in any order, and of 64 blocks.

    ``count`` rows are divided into blocks; the spelling of a file of ours is the usual one.
    """
    ordered, unordered, size = hashlib.sha256(), 0, -(-count // _BLOCKS) or 1
    number, blocks, texts = 0, [0] * _BLOCKS, _read_rows(path, is_ours=is_ours)
    for block in range(_BLOCKS):
        # Rows that came in addition count with the last block.
        for text in texts if block == _BLOCKS - 1 else islice(texts, size):
            digest = hashlib.sha256(text).digest()
            ordered.update(digest)
            value = int.from_bytes(digest, "big")
            unordered += value
            number += 1
            blocks[block] += (value >> 192) * (2 * number + 1)
    sums = "".join(f"{block % (1 << 64):016x}" for block in blocks)
    total = f"{unordered % (1 << 256):064x}"
    return {"rows": number, "ordered": ordered.hexdigest(), "unordered": total, "blocks": sums}


def _read_rows(path: Path, *, is_ours: bool = False) -> Iterator[bytes]:
    """Yield rows in one spelling of JSON; what is no row, as it stands."""
    if is_parquet(path):
        yield from map(str.encode, read_parquet(path, is_limited=not is_ours))
        return
    with path.open("rb") as file:
        for text in filter(None, map(bytes.strip, file)):
            if is_ours and b"null" not in text:
                yield text
                continue
            with suppress(ValueError, TypeError, AttributeError):
                row = {k: v for k, v in orjson.loads(text).items() if v is not None}
                text = orjson.dumps(row)
            yield text


class CertificateCheck(NamedTuple):
    """What was looked at, and if it is as certified; None where that cannot be told."""

    name: str
    is_right: bool | None
    text: str


def verify(path: Path, store: "Store | None" = None) -> list[CertificateCheck]:
    """Compare an exported file or folder with its certificate, and with the store of its spans.

    Raises:
        NotFoundError: There is no certificate, or a newer version wrote it.
        StoreError: The store cannot be read.
    """
    place = find_certificate(path)
    if not place.is_file():
        raise NotFoundError(f"no certificate at {place}; make one with: export … --certificate")
    content = place.read_bytes()
    try:
        statement = orjson.loads(content)
        if _canonical_text(statement) != content:
            raise ValueError("it is not its own canonical text")
        if (statement["_type"], statement["predicateType"]) != (_STATEMENT, _PREDICATE):
            raise NotFoundError(f"{place} is of another kind; install a newer lightning-otel")
        return list(_compare(path, statement, store))
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        return [CertificateCheck(place.name, False, f"edited or damaged: {exc}")]


def _compare(
    path: Path, statement: Mapping[str, Any], store: "Store | None"
) -> Iterator[CertificateCheck]:
    predicate, folder = statement["predicate"], path if path.is_dir() else path.parent
    names, law = {IN_FOLDER}, predicate["law"]
    for entry in statement["subject"]:
        name = entry["name"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} is no name within {folder}")
        names.add(name)
        text = _compare_file(folder / name, entry["digest"]["sha256"], predicate["rows"].get(name))
        yield CertificateCheck(name, not text, text or "as certified")
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        name = file.relative_to(path).as_posix()
        # Names with a dot are those of git and of the Hub.
        if name not in names and not file.is_dir() and "/." not in f"/{name}":
            yield CertificateCheck(name, False, "not certified")
    out = sum(law["left_out"].values())
    is_lawful = None if law["in_rows"] is None else law["steps"] == law["in_rows"] + out
    text = f"{law['steps']} steps: {law['in_rows']} in rows, {out} left out"
    yield CertificateCheck("law", is_lawful, text)
    if store is not None:
        files = [folder / name for name in predicate["rows"] if (folder / name).is_file()]
        yield from _compare_store(store, files, predicate)


def _compare_file(path: Path, digest: str, certified: Mapping[str, Any] | None) -> str:
    if not path.is_file():
        return "missing"
    if _digest_file(path) == digest:
        return ""
    if certified is None:
        return "other bytes"
    try:
        rows = _digest_rows(path, certified["rows"])
    except LightningOtelError as exc:
        return f"cannot be read: {exc.what}"
    if rows == certified:
        return "other bytes, and the certified rows in their order"
    starts = range(0, 16 * _BLOCKS, 16)
    pairs = [rows["blocks"][at : at + 16] == certified["blocks"][at : at + 16] for at in starts]
    size, block = -(-certified["rows"] // _BLOCKS) or 1, pairs.index(False)
    place = f"the first that differs is among rows {block * size + 1} to {(block + 1) * size}"
    if rows["unordered"] == certified["unordered"]:
        return f"the certified rows in another order; {place}"
    return f"{rows['rows']} rows for {certified['rows']} certified; {place}"


def _compare_store(
    store: "Store", files: list[Path], predicate: Mapping[str, Any]
) -> Iterator[CertificateCheck]:
    """Yield if the store holds the steps that came, and the spans that rows name."""
    law, format_ = predicate["law"], formats.get(predicate["format"])
    options = {k: v for k, v in predicate["options"].items() if k not in format_.options()}
    came, out = (int(mark, 16) for mark in law["marks"])
    try:
        steps = store.transitions(bodies=False, **options)
        ids = [step.span_id for step in steps if step.start_ns <= law["last_ns"]]
    except (ConfigError, QueryError) as exc:
        yield CertificateCheck("steps", None, f"they cannot be selected as they were: {exc}")
    else:
        text = f"{len(ids)} in the store up to the last certified, {law['steps']} certified"
        yield CertificateCheck("steps", sum(map(mark_step, ids)) == came, text)
    if not law["has_span_ids"]:
        yield CertificateCheck(
            "spans", True, "rows of this format name none; the law is one of counts"
        )
        return
    names: list[str] = []
    for row in (row for path in files for row in _read_rows(path)):
        with suppress(ValueError, TypeError, LookupError, AttributeError):  # no row any more
            span_ids = format_.steps_of(orjson.loads(row))
            names += span_ids if isinstance(span_ids, list) else ()
    absent = list(store.sql(_ABSENT, [names]).dicts())
    is_right = not absent and sum(map(mark_step, names)) + out == came
    text = f"{len(names)} steps in rows, {len(absent)} not in the store"
    yield CertificateCheck("spans", is_right, text)

"""Certificates of exports: an in-toto Statement of the files, their rows, and the law they obey.

It is unsigned: it finds accidents, not forgers; tools of in-toto sign it as it is. A row counts by
its values, however their JSON is spelled; a column without a value may be missing.

Source: in-toto Attestation Framework, Statement v1.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from lightning_otel.dataset.census import MARKS, Account, Census, Split, count_calls_left_out
from lightning_otel.dataset.tables import is_parquet, read_parquet
from lightning_otel.errors import CertificateError
from lightning_otel.types import Report
from lightning_otel.types.instants import utc_text

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "urn:lightning-otel:certificate:v1"
IN_FOLDER: Final = "certificate.json"
BLOCKS: Final = 64
MOST_BYTES: Final = 10_000
_SUM: Final = 1 << 256
_BLOCK_BYTES: Final = 8
_BLOCK_SUM: Final = 1 << 8 * _BLOCK_BYTES
_MOST_REASONS: Final = 16
_LONGEST: Final = 120
_FUNNEL: Final = ("rollouts", "calls", "transitions", "exact", "rewards", "rewards_placed")
_MOST_OPTION_BYTES: Final = 1500


def find_certificate(path: Path) -> Path:
    """Return where the certificate of an export stands: in its folder, or beside its file."""
    return path / IN_FOLDER if path.is_dir() else path.with_name(f"{path.name}.{IN_FOLDER}")


class Rows(NamedTuple):
    """The rows of a file, in digests.

    Attributes:
        rows: Their number.
        ordered: SHA-256 over the rows' own, in order.
        unordered: The sum of the rows' SHA-256, modulo 2^256: the same in any order.
        blocks: Sums over each of 64 runs of rows, 8 bytes each; a row counts with its position.
    """

    rows: int
    ordered: str
    unordered: str
    blocks: str


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_rows(path: Path, count: int, *, is_ours: bool = False) -> Rows:
    """Read the rows of a file, JSON lines or Parquet, and return their digests.

    Args:
        path: The file.
        count: How many rows are expected, which are divided into blocks.
        is_ours: Whether this process wrote the file: then its spelling is ours already.

    Raises:
        ConfigError: It is no readable Parquet file.
    """
    ordered, unordered, size = hashlib.sha256(), 0, -(-count // BLOCKS) or 1
    blocks, number, texts = [0] * BLOCKS, 0, read_rows(path, is_ours=is_ours)
    for block in range(BLOCKS):
        # Rows that came in addition count with the last block.
        for text in texts if block == BLOCKS - 1 else islice(texts, size):
            digest = hashlib.sha256(text).digest()
            ordered.update(digest)
            value = int.from_bytes(digest, "big")
            unordered += value
            number += 1
            blocks[block] += (value >> 192) * (2 * number + 1)
    sums = b"".join((block % _BLOCK_SUM).to_bytes(_BLOCK_BYTES, "big") for block in blocks)
    return Rows(number, ordered.hexdigest(), f"{unordered % _SUM:064x}", sums.hex())


def read_rows(path: Path, *, is_ours: bool = False) -> Iterator[bytes]:
    """Yield the rows of a file in one spelling of JSON; what is no row, as it stands."""
    if is_parquet(path):
        yield from map(str.encode, read_parquet(path, memory_limit=None))
        return
    with path.open("rb") as file:
        for line in file:
            text = line.strip()
            if text and not (is_ours and b"null" not in text):
                with suppress(ValueError, TypeError, AttributeError):
                    # A column without a value may be missing.
                    items = orjson.loads(text).items()
                    text = orjson.dumps({k: v for k, v in items if v is not None})
            if text:
                yield text


def locate_difference(certified: Rows, rows: Rows) -> tuple[int, int]:
    """Return the first and last number, from 1, of the rows among which the first one differs."""
    size, width = -(-certified.rows // BLOCKS) or 1, 2 * _BLOCK_BYTES
    places = range(0, BLOCKS * width, width)
    pairs = (certified.blocks[at : at + width] == rows.blocks[at : at + width] for at in places)
    block = next((place for place, is_same in enumerate(pairs) if not is_same), BLOCKS - 1)
    return block * size + 1, max((block + 1) * size, rows.rows * (block == BLOCKS - 1))


def canonical_text(statement: Mapping[str, Any]) -> bytes:
    """Return the one text of a statement: keys sorted, two blanks a level, with its own digest."""
    predicate = {k: v for k, v in statement["predicate"].items() if k != "digest"}
    bare = {**statement, "predicate": predicate}
    digest = hashlib.sha256(orjson.dumps(bare, option=orjson.OPT_SORT_KEYS)).hexdigest()
    whole = {**bare, "predicate": {**predicate, "digest": digest}}
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(whole, option=options)


class Files(NamedTuple):
    """The files of an export: those of rows with their number, and others, by name."""

    rows: Mapping[str, tuple[Path, int]]
    others: Mapping[str, bytes]


def write_certificate(
    files: Files,
    format_name: str,
    *,
    account: Account,
    census: Census,
    split: Split,
    report: Report,
    options: Mapping[str, Any],
    source: str,
) -> bytes:
    """Read the files that were written, and return their certificate, of 10 kB at most.

    Raises:
        CertificateError: The rows do not account for every step, or are not those that were made.
    """
    if account.is_lawful is False:
        raise CertificateError(
            f"{account.in_rows} steps in rows and {account.left_out.total()} left out are not the "
            f"{account.steps} steps that came; the format {format_name} loses or repeats some"
        )
    subject, rows = dict[str, str](), dict[str, Any]()
    for name, (path, count) in files.rows.items():
        digests = digest_rows(path, count, is_ours=True)
        rows[name], subject[name] = digests._asdict(), digest_file(path)
        if digests.rows != count:
            raise CertificateError(f"{name} has {digests.rows} rows and not {count}; export again")
    subject |= {name: hashlib.sha256(text).hexdigest() for name, text in files.others.items()}
    last_ns = census.last_ns
    predicate = {
        "format": format_name,
        "law": {
            "steps": account.steps,
            "in_rows": account.in_rows,
            "left_out": _shorten_reasons(account.left_out, _MOST_REASONS),
            "has_span_ids": account.has_span_ids,
            "steps_mark": f"{census.steps_mark % MARKS:032x}",
            "left_out_mark": f"{census.left_out_mark % MARKS:032x}",
        },
        "funnel": {
            **{name: getattr(report, name) for name in _FUNNEL},
            "calls_left_out": _shorten_reasons(count_calls_left_out(report), _MOST_REASONS // 2),
        },
        "rows": rows,
        "rewards": census.describe_rewards(),
        "split": split.describe(),
        "options": _bound_options(options),
        "store": source[-_LONGEST:],
        "time": {"first": utc_text(census.first_ns or 0), "last": utc_text(last_ns),
                 "last_ns": last_ns},
        "versions": {name: version(name) for name in ("lightning-otel", "duckdb")},
    }  # fmt: skip
    statement = {
        "_type": STATEMENT,
        "predicateType": PREDICATE,
        "subject": [{"name": k, "digest": {"sha256": v}} for k, v in sorted(subject.items())],
        "predicate": predicate,
    }
    text = canonical_text(statement)
    if len(text) > MOST_BYTES:
        raise CertificateError(f"the certificate has {len(text)} bytes, over {MOST_BYTES}")
    return text


def _shorten_reasons(reasons: Mapping[str, int], most: int) -> dict[str, int]:
    """Return the most frequent reasons, each cut to a line, and the number of all others."""
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    short: dict[str, int] = {}
    for place, (reason, number) in enumerate(ranked):
        text = reason.encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore")
        name = text if place < most else "other reasons"
        short[name] = short.get(name, 0) + number
    return short


def _bound_options(options: Mapping[str, Any]) -> Any:
    """Return options as JSON; those that cannot be written down, or are many, by their digest."""

    def describe(value: Any) -> Any:
        return {"object": str(getattr(value, "__qualname__", type(value).__qualname__))[:_LONGEST]}

    text = orjson.dumps(dict(options), describe, orjson.OPT_SORT_KEYS)
    if len(text) > _MOST_OPTION_BYTES:
        return {"sha256": hashlib.sha256(text).hexdigest()}
    return orjson.loads(text)

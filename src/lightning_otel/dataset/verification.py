"""Verification of exported files: against their certificate, and the store they came from."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from lightning_otel.dataset import formats
from lightning_otel.dataset.census import MARKS, mark_steps
from lightning_otel.dataset.certificate import (
    IN_FOLDER,
    PREDICATE,
    STATEMENT,
    Rows,
    canonical_text,
    digest_file,
    digest_rows,
    find_certificate,
    locate_difference,
    read_rows,
)
from lightning_otel.errors import ConfigError, NotFoundError, QueryError

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_ABSENT: Final = """
SELECT span_id FROM (SELECT unnest(?::VARCHAR[]) AS span_id) AS named
ANTI JOIN spans USING (span_id) ORDER BY 1"""


class Verdict(NamedTuple):
    """What was looked at, and if it is as certified; None where that cannot be told."""

    name: str
    is_right: bool | None
    text: str


def verify(path: Path, store: "Store | None" = None) -> list[Verdict]:
    """Compare exported files with their certificate, and with the store if one is given.

    Args:
        path: The file or folder that was exported.
        store: Where its spans should be, and account for every step.

    Raises:
        NotFoundError: There is no certificate, or a newer version wrote it.
        StoreError: The store cannot be read.
    """
    place = find_certificate(path)
    if not place.is_file():
        raise NotFoundError(
            f"{path} has no certificate at {place}; make one with: export FORMAT OUT --certificate"
        )
    text = place.read_bytes()
    try:
        statement = orjson.loads(text)
        is_whole = canonical_text(statement) == text
    except (ValueError, TypeError, LookupError, AttributeError):
        is_whole = False
    if not is_whole:
        return [Verdict(place.name, False, "edited or damaged: it is not its own canonical text")]
    if (statement["_type"], statement["predicateType"]) != (STATEMENT, PREDICATE):
        raise NotFoundError(f"{place} is of the kind {statement['predicateType']}; install a newer "
                            "lightning-otel")  # fmt: skip
    try:
        return list(_compare(path, statement, store))
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        fault = f"not of the form of a certificate: {type(exc).__name__}: {exc}"
        return [Verdict(place.name, False, fault)]


def _compare(path: Path, statement: Mapping[str, Any], store: "Store | None") -> Iterator[Verdict]:
    predicate = statement["predicate"]
    folder = path if path.is_dir() else path.parent
    subject = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    for name, digest in subject.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} is no name within {folder}")
        yield _compare_file(folder, name, digest, predicate["rows"].get(name))
    if path.is_dir():
        yield from _list_extra(path, {*subject, IN_FOLDER})
    yield _check_law(predicate["law"])
    if store is not None:
        yield from _compare_store(store, folder, predicate)


def _compare_file(
    folder: Path, name: str, digest: str, described: Mapping[str, Any] | None
) -> Verdict:
    path = folder / name
    if not path.is_file():
        return Verdict(name, False, "missing")
    if digest_file(path) == digest:
        return Verdict(name, True, f"{described['rows']} rows" if described else "as certified")
    if described is None:
        return Verdict(name, False, "other bytes than certified")
    certified = Rows(**described)
    try:
        rows = digest_rows(path, certified.rows)
    except ConfigError as exc:
        return Verdict(name, False, f"cannot be read: {exc.what}")
    if rows == certified:
        return Verdict(name, False, "other bytes, and the certified rows in their order")
    first, last = locate_difference(certified, rows)
    place = f"row {first}" if first == last else f"one of the rows {first} to {last}"
    if rows.unordered == certified.unordered:
        text = f"the certified rows in another order; the first that moved is {place}"
    else:
        text = f"{rows.rows} rows, {certified.rows} certified; the first that differs is {place}"
    return Verdict(name, False, text)


def _list_extra(folder: Path, names: set[str]) -> Iterator[Verdict]:
    """Yield the files that are not certified; names with a dot are those of git and of the Hub."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        name = "/".join(parts)
        if name not in names and not path.is_dir() and not any(p.startswith(".") for p in parts):
            yield Verdict(name, False, "not certified")


def _check_law(law: Mapping[str, Any]) -> Verdict:
    if law["in_rows"] is None:
        return Verdict(
            "law", None, f"the format does not tell which of {law['steps']} steps it has"
        )
    rows, out = law["in_rows"], sum(law["left_out"].values())
    text = f"{law['steps']} steps: {rows} in rows, {out} left out"
    return Verdict("law", law["steps"] == rows + out, text)


def _compare_store(store: "Store", folder: Path, predicate: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield if the spans that rows name are in the store, and if it holds the steps that came."""
    options, law, time_ns = predicate["options"], predicate["law"], predicate["time"]["last_ns"]
    own = formats.get(predicate["format"]).options()
    selection = {name: value for name, value in options.items() if name not in own}
    try:
        steps = store.transitions(bodies=False, **selection)
        span_ids = [step.span_id for step in steps if step.start_ns <= time_ns]
    except (ConfigError, QueryError) as exc:
        yield Verdict("store", None, f"its steps cannot be selected as they were: {exc}")
    else:
        is_right = f"{mark_steps(span_ids):032x}" == law["steps_mark"]
        text = f"{len(span_ids)} steps up to the last that was read, {law['steps']} certified"
        yield Verdict("store", is_right, text)
    if not law["has_span_ids"]:
        yield Verdict("spans", True, "the format names none; the law is one of counts")
        return
    span_ids = _list_spans(folder, predicate)
    mark = mark_steps(span_ids) + int(law["left_out_mark"], 16)
    if f"{mark % MARKS:032x}" != law["steps_mark"]:
        yield Verdict("spans", False, f"{len(span_ids)} in rows are not those that came")
    absent = list(store.sql(_ABSENT, [span_ids]).dicts())
    text = f"all that {len(span_ids)} steps in rows name are in the store"
    if absent:
        text = f"{len(absent)} are not in the store, the first {absent[0]['span_id']}"
    yield Verdict("spans", not absent, text)


def _list_spans(folder: Path, predicate: Mapping[str, Any]) -> list[str]:
    """Return the span ids that the rows of the files name."""
    steps_of, span_ids = formats.get(predicate["format"]).steps_of, list[str]()
    for path in (folder / name for name in predicate["rows"]):
        for text in read_rows(path) if path.is_file() else ():
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # no row any more
                steps = steps_of(orjson.loads(text))
                span_ids += steps if isinstance(steps, list) else ()
    return span_ids

"""Makes the template of ``X.duckdb`` anew, after a change of the views: ``python .ci/template.py``.

A folder can be named for it to be put elsewhere.
"""

import hashlib
import re
import sys
import tempfile
import zlib
from pathlib import Path

from lightning_otel.store import template
from lightning_otel.store.catalogue import catalogue_statements
from lightning_otel.store.facts import NO_FACTS
from lightning_otel.store.layout import EMPTY_DATA, EMPTY_FACTS, Layout
from lightning_otel.store.snapshot import NO_COLUMNS
from lightning_otel.store.sql import new_connection, quote_text


def folder_macro(text: str) -> str:
    """Return the statement that makes the macro with the store's folder."""
    return f"CREATE OR REPLACE MACRO store_folder() AS rtrim({quote_text(text)})"


def make_template(target: Path) -> None:
    """Make the files in a folder, with a DuckDB that sees a store of its own."""
    with tempfile.TemporaryDirectory() as scratch, new_connection() as con:
        layout = Layout(Path(scratch) / "traces.duckdb")
        layout.make_folders()
        empty, database = layout.data / EMPTY_DATA, Path(scratch) / "template.duckdb"
        no_facts = layout.facts / EMPTY_FACTS
        for columns, path in ((NO_COLUMNS, empty), (NO_FACTS, no_facts)):
            con.execute(f"COPY (SELECT {columns} LIMIT 0) TO {quote_text(str(path))}")
        # In a format that older DuckDB shells read too.
        con.execute(
            f"ATTACH {quote_text(str(database))} AS catalogue "
            f"(STORAGE_VERSION 'v1.4.0', BLOCK_SIZE {template.BLOCK_BYTES})"
        )
        con.execute("USE catalogue")
        room = template.MARK.decode() * template.FOLDER_BYTES
        statements = [*catalogue_statements("store_folder()").values(), folder_macro(room)]
        # A view is made only if it finds its files.
        for statement in (folder_macro(str(layout.root)), *statements):
            con.execute(statement)
        con.execute("USE memory")
        con.execute("DETACH catalogue")
        content = database.read_bytes()
        if sum(map(len, re.findall(template.ROOM, content))) != template.FOLDER_BYTES:
            raise SystemExit(f"{template.MARK!r} stands elsewhere, too: choose another MARK")
        version = hashlib.sha256("\n".join(statements).encode()).hexdigest().encode()
        packed = zlib.compress(content, 9)
        (target / template.TEMPLATE.name).write_bytes(version + b"\n" + packed)
        (target / template.EMPTY_FILE.name).write_bytes(empty.read_bytes())
        (target / template.NO_FACTS_FILE.name).write_bytes(no_facts.read_bytes())


if __name__ == "__main__":
    make_template(Path(sys.argv[1]) if len(sys.argv) > 1 else template.TEMPLATE.parent)

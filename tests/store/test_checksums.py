"""A checksum says whether a file is as it was, and where it is not."""

import random
from pathlib import Path

import duckdb
import pytest

from lightning_otel.store.checksums import Wounds, checksum_of, wounds_of


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A Parquet file of some hundred kilobytes."""
    path = tmp_path / "spans.parquet"
    duckdb.connect().execute(
        f"COPY (SELECT range AS id, md5(range::VARCHAR) AS text FROM range(20000)) TO '{path}'"
    )
    return path


def test_whole_file_has_no_wounds(parquet: Path) -> None:
    """The file its checksum was taken of is whole, and the checksum is short."""
    checksum = checksum_of(parquet)

    assert not wounds_of(parquet, checksum)
    assert wounds_of(parquet, checksum) == Wounds()
    assert len(checksum) < 400


def test_every_flipped_bit_is_found_where_it_is(parquet: Path) -> None:
    """Any one bit, in a page or in the footer, as DuckDB itself would not notice it."""
    checksum, content = checksum_of(parquet), parquet.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    chance = random.Random(1)

    for at in [0, footer - 1, footer, len(content) - 1, *chance.sample(range(len(content)), 100)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << chance.randrange(8)
        parquet.write_bytes(damaged)
        wounds = wounds_of(parquet, checksum)

        assert wounds.is_footer == (at >= footer)
        assert [first <= at < end for first, end in wounds.blocks] == [True] * (at < footer)
        assert "does not match" in str(wounds)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 5000])
def test_file_of_another_size_is_wounded(parquet: Path, size: int) -> None:
    """However little of it is left."""
    checksum = checksum_of(parquet)
    parquet.write_bytes(parquet.read_bytes()[:size])

    assert f"it is {size} bytes long" in str(wounds_of(parquet, checksum))


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 9, b"no parquet" * 5000])
def test_file_that_is_no_parquet_has_a_checksum_too(tmp_path: Path, content: bytes) -> None:
    """What its last bytes say of a footer need not be true."""
    path = tmp_path / "file"
    path.write_bytes(content)

    assert not wounds_of(path, checksum_of(path))
    path.write_bytes(content + b"!")
    assert wounds_of(path, checksum_of(path)) == Wounds()


def test_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """That it is gone is an error of the system's."""
    with pytest.raises(FileNotFoundError):
        wounds_of(tmp_path / "gone", "1000.8.8.00000000")

"""What is written is what was given, with its checksums, however it comes in parts and wherever it goes."""

import hashlib
from pathlib import Path

import pytest
import xxhash

from rechpc.rank import writing

DATA = bytes(range(251)) * 150_000  # two buffers and a part of one


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 999_983, len(DATA)])
@pytest.mark.parametrize("place", ["disk", "memory"])  # where direct writes mostly are, and are not, to be had
def test_a_file_has_the_bytes_of_all_chunks_and_their_checksums(tmp_path, chunk_bytes, place):
    path = tmp_path / "x" if place == "disk" else Path("/dev/shm") / tmp_path.name
    try:
        chunks = (memoryview(DATA[i : i + chunk_bytes]) for i in range(0, len(DATA), chunk_bytes))
        file = writing.write(path, chunks)
        assert path.read_bytes() == DATA
    finally:
        path.unlink(missing_ok=True)
    assert (file.name, file.size_bytes) == (path.name, len(DATA))
    assert file.sha256 == hashlib.sha256(DATA).hexdigest()
    assert file.xxh3_128 == xxhash.xxh3_128(DATA).hexdigest()


def test_nothing_makes_an_empty_file(tmp_path):
    file = writing.write(tmp_path / "x", iter(()))
    assert (file.size_bytes, (tmp_path / "x").read_bytes()) == (0, b"")
    assert file.sha256 == hashlib.sha256().hexdigest()


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        writing.write(tmp_path / "x", iter([memoryview(b"new")]))
    assert (tmp_path / "x").read_bytes() == b"old"

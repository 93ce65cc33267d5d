"""The index of a prepared data set: what does not fit it is said before anything starts."""

import json
from pathlib import Path

import pytest

from rechpc.config import DataConfig, DataKind, SparseFeature
from rechpc.dataset import DataFile, Index, Split, check_index, read_index, write_index
from rechpc.errors import DataError

CONFIG = DataConfig(kind=DataKind.criteo, path="D", dense=["I1"], sparse=[SparseFeature(name="C1", rows=100)])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "train.arrow").write_bytes(b"12345")
    file = DataFile(name="train.arrow", rows=3, size_bytes=5, sha256="0")
    write_index(
        tmp_path,
        Index(
            block_rows=8,
            dense=["I1"],
            sparse_rows={"C1": 100},
            ids_per_sample={"C1": 1.0},
            dense_transform={"I1": {"min": 0.0}},
            splits={"train": Split(files=[file], positives=1)},
        ),
    )
    return tmp_path


def test_an_index_is_read_as_it_was_written(data: Path) -> None:
    index = read_index(data)

    assert index.splits["train"].rows == 3
    check_index(index, CONFIG)


def test_no_index_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rechpc\.prepare"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_of_another_size_is_named(data: Path, content: bytes) -> None:
    (data / "train.arrow").write_bytes(content)

    with pytest.raises(DataError, match=rf"train\.arrow: has {len(content)} bytes"):
        read_index(data)


def test_a_missing_file_is_named(data: Path) -> None:
    (data / "train.arrow").unlink()

    with pytest.raises(DataError, match=r"train\.arrow: is missing"):
        read_index(data)


def test_an_index_of_another_format_is_refused(data: Path) -> None:
    raw = json.loads((data / "index.json").read_text())
    (data / "index.json").write_text(json.dumps({**raw, "format": 99}))

    with pytest.raises(DataError, match="not of format 1"):
        read_index(data)


def test_a_cut_off_index_is_refused(data: Path) -> None:
    text = (data / "index.json").read_text()
    (data / "index.json").write_text(text[: len(text) // 2])

    with pytest.raises(DataError, match="cannot be read"):
        read_index(data)


@pytest.mark.parametrize(
    ("sparse", "dense", "message"),
    [
        ([SparseFeature(name="C1", rows=50)], ["I1"], "'C1' has 50 rows, the data set was prepared for 100"),
        ([SparseFeature(name="C2", rows=100)], ["I1"], r"not in the data set: \['C2'\]"),
        ([SparseFeature(name="C1", rows=100)], ["I1", "I2"], r"not in the data set: \['I2'\]"),
        ([SparseFeature(name="C1", rows=100)], [], r"not in the configuration: \['I1'\]"),
    ],
)
def test_what_does_not_fit_the_configuration_is_named(
    data: Path, sparse: list[SparseFeature], dense: list[str], message: str
) -> None:
    config = DataConfig(kind=DataKind.criteo, path="D", dense=dense, sparse=sparse)

    with pytest.raises(DataError, match=message):
        check_index(read_index(data), config)

"""The index of a prepared data set: read back as written, and checked against files and configuration."""

import dataclasses
import hashlib
import json

import pytest

from rechpc.config import DataConfig, DataKind, SparseFeature
from rechpc.dataset import INDEX_NAME, DataFile, Index, Split, check_index, check_sha256, read_index, write_index
from rechpc.errors import DataError

CONFIG = DataConfig(
    kind=DataKind.criteo,
    path="/data",
    dense=["I1", "I2"],
    sparse=[SparseFeature(name="C1", rows=100), SparseFeature(name="C2", rows=50)],
)


@pytest.fixture
def index(tmp_path) -> Index:
    """An index at tmp_path, with the files that it names."""
    files = [DataFile(name=f"train-{i}.arrow", rows=10 + i, size_bytes=100 + i, sha256="0" * 64) for i in range(2)]
    for file in files:
        (tmp_path / file.name).write_bytes(b"x" * file.size_bytes)
    index = Index(
        block_rows=8,
        dense=["I1", "I2"],
        sparse_rows={"C1": 100, "C2": 50},
        mappings=CONFIG.mappings(),
        ids_per_sample={"C1": 1.0, "C2": 2.5},
        id_range={"C1": [0, 99], "C2": []},
        dense_transform={"I1": {"min": 3.0}},
        dense_statistics={"I1": {"min": 3.0}},
        vocabularies={},
        bad_rows={"label: skipped": 2},
        splits={"train": Split(files=files, positives=4), "val": Split(files=[], positives=0)},
    )
    write_index(tmp_path, index)
    return index


def edit(path, **changes) -> None:
    raw = json.loads((path / INDEX_NAME).read_text())
    (path / INDEX_NAME).write_text(json.dumps({**raw, **changes}))


def test_an_index_reads_back_as_it_was_written(tmp_path, index):
    assert read_index(tmp_path) == index
    assert {name: split.rows for name, split in index.splits.items()} == {"train": 21, "val": 0}


def test_a_path_without_an_index_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError) as error:
        read_index(tmp_path / "none")
    assert str(error.value) == (
        f"data.path={tmp_path / 'none'}: no {INDEX_NAME} there; expected a data set made by python -m rechpc.prepare"
    )


def test_a_missing_file_is_named(tmp_path, index):
    (tmp_path / "train-1.arrow").unlink()
    with pytest.raises(DataError) as error:
        read_index(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'train-1.arrow'}: is missing, the index says 101; prepare the data set again"
    )


@pytest.mark.parametrize("size", [0, 100, 102])
def test_a_file_of_another_size_is_named(tmp_path, index, size):
    (tmp_path / "train-1.arrow").write_bytes(b"x" * size)
    with pytest.raises(DataError) as error:
        read_index(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'train-1.arrow'}: has {size} bytes, the index says 101; prepare the data set again"
    )


@pytest.mark.parametrize("found", [0, 1, "2", None])
def test_another_format_is_refused(tmp_path, index, found):
    edit(tmp_path, format=found)
    with pytest.raises(DataError, match="not of format 2; prepare the data set again"):
        read_index(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\xff\xfe"])
def test_an_index_that_is_no_json_is_named(tmp_path, index, text):
    (tmp_path / INDEX_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=f"{INDEX_NAME}: cannot be read .*; prepare the data set again"):
        read_index(tmp_path)


@pytest.mark.parametrize("change", [{"splits": [1]}, {"vocabularies": None}, {"unknown": 1}, {"splits": {"train": {}}}])
def test_an_index_of_another_shape_is_named(tmp_path, index, change):
    edit(tmp_path, **change)
    with pytest.raises(DataError, match=f"{INDEX_NAME}: not an index .*; prepare the data set again"):
        read_index(tmp_path)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "train-0.arrow"
    path.write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    file = DataFile(name=path.name, rows=1, size_bytes=3, sha256=digest)
    check_sha256(path, file)
    path.write_bytes(b"abd")
    with pytest.raises(DataError, match=r"train-0\.arrow: has changed since it was prepared .*; copy or prepare"):
        check_sha256(path, file)
    path.unlink()
    with pytest.raises(DataError, match=r"train-0\.arrow: cannot be read .*; copy or prepare the data set again"):
        check_sha256(path, file)


def test_a_data_set_of_the_same_features_fits(index):
    check_index(index, CONFIG)


def changed(**values) -> DataConfig:
    return dataclasses.replace(CONFIG, **values)


C1, C2 = CONFIG.sparse
MISFITS = {
    "other rows": (
        changed(sparse=[C1, SparseFeature(name="C2", rows=51)]),
        "data.sparse: feature 'C2' has 51 rows, the data set was prepared for 50",
    ),
    "a missing feature": (
        changed(sparse=[C1, C2, SparseFeature(name="C3", rows=5)]),
        "data.sparse: not in the data set: ['C3']",
    ),
    "a further feature": (changed(sparse=[C1]), "data.sparse: in the data set but not in the configuration: ['C2']"),
    "a missing dense feature": (changed(dense=["I1", "I2", "I3"]), "data.dense: not in the data set: ['I3']"),
    "a further dense feature": (
        changed(dense=["I2"]),
        "data.dense: in the data set but not in the configuration: ['I1']",
    ),
    "another order of dense features": (changed(dense=["I2", "I1"]), "data.dense: "),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_data_set_that_does_not_fit_is_refused_in_one_line(index, misfit):
    config, expected = MISFITS[misfit]
    with pytest.raises(DataError) as error:
        check_index(index, config)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"data.path=/data: {expected}")
    assert line.endswith("; prepare it again with this configuration")


def test_all_misfits_are_listed(index):
    config = changed(dense=["I3"], sparse=[SparseFeature(name="C1", rows=7)])
    with pytest.raises(DataError) as error:
        check_index(index, config)
    assert len(str(error.value).splitlines()) == 4

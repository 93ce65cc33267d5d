"""Data sets from CSV, Parquet and npy: the same rows whatever the format, mapped as the schema says."""

import dataclasses
import gzip
import hashlib
import io
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import pytest

from rechpc.config import BadRows, DataConfig, DataKind, DenseTransform, IdMapping, SparseFeature
from rechpc.dataset import check_index, read_index
from rechpc.errors import ConfigError, DataError
from rechpc.prepare import convert as convert_module
from rechpc.prepare import features, shards
from rechpc.prepare.convert import prepare

HASH, VOCABULARY, AS_IS = IdMapping.hash, IdMapping.vocabulary, IdMapping.as_is
Columns = dict[str, list[Any]]


def log(num_rows: int = 20, seed: int = 0) -> Columns:
    rng = np.random.default_rng(seed)
    return {
        "clicked": rng.integers(2, size=num_rows).tolist(),
        "price": [None if i % 5 == 4 else i / 4 for i in range(num_rows)],
        "user": [None if i % 7 == 6 else f"u{rng.integers(9)}" for i in range(num_rows)],
        "item": rng.integers(50, size=num_rows).tolist(),
        "tags": [[f"t{t}" for t in rng.integers(5, size=rng.integers(4))] for _ in range(num_rows)],
    }


def schema(kind: DataKind, **changes: Any) -> DataConfig:
    sparse = [
        SparseFeature(name="user", rows=100),
        SparseFeature(name="item", rows=50, mapping=AS_IS),
        SparseFeature(name="tags", rows=20, ids_per_sample=1.5, mapping=VOCABULARY),
    ]
    values = {"kind": kind, "dense": ["price"], "sparse": sparse, "columns": {"label": "clicked"}}
    return DataConfig(**{**values, **changes})


def write(path: Path, columns: Columns) -> Path:
    """A file whose format its name says; in text a list is a|b, and missing is nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa_parquet.write_table(pa.table(columns), path, row_group_size=7)
        return path
    separator = "\t" if ".tsv" in path.name else ","
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    text = "\n".join(separator.join("|".join(v) if isinstance(v, list) else str("" if v is None else v) for v in r)
                     for r in rows) + "\n"  # fmt: skip
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def convert(config: DataConfig, source: Path, out: Path) -> Path:
    prepare(dataclasses.replace(config, source=str(source), path=str(out)))
    return out


def rows(path: Path, split: str = "test") -> list[dict[str, Any]]:
    files = [path / file.name for file in read_index(path).splits[split].files]
    return pa.concat_tables(pa.ipc.open_file(file).read_all() for file in files).to_pylist()


def sources(path: Path, suffix: str, train: Columns, test: Columns) -> Path:
    write(path / f"train{suffix}", train)
    write(path / f"test{suffix}", test)
    return path


def text_id(text: str, table_rows: int) -> int:
    """The documented id of a text with mapping=hash."""
    return 1 + (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1) % (table_rows - 1)


# Formats


@pytest.mark.parametrize(
    ("kind", "suffix", "changes"),
    [
        (DataKind.csv, ".csv", {}),
        (DataKind.csv, ".csv.gz", {}),
        (DataKind.csv, ".tsv", {"separator": "tab"}),
        (DataKind.parquet, ".parquet", {}),
    ],
)
def test_rows_are_those_of_an_independent_reading_whatever_the_format(
    kind: DataKind, suffix: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    train, test = log(), log(30, seed=1)
    out = convert(schema(kind, **changes), sources(tmp_path / "in", suffix, train, test), tmp_path / "out")

    counts = Counter(tag for tags in train["tags"] for tag in tags)
    found = rows(out)
    tag_ids: dict[int, set[str]] = {}
    for i, row in enumerate(found):
        price, user = test["price"][i], test["user"][i]
        assert row["label"] == test["clicked"][i]
        assert row["dense"] == pytest.approx([0.0 if price is None else np.log1p(price)])
        assert row["user"] == (0 if user is None else text_id(user, 100))
        assert row["item"] == test["item"][i]
        for tag, tag_id in zip(test["tags"][i], row["tags"], strict=True):
            tag_ids.setdefault(tag_id, set()).add(tag)
    assert all(len(tags) == 1 for tags in tag_ids.values())
    by_count = [counts[tags.pop()] for _, tags in sorted(tag_ids.items())]
    assert min(tag_ids) == 2
    assert by_count == sorted(by_count, reverse=True)


def test_csv_and_parquet_give_the_same_data_set(tmp_path: Path) -> None:
    made = []
    for kind, suffix in ((DataKind.csv, ".csv"), (DataKind.parquet, ".parquet")):
        source = sources(tmp_path / kind, suffix, log(), log(30, seed=1))
        made.append(read_index(convert(schema(kind), source, tmp_path / f"{kind}-out")))
    assert made[0] == made[1]


def test_quoted_csv_fields_may_hold_separators_and_newlines(tmp_path: Path) -> None:
    names = ['a,"b"', "c\nd"]
    config = schema(DataKind.csv, sparse=[SparseFeature(name="name", rows=9)], dense=["x"], columns={})
    for split in ("train", "test"):
        (tmp_path / "in").mkdir(exist_ok=True)
        pa_csv.write_csv(pa.table({"label": [0, 1], "x": [1.0, 2.0], "name": names}), tmp_path / f"in/{split}.csv")
    out = convert(config, tmp_path / "in", tmp_path / "out")
    assert [row["name"] for row in rows(out)] == [text_id(name, 9) for name in names]


def test_parts_of_a_split_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    columns = log(30)
    for part in range(12):
        piece = {name: values[part * 2 : part * 2 + 2] for name, values in columns.items()}
        write(tmp_path / f"in/test/part-{part}.parquet", piece)
    write(tmp_path / "in/train.parquet", log())
    out = convert(schema(DataKind.parquet), tmp_path / "in", tmp_path / "out")
    assert [row["item"] for row in rows(out)] == columns["item"][:24]


def arrays(path: Path, stem: str, num_rows: int, *, multi_hot: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {
        "labels": rng.integers(2, size=(num_rows, 1)).astype(np.int32),
        "dense": rng.random((num_rows, 13), dtype=np.float32),
        "sparse": rng.integers(2**31, size=(num_rows, 26)).astype(np.int64),
    }
    path.mkdir(exist_ok=True)
    for name, array in made.items():
        if name != "sparse" or not multi_hot:
            np.save(path / f"{stem}_{name}.npy", array)
    if multi_hot:
        bags = {str(i): rng.integers(50, size=(num_rows, 1 + i % 3)).astype(np.int32) for i in range(26)}
        with zipfile.ZipFile(path / f"{stem}_sparse_multi_hot.npz", "w") as archive:
            for name, array in bags.items():
                content = io.BytesIO()
                np.save(content, array)
                archive.writestr(f"{name}.npy", content.getvalue())
        made |= bags
    return made


def test_npy_arrays_of_the_torchrec_scripts_are_read(tmp_path: Path) -> None:
    arrays(tmp_path / "in", "train", 40)
    test = arrays(tmp_path / "in", "test", 25, seed=1)
    names = {"dense": [f"I{i}" for i in range(1, 14)], "sparse": [SparseFeature(name="C26", rows=1000)]}
    config = DataConfig(kind=DataKind.npy, dense_transform=DenseTransform.none, **names)
    found = rows(convert(config, tmp_path / "in", tmp_path / "out"))
    assert [row["label"] for row in found] == test["labels"].ravel().tolist()
    assert np.array_equal([row["dense"] for row in found], test["dense"])
    assert [row["C26"] for row in found] == (1 + test["sparse"][:, 25] % 999).tolist()


def test_multi_hot_days_of_mlperf_are_read_and_the_last_day_is_evaluated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rechpc.prepare.sources._ROWS", 16)
    days = [arrays(tmp_path / "in", f"day_{i}", 41, multi_hot=True, seed=i) for i in (0, 1, 10)]
    (tmp_path / "in/day_10_labels.npy").rename(tmp_path / "in/day_2_labels.npy")
    for name in ("dense.npy", "sparse_multi_hot.npz"):
        (tmp_path / f"in/day_10_{name}").rename(tmp_path / f"in/day_2_{name}")
    sparse = [SparseFeature(name=f"C{i}", rows=50, ids_per_sample=1 + (i - 1) % 3, mapping=AS_IS) for i in (1, 2, 3)]
    config = DataConfig(kind=DataKind.npy, dense=["I2"], sparse=sparse, dense_transform=DenseTransform.none)
    out = convert(config, tmp_path / "in", tmp_path / "out")
    assert {name: split.rows for name, split in read_index(out).splits.items()} == {"train": 82, "val": 20, "test": 21}
    found = rows(out, "val") + rows(out, "test")
    assert [row["C3"] for row in found] == days[2]["2"].tolist()
    assert [[row["C1"]] for row in found] == days[2]["0"].tolist()
    assert read_index(out).ids_per_sample == {"C1": 1, "C2": 2, "C3": 3}


def test_an_npy_source_of_uneven_arrays_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        arrays(tmp_path / "in", split, 20)
    np.save(tmp_path / "in/test_dense.npy", np.zeros((19, 13), np.float32))
    config = DataConfig(kind=DataKind.npy, dense=["I1"], sparse=[SparseFeature(name="C1", rows=9)])
    with pytest.raises(DataError, match=r"test_labels\.npy: .* 20, 19 and 20 rows"):
        convert(config, tmp_path / "in", tmp_path / "out")
    arrays(tmp_path / "in", "test", 20, multi_hot=True)
    with zipfile.ZipFile(tmp_path / "in/test_sparse_multi_hot.npz", "a") as archive:
        content = io.BytesIO()
        np.save(content, np.zeros((3, 1), np.int32))
        archive.writestr("26.npy", content.getvalue())
    with pytest.raises(DataError, match=r"test_labels\.npy: .* 20, 20 and 0 rows"):
        convert(config, tmp_path / "in", tmp_path / "out")


def test_days_with_a_gap_are_refused(tmp_path: Path) -> None:
    for day in (0, 1, 3):
        arrays(tmp_path / "in", f"day_{day}", 20)
    config = DataConfig(kind=DataKind.npy, dense=["I1"], sparse=[SparseFeature(name="C1", rows=9)])
    with pytest.raises(ConfigError, match="day_0, day_1, day_3; expected two or more days without a gap"):
        convert(config, tmp_path / "in", tmp_path / "out")


# Mappings and statistics


def single(tmp_path: Path, train: list[Any], test: list[Any], feature: SparseFeature) -> list[Any]:
    """The ids of one column in the test split."""
    parts = [{"label": [i % 2 for i in range(len(part))], "x": [0.0] * len(part), "f": part} for part in (train, test)]
    config = schema(DataKind.parquet, dense=["x"], sparse=[dataclasses.replace(feature, name="f")], columns={})
    source = sources(tmp_path / "in", ".parquet", *parts)
    return [row["f"] for row in rows(convert(config, source, tmp_path / "out"))]


def test_a_vocabulary_orders_by_count_and_shares_an_id_among_rare_and_unseen_values(tmp_path: Path) -> None:
    feature = SparseFeature(name="f", rows=10, mapping=VOCABULARY, min_count=2)
    train = [7, 7, 7, -5, -5, 8, 9, 9, None]  # ties by value
    assert single(tmp_path, train, [7, -5, 9, 8, 1234, None], feature) == [2, 3, 4, 1, 1, 0]
    vocabulary = read_index(tmp_path / "out").vocabularies["t_f"]
    table = pa.ipc.open_file(tmp_path / "out" / vocabulary.name).read_all()
    assert table.to_pylist() == [
        {"key": 7, "count": 3, "id": 2},
        {"key": -5, "count": 2, "id": 3},
        {"key": 9, "count": 2, "id": 4},
    ]


def test_a_vocabulary_keeps_what_its_table_has_rows_for(tmp_path: Path) -> None:
    feature = SparseFeature(name="f", rows=4, mapping=VOCABULARY)
    assert single(tmp_path, ["a", "b", "b", "c", "c", "c"], ["a", "b", "c"], feature) == [1, 3, 2]


def test_a_vocabulary_that_does_not_fit_memory_is_counted_on_disk_to_the_same_result(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train, test = (rng.zipf(1.3, size).clip(0, 10_000).tolist() for size in (5000, 500))
    feature = SparseFeature(name="f", rows=200, mapping=VOCABULARY, min_count=2)
    expected = single(tmp_path / "memory", train, test, feature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_MAX_COUNTED", 50)
        patch.setattr(shards, "_CHUNK_BYTES", 1000)
        patch.setattr("rechpc.prepare.sources._ROWS", 100)
        assert single(tmp_path / "disk", train, test, feature) == expected
    assert not (tmp_path / "disk/out/scratch").exists()


def test_features_that_share_a_table_share_its_vocabulary(tmp_path: Path) -> None:
    sparse = [
        SparseFeature(name="item", rows=9, mapping=VOCABULARY),
        SparseFeature(name="history", rows=9, table="t_item", ids_per_sample=2, mapping=VOCABULARY),
    ]
    config = schema(DataKind.parquet, dense=["x"], sparse=sparse, columns={})
    train = {"label": [0, 1], "x": [0.0, 0.0], "item": ["a", "b"], "history": [["b", "c"], ["b"]]}
    found = rows(convert(config, sources(tmp_path / "in", ".parquet", train, train), tmp_path / "out"))
    assert [row["item"] for row in found][1] == found[1]["history"][0] == found[0]["history"][0] == 2
    assert {found[0]["item"], found[0]["history"][1]} == {3, 4}


def test_a_list_may_be_empty_or_missing_and_hold_missing_ids(tmp_path: Path) -> None:
    feature = SparseFeature(name="f", rows=10, ids_per_sample=2)
    values = [[3, 4], [], None, [None, 11]]
    assert single(tmp_path, values, values, feature) == [[4, 5], [], [], [0, 3]]
    index = read_index(tmp_path / "out")
    assert (index.ids_per_sample, index.id_range) == ({"f": 1.0}, {"f": [0, 5]})


def test_negative_and_large_integers_hash_like_all_others(tmp_path: Path) -> None:
    values = [-1, -(2**63), 2**63 - 1, 0]
    assert single(tmp_path, values, values, SparseFeature(name="f", rows=8)) == [1 + v % 7 for v in values]


@pytest.mark.parametrize("watched", [2**22, 200])
def test_the_collision_rate_is_the_share_of_new_ids_that_find_their_row_taken(tmp_path, monkeypatch, watched) -> None:
    monkeypatch.setattr(convert_module, "_WATCHED_ROWS", watched)
    single(tmp_path, [f"u{i}" for i in range(300)], ["x"], SparseFeature(name="f", rows=500))
    taken = {text_id(f"u{i}", 500) for i in range(300)}
    expected = np.mean([text_id(f"v{i}", 500) in taken for i in range(10_000)])
    assert read_index(tmp_path / "out").collision_rate["t_f"] == pytest.approx(expected, abs=0.1)


def test_the_report_names_the_tables_in_which_many_ids_share_a_row(tmp_path: Path) -> None:
    users = {"user": [f"u{i}" for i in range(100)], "price": [1.0] * 100, "clicked": [0] * 100}
    columns = {**users, "item": users["user"], "tags": users["user"]}
    sparse = [
        SparseFeature(name="user", rows=50),
        SparseFeature(name="item", rows=100_000),
        SparseFeature(name="tags", rows=50, mapping=VOCABULARY),
    ]
    config = schema(DataKind.parquet, sparse=sparse)
    source = sources(tmp_path / "in", ".parquet", columns, columns)
    report = prepare(dataclasses.replace(config, source=str(source), path=str(tmp_path / "out")))
    (line,) = [line for line in report.splitlines() if "share their row" in line]
    assert [table for table in ("t_user", "t_item", "t_tags") if table in line] == ["t_user"]


def test_whole_floats_are_ids_and_nan_is_a_missing_one(tmp_path: Path) -> None:
    assert single(tmp_path, [1.0, 2.0], [1.0, float("nan"), 9.0], SparseFeature(name="f", rows=8)) == [2, 0, 3]


def test_nan_is_a_missing_id_also_where_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    feature = SparseFeature(name="f", rows=8, mapping=AS_IS)
    assert single(tmp_path / "good", [1.0], [7.0, 0.0], feature) == [7, 0]
    for case, value in {"missing": float("nan"), "half": 0.5}.items():
        with pytest.raises(DataError, match=r"row 2: f=(None|0\.5), expected (an id|a whole number)"):
            single(tmp_path / case, [1.0], [1.0, value], feature)


def test_a_dense_column_may_be_missing_everywhere(tmp_path: Path) -> None:
    config = schema(DataKind.parquet, dense=["x"], sparse=[SparseFeature(name="f", rows=8)], columns={})
    columns = {"label": [0, 1], "x": [None, None], "f": [1, 2]}
    out = convert(config, sources(tmp_path / "in", ".parquet", columns, columns), tmp_path / "out")
    assert [row["dense"] for row in rows(out)] == [[0.0], [0.0]]


def test_dense_values_are_transformed_with_statistics_of_train(tmp_path: Path) -> None:
    columns = {"label": [0, 1], "item": [0, 1], "a": [1.0, 5.0], "b": [1.0, 5.0], "c": [1.0, 5.0], "d": [4.0, 4.0]}
    config = schema(
        DataKind.parquet,
        columns={},
        dense=["a", "b", "c", "d"],
        sparse=[SparseFeature(name="item", rows=9)],
        dense_transform=DenseTransform.none,
        dense_transforms={"b": DenseTransform.standard, "c": DenseTransform.log1p, "d": DenseTransform.standard},
    )
    test = {**columns, "a": [7.0, None], "b": [7.0, None], "c": [0.0, 3.0], "d": [6.0, None]}
    out = convert(config, sources(tmp_path / "in", ".parquet", columns, test), tmp_path / "out")
    assert [row["dense"] for row in rows(out)] == [[7, 2, 0, 2], [0, 0, pytest.approx(np.log(3)), 0]]
    index = read_index(out)
    assert index.dense_transform == {
        "a": {},
        "b": {"mean": 3, "deviation": 2},
        "c": {"min": 1},
        "d": {"mean": 4, "deviation": 0},
    }
    assert index.dense_statistics["a"] == {"present": 2, "missing": 0, "mean": 3, "deviation": 2, "min": 1, "max": 5}


def test_another_mapping_than_the_data_set_has_is_refused(tmp_path: Path) -> None:
    config = schema(DataKind.parquet)
    out = convert(config, sources(tmp_path / "in", ".parquet", log(), log()), tmp_path / "out")
    check_index(read_index(out), config)
    config.sparse[2].min_count = 5
    config.dense_transform = DenseTransform.none
    with pytest.raises(DataError) as error:
        check_index(read_index(out), config)
    assert [line.partition(": ")[2] for line in str(error.value).splitlines()] == [
        "data: feature 'price' is to be mapped by none, the data set was by log1p; "
        "prepare it again with this configuration",
        "data: feature 'tags' is to be mapped by vocabulary min_count=5, the data set was by vocabulary min_count=1; "
        "prepare it again with this configuration",
    ]


# The shuffle


def test_a_split_larger_than_memory_is_shuffled_through_the_disk_and_nothing_is_lost(tmp_path: Path) -> None:
    num_rows = 3000
    columns = log(num_rows)
    columns["price"] = [float(i) for i in range(num_rows)]  # tells the row
    source = sources(tmp_path / "in", ".parquet", columns, log())
    config = schema(DataKind.parquet, dense_transform=DenseTransform.none, block_rows=64)
    orders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_CHUNK_BYTES", 4000)
        patch.setattr(shards, "_BUCKET_BYTES", 20_000)  # some buckets are dealt out once more
        patch.setattr(shards, "_BUCKETS", 5)
        patch.setattr(shards, "_SHARD_BYTES", 10_000)
        patch.setattr("rechpc.prepare.sources._ROWS", 100)
        for seed in (0, 0, 1):
            out = convert(dataclasses.replace(config, seed=seed), source, tmp_path / f"out{len(orders)}")
            found = rows(out, "train")
            orders.append([int(row["dense"][0]) for row in found])
            assert all(row["item"] == columns["item"][i] for row, i in zip(found, orders[-1], strict=True))
            assert all(len(row["tags"]) == len(columns["tags"][i]) for row, i in zip(found, orders[-1], strict=True))
            files = [pa.ipc.open_file(out / file.name) for file in read_index(out).splits["train"].files]
            sizes = [file.get_batch(i).num_rows for file in files for i in range(file.num_record_batches)]
            assert sizes == [64] * 46 + [56]
            assert len(files) > 5
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(num_rows)) for order in orders)
    # Uniform: neighbours come from anywhere, and each tenth of the order from every tenth of the source.
    assert abs(np.corrcoef(orders[0], range(num_rows))[0, 1]) < 0.1
    assert np.histogram2d(orders[0], range(num_rows), bins=10)[0].min() > 5


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": {"label": "click"}}, r"column 'click' of 'label' is not there; the file has: clicked, price"),
        ({"dense": ["tags"], "sparse": [SparseFeature(name="item", rows=50)]}, "'tags' has List.*; expected numbers"),
        (
            {"sparse": [SparseFeature(name="tags", rows=50)]},
            "'tags' has lists of ids, expected exactly one; set its ids_per_sample in data.sparse to the mean length",
        ),
        (
            {"sparse": [SparseFeature(name="item", rows=50, ids_per_sample=2)]},
            "'item' has one id, expected a list; set its ids_per_sample in data.sparse to 1",
        ),
    ],
)
def test_a_schema_that_does_not_fit_the_file_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = sources(tmp_path / "in", ".parquet", log(), log())
    with pytest.raises((ConfigError, DataError), match=message):
        convert(schema(DataKind.parquet, **change), source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_feature_of_two_types_is_refused(tmp_path: Path) -> None:
    train, test = log(), log()
    test["user"] = list(range(20))
    with pytest.raises(DataError, match=r"test\.parquet: 'user' is text in some files and a number in others"):
        convert(schema(DataKind.parquet), sources(tmp_path / "in", ".parquet", train, test), tmp_path / "out")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_that_is_there_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    source = sources(tmp_path / "in", suffix, log(), log())
    if suffix == ".csv":
        text = (source / "test.csv").read_text()
        (source / "test.csv").write_text(text.replace("item", "price", 1))
    else:
        table = pa.table(log())
        table = pa.table([*table.columns, table["price"]], names=[*table.column_names, "price"])
        pa_parquet.write_table(table, source / "test.parquet")
    with pytest.raises(ConfigError, match=r"test\..*: column 'price' of 'price' is there 2 times"):
        convert(schema(DataKind(suffix[1:])), source, tmp_path / "out")


# Text that is cut off is a row that is too short.
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".csv", "empty"), *((suffix, damage) for suffix in (".csv.gz", ".parquet") for damage in ("empty", "cut off"))],
)
def test_a_damaged_file_is_named(suffix: str, damage: str, tmp_path: Path) -> None:
    source = sources(tmp_path / "in", suffix, log(), log(3000))
    path = source / f"test{suffix}"
    path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-50])
    with pytest.raises(DataError, match=rf"test{suffix}: .*get the file again"):
        convert(schema(DataKind(suffix.split(".")[1])), source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# Bad rows

BAD_VALUES = {
    "label": ("clicked", "2", r"'2', expected 0 or 1", "label", False),
    "number": ("price", "cheap", "'cheap', expected a number", "number", True),
    "infinite": ("price", "inf", "'inf', expected a finite number", "NaN or inf", True),
    "NaN": ("price", "nan", "'nan', expected a finite number", "NaN or inf", True),
    "NUL byte": ("user", "u\0", r"'u\\x00', expected text; the file is damaged", "NUL byte", True),
    "not UTF-8": ("user", "u\udcff", r"'u\\xff', expected text; the file is damaged", "not UTF-8", True),
    "id too large": ("item", "50", "50, expected 0 to 49|'50', expected 0 to 49", "id out of range", False),
    "negative id": ("item", "-1", "'-1', expected 0 to 49", "id out of range", False),
    "missing id": ("item", "", "None, expected an id", "missing id", False),
    "word for an id": ("item", "x", "'x', expected a whole number", "number", False),
    "columns": ("item", "1,2", "6 columns, expected 5", "columns", False),
}


def bad_csv(path: Path, case: str) -> Path:
    """A test split of 20 rows of which the fifth is bad."""
    name, value, *_ = BAD_VALUES[case]
    write(path / "train.csv", log())
    write(path / "test.csv", log())
    header, *lines = (path / "test.csv").read_text().splitlines()
    fields = lines[4].split(",")
    fields[list(log()).index(name)] = value
    lines[4] = ",".join(fields)
    (path / "test.csv").write_bytes("\n".join([header, *lines, ""]).encode(errors="surrogateescape"))
    return path


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_fails_with_file_and_row(case: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"test\.csv, row 5: .*({BAD_VALUES[case][2]})"):
        convert(schema(DataKind.csv), bad_csv(tmp_path / "in", case), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_skipped_with_its_row_and_counted(case: str, tmp_path: Path) -> None:
    config = schema(DataKind.csv, bad_rows=BadRows.skip)
    out = convert(config, bad_csv(tmp_path / "in", case), tmp_path / "out")
    assert read_index(out).bad_rows == {f"{BAD_VALUES[case][3]}: skipped": 1}
    assert [row["item"] for row in rows(out)] == log()["item"][:4] + log()["item"][5:]


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_fixed_where_missing_is_a_sane_reading(case: str, tmp_path: Path) -> None:
    name, _, _, kind, fixable = BAD_VALUES[case]
    out = convert(schema(DataKind.csv, bad_rows=BadRows.fix), bad_csv(tmp_path / "in", case), tmp_path / "out")
    assert read_index(out).bad_rows == {f"{kind}: {'fixed' if fixable else 'skipped'}": 1}
    assert len(rows(out)) == (20 if fixable else 19)
    if fixable:
        assert rows(out)[4]["dense" if name == "price" else name] == ([0.0] if name == "price" else 0)


def test_more_bad_rows_than_allowed_are_an_error_that_counts_them(tmp_path: Path) -> None:
    columns = log()
    columns["clicked"][3:6] = [2, 3, 4]
    columns["price"][6] = float("inf")
    source = sources(tmp_path / "in", ".parquet", log(), columns)
    config = schema(DataKind.parquet, bad_rows=BadRows.skip, max_bad_rows=3)
    with pytest.raises(DataError) as error:
        convert(config, source, tmp_path / "out")
    assert "more bad rows than data.max_bad_rows=3 (NaN or inf: skipped 1, label: skipped 3)" in str(error.value)
    assert str(error.value).endswith("or set data.bad_rows")
    convert(dataclasses.replace(config, max_bad_rows=4), source, tmp_path / "out")


def test_a_bad_id_in_a_list_is_found_with_its_row(tmp_path: Path) -> None:
    feature = SparseFeature(name="f", rows=10, ids_per_sample=2, mapping=AS_IS)
    with pytest.raises(DataError, match=r"test\.parquet, row 3: f=10, expected 0 to 9"):
        single(tmp_path, [[1], [2]], [[1, 2], [], [3, 10], [10]], feature)


def test_a_train_split_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    columns = {**log(), "clicked": [7] * 20}
    config = schema(DataKind.parquet, bad_rows=BadRows.skip)
    with pytest.raises(DataError, match=r"no row of the train split is left \(label: skipped 20\)"):
        convert(config, sources(tmp_path / "in", ".parquet", columns, log()), tmp_path / "out")

"""What rechpc.prepare makes of good text and wrong settings, and what its command leaves behind."""

import gzip
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rechpc.config import CommandConfig, DataConfig, DataKind, SparseFeature
from rechpc.dataset import check_index, read_index
from rechpc.errors import ConfigError
from rechpc.prepare import convert as conversion
from rechpc.prepare import criteo
from rechpc.prepare.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data/criteo_8k"
TABLE_ROWS = 1000

Row = tuple[int, list[int | None], list[int | None]]


def line(label: str = "0", **fields: str) -> bytes:
    """One line of text: "1" in every integer column and "a" in every category, but for `fields`."""
    values = {**dict.fromkeys(criteo.DENSE, "1"), **dict.fromkeys(criteo.SPARSE, "a"), **fields}
    return "\t".join([label, *values.values()]).encode(errors="surrogateescape")


def lines(num_rows: int, seed: int = 0) -> list[bytes]:
    """Lines of random fields, a fifth of them missing; I1 counts the rows."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num_rows):
        fields = {c: str(rng.integers(-2, 5000)) for c in criteo.DENSE}
        fields |= {c: f"{rng.integers(2**32):08x}" for c in criteo.SPARSE}
        fields |= {c: "" for c in fields if rng.random() < 0.2}
        made.append(line(str(rng.integers(2)), **{**fields, "I1": str(i)}))
    return made


def text(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


def folder(path: Path, **splits: bytes) -> Path:
    """A folder with a .tsv a split; a valid train and test split where none is given."""
    path.mkdir(exist_ok=True)
    for name, content in {"train": text(line("0"), line("1")), "test": text(line("1")), **splits}.items():
        (path / f"{name}.tsv").write_bytes(content)
    return path


def settings(source: Path | None, path: Path | None, **changes: Any) -> DataConfig:
    values = {
        "kind": DataKind.criteo,
        "source": str(source) if source else None,
        "path": str(path) if path else None,
        "dense": list(criteo.DENSE),
        "sparse": [SparseFeature(name=name, rows=TABLE_ROWS) for name in criteo.SPARSE],
    }
    return DataConfig(**{**values, **changes})


def convert(source: Path, path: Path, **changes: Any) -> Path:
    conversion.prepare(settings(source, path, **changes))
    return path


def table(path: Path, split: str) -> pa.Table:
    files = read_index(path).splits[split].files
    return pa.concat_tables(pa.ipc.open_file(path / file.name).read_all() for file in files)


def dense(path: Path, split: str, feature: str = "I1") -> list[float]:
    return [row[criteo.DENSE.index(feature)] for row in table(path, split)["dense"].to_pylist()]


def plain_rows(content: bytes) -> list[Row]:
    """The rows by an independent reading; ValueError with the number of the first bad line."""
    rows = []
    content = content.replace(b"\r\n", b"\n").removesuffix(b"\n")
    for number, text_line in enumerate(content.split(b"\n"), 1):
        label, *fields = text_line.split(b"\t")
        good = len(fields) == 39 and re.fullmatch(rb"[-+]?[0-9]+", label) and int(label) in (0, 1)
        good = good and all(
            re.fullmatch(rb"([-+]?[0-9]+)?", f) and -(2**31) <= int(f or 0) < 2**31 for f in fields[:13]
        )
        hexadecimal = re.compile(rb"([-+]?[0-9a-fA-F]+)?")
        if not (good and all(hexadecimal.fullmatch(f) and 0 <= int(f or b"0", 16) < 2**32 for f in fields[13:])):
            raise ValueError(number)
        integers = [int(f) if f else None for f in fields[:13]]
        rows.append((int(label), integers, [int(f, 16) if f else None for f in fields[13:]]))
    return rows


def plain_ids(row: Row, table_rows: int) -> list[int]:
    return [0 if h is None else 1 + h % (table_rows - 1) for h in row[2]]


def plain_dense(rows: list[Row], train: list[Row]) -> list[list[float]]:
    """The documented formula, one value at a time."""
    columns = []
    for i in range(13):
        fitted = [row[1][i] for row in train if row[1][i] is not None]
        low = min(fitted)
        values = (row[1][i] for row in rows)
        columns.append([0.0 if x is None else math.log1p(max(x - low, 0)) for x in values])
    return [list(row) for row in zip(*columns, strict=True)]


# What is written.


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_real_rows_equal_an_independent_reading(split: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not REAL.is_dir():
        pytest.skip(f"no Criteo rows at {REAL}")
    out = tmp_path_factory.getbasetemp() / "real"
    if not out.exists():
        convert(REAL, out)
    train = plain_rows((REAL / "train.tsv").read_bytes())
    rows = plain_rows((REAL / f"{'dev' if split == 'val' else split}.tsv").read_bytes())
    expected = [
        (row[0], plain_ids(row, TABLE_ROWS), values) for row, values in zip(rows, plain_dense(rows, train), strict=True)
    ]
    got = table(out, split)
    ids = zip(*(got[name].to_pylist() for name in criteo.SPARSE), strict=True)
    have = [
        (label, list(i), d) for label, i, d in zip(got["label"].to_pylist(), ids, got["dense"].to_pylist(), strict=True)
    ]
    if split == "train":  # it is shuffled
        expected, have = sorted(expected), sorted(have)
    assert [row[:2] for row in have] == [row[:2] for row in expected]
    np.testing.assert_allclose([row[2] for row in have], [row[2] for row in expected], rtol=1e-5, atol=1e-6)
    assert read_index(out).splits[split].positives == sum(row[0] for row in rows)


def test_columns_have_the_documented_types(tmp_path: Path) -> None:
    schema = table(convert(folder(tmp_path / "in"), tmp_path / "out"), "train").schema
    assert schema.names == ["label", "dense", *criteo.SPARSE]
    assert schema.types == [pa.int8(), pa.list_(pa.float32(), 13), *[pa.int32()] * 26]


def test_ids_are_zero_when_missing_and_else_one_plus_hash_modulo(tmp_path: Path) -> None:
    hashes = ["", "0", "00000000", "ff", "FFFFFFFF", "0000001a", "3e7"]
    source = folder(tmp_path / "in", test=text(*(line(C26=h) for h in hashes)))
    out = convert(source, tmp_path / "out")
    assert table(out, "test")["C26"].to_pylist() == [0, 1, 1, 256, 1 + 0xFFFFFFFF % 999, 27, 1]


def test_a_table_of_one_row_has_only_id_zero(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", test=text(line(C1="ff"), line(C1="")))
    out = convert(source, tmp_path / "out", sparse=[SparseFeature(name="C1", rows=1)])
    assert table(out, "test")["C1"].to_pylist() == [0, 0]


def test_dense_values_below_the_train_minimum_count_as_the_minimum(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(line(I1="-2"), line(I1="7")), test=text(line(I1="-9"), line(I1="-2")))
    values = dense(convert(source, tmp_path / "out"), "test")
    assert values == [0, 0]


def test_a_missing_dense_value_is_zero_and_outside_the_statistics(tmp_path: Path) -> None:
    rows = [line(I1="2"), line(I1=""), line(I1="5")]
    out = convert(folder(tmp_path / "in", train=text(*rows), test=text(*rows)), tmp_path / "out")
    assert dense(out, "test") == pytest.approx([0.0, 0.0, math.log(4)])
    assert read_index(out).dense_transform["I1"] == {"min": 2}


def test_constant_and_always_missing_features_stay_finite(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(*[line(I1="5", I2="")] * 3), test=text(line(I1="6", I2="9")))
    out = convert(source, tmp_path / "out")
    assert dense(out, "train", "I1") == dense(out, "train", "I2") == [0, 0, 0]
    assert dense(out, "test", "I1") == pytest.approx([math.log(2)])
    assert dense(out, "test", "I2") == pytest.approx([math.log(10)])


def test_integers_of_every_length_are_read(tmp_path: Path) -> None:
    numbers = [int("9876543210"[-k:]) for k in range(1, 10)] + [2**31 - 1, 1 - 2**31, -12345678, -123456789]
    rows = text(*(line(I1=str(x)) for x in numbers))
    out = convert(folder(tmp_path / "in", train=rows, test=rows), tmp_path / "out")
    expected = [row[0] for row in plain_dense(plain_rows(rows), plain_rows(rows))]
    assert dense(out, "test") == pytest.approx(expected, abs=1e-6)


def test_signs_and_leading_zeros_do_not_change_a_number(tmp_path: Path) -> None:
    rows = text(line("01", I1="+5", C1="000000000b"), line("1", I1="0000000000005", C1="+b"), line("1", I1="5", C1="b"))
    out = convert(folder(tmp_path / "in", test=rows), tmp_path / "out")
    assert table(out, "test")["label"].to_pylist() == [1, 1, 1]
    assert dense(out, "test") == pytest.approx([math.log(5)] * 3)
    assert table(out, "test")["C1"].to_pylist() == [12, 12, 12]


def test_the_largest_table_takes_every_hash(tmp_path: Path) -> None:
    hashes = ["ffffffff", "7ffffffd", "7ffffffe", "0", ""]
    source = folder(tmp_path / "in", test=text(*(line(C1=h) for h in hashes)))
    out = convert(source, tmp_path / "out", sparse=[SparseFeature(name="C1", rows=2**31 - 1)])
    assert table(out, "test")["C1"].to_pylist() == [4, 2**31 - 2, 1, 1, 0]


def test_the_size_of_the_blocks_of_text_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "in", train=text(*lines(200)))
    index = read_index(convert(source, tmp_path / "a"))
    for size in (1000, 7777):
        monkeypatch.setattr(criteo, "_BLOCK_BYTES", size)
        assert read_index(convert(source, tmp_path / f"b{size}")) == index


def test_statistics_come_from_the_train_split_only(tmp_path: Path) -> None:
    train = text(*lines(50))
    index = [
        read_index(convert(folder(tmp_path / f"in{i}", train=train, test=test), tmp_path / f"out{i}"))
        for i, test in enumerate([text(line(I1="-1")), text(line(I1="99999", C1=""))])
    ]
    assert index[0].dense_transform == index[1].dense_transform
    assert index[0].splits["train"] == index[1].splits["train"]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(*lines(100)))
    first, second = (read_index(convert(source, tmp_path / name)) for name in ("a", "b"))
    assert first == second


def test_the_seed_decides_the_order_of_train_and_of_nothing_else(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", **dict.fromkeys(("train", "val", "test"), text(*lines(100))))
    orders = {
        split: [dense(convert(source, tmp_path / f"{split}{seed}", seed=seed), split) for seed in (0, 1)]
        for split in ("train", "val", "test")
    }
    assert sorted(orders["train"][0]) == sorted(orders["train"][1]) == orders["val"][0]
    assert orders["train"][0] != orders["train"][1]
    assert orders["val"][0] == orders["val"][1] == orders["test"][0] == orders["test"][1]
    assert orders["train"][0] != orders["val"][0]


def test_one_file_is_split_by_order(tmp_path: Path) -> None:
    rows = lines(25)
    (tmp_path / "train.txt").write_bytes(text(*rows))
    out = convert(tmp_path / "train.txt", tmp_path / "out")
    index = read_index(out)
    assert {name: split.rows for name, split in index.splits.items()} == {"train": 20, "val": 2, "test": 3}
    everything = plain_rows(text(*rows))
    expected = [row[0] for row in plain_dense(everything, everything[:20])]  # I1 counts the rows
    assert sorted(dense(out, "train")) == pytest.approx(expected[:20], abs=1e-6)
    assert dense(out, "val") + dense(out, "test") == pytest.approx(expected[20:], abs=1e-6)


def test_record_batches_hold_block_rows(tmp_path: Path) -> None:
    out = convert(folder(tmp_path / "in", train=text(*lines(25))), tmp_path / "out", block_rows=8)
    file = pa.ipc.open_file(out / "train-00000.arrow")
    assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [8, 8, 8, 1]


def test_the_index_satisfies_its_reader_and_the_configuration(tmp_path: Path) -> None:
    config = settings(folder(tmp_path / "in"), tmp_path / "out", block_rows=7)
    conversion.prepare(config)
    index = read_index(tmp_path / "out")
    check_index(index, config)
    assert (index.block_rows, index.splits["train"].rows, index.splits["train"].positives) == (7, 2, 1)
    assert set(index.splits) == {"train", "test"}
    assert index.ids_per_sample == dict.fromkeys(criteo.SPARSE, 1.0)


def test_only_the_features_of_the_configuration_are_written(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", test=text(line(I3="5", C7="b")))
    out = convert(source, tmp_path / "out", dense=["I3", "I1"], sparse=[SparseFeature(name="C7", rows=100)])
    got = table(out, "test")
    assert got.column_names == ["label", "dense", "C7"]
    assert got["dense"].to_pylist() == [pytest.approx([math.log(5), 0])]
    assert got["C7"].to_pylist() == [12]


@pytest.mark.parametrize("val_name", ["val.txt", "valid.csv", "dev.tsv"])
def test_the_val_split_has_several_names(val_name: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    (source / val_name).write_bytes(text(line("1"), line("1"), line("0")))
    assert read_index(convert(source, tmp_path / "out")).splits["val"].positives == 2


@pytest.mark.parametrize("how", ["crlf", "no newline at the end", "gz"])
def test_other_spellings_of_the_same_rows_are_accepted(how: str, tmp_path: Path) -> None:
    rows = [*lines(30), line(C26="")]
    plain = convert(folder(tmp_path / "plain", train=text(*rows)), tmp_path / "a")
    source = folder(tmp_path / "other", train=text(*rows))
    if how == "crlf":
        (source / "train.tsv").write_bytes(b"".join(row + b"\r\n" for row in rows))
    elif how == "gz":
        (source / "train.tsv").unlink()
        (source / "train.tsv.gz").write_bytes(gzip.compress(text(*rows)))
    else:
        (source / "train.tsv").write_bytes(text(*rows)[:-1])
    assert read_index(convert(source, tmp_path / "b")) == read_index(plain)


# Wrong settings.


def test_kaggles_unlabelled_file_is_recognised(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", test=text(line().partition(b"\t")[2]))
    with pytest.raises(ConfigError, match=r"test\.tsv has 39 columns.*Kaggle's test\.txt, which has no labels"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": None}, "data.source=null: expected"),
        ({"path": None}, "data.path=null: expected"),
        ({"source": "/no/such/place"}, "data.source=/no/such/place: no such file or folder"),
        ({"path": "/dev/null/out"}, "data.path=/dev/null/out: cannot be made"),
        ({"kind": DataKind.synthetic}, "data.kind=synthetic: .*nothing to prepare"),
        ({"dense": ["I1", "I14"]}, r"data.dense: no such column: \['I14'\]; Criteo's are I1 to I13"),
        ({"sparse": [SparseFeature(name="user", rows=9)]}, r"data.sparse: no such column: \['user'\]"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "in")
    with pytest.raises(ConfigError, match=message):
        conversion.prepare(settings(**{"source": source, "path": tmp_path / "out", **changes}))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_folder_without_a_test_split_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    (source / "test.tsv").unlink()
    with pytest.raises(ConfigError, match=r"no test split; expected test\.tsv"):
        convert(source, tmp_path / "out")


def test_two_files_for_one_split_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", val=text(line()), dev=text(line()))
    with pytest.raises(ConfigError, match=r"val\.tsv and dev\.tsv could both be the val split"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
def test_an_existing_target_is_refused_and_untouched(what: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "in"), tmp_path / "out"
    if what == "folder":
        out.mkdir()
    elif what == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = out.lstat()
    with pytest.raises(ConfigError, match="exists already and is never overwritten; remove it or choose another"):
        convert(source, out)
    assert (out.lstat().st_ino, out.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# Others at work.


def test_what_a_killed_process_left_is_removed_and_never_believed(tmp_path: Path) -> None:
    left = tmp_path / "out.tmp"
    left.mkdir()
    for name in ("index.json", "train-00000.arrow", "train-00001.arrow"):
        (left / name).write_text("half")
    (tmp_path / "out.tmp.lock").touch()
    index = read_index(convert(folder(tmp_path / "in"), tmp_path / "out"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"index.json", *(f.name for f in index.files())}
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}


def test_a_second_process_for_the_same_target_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    with conversion._temporary(tmp_path / "out") as temporary:
        (temporary / "mine").touch()
        with pytest.raises(ConfigError, match="another prepare is making it; wait, or choose another"):
            convert(source, tmp_path / "out")
        assert (temporary / "mine").exists()


# The command.


def start(source: Path, out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rechpc.prepare", "experiment=criteo_8k"]
    return subprocess.Popen(
        [*command, f"data.source={source}", f"data.path={out}"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_command_reports_and_names_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", test=text(line("1", I1="", C1=""), line("0")))
    config = CommandConfig(data=settings(source, tmp_path / "out"))
    overrides = ["experiment=criteo_8k", f"data.source={source}", f"data.path={tmp_path / 'out'}"]
    assert main(config, overrides) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "train 2 rows, 50.00% positive, dense 0.0% missing, sparse 0.0% missing, 26 ids a row",
        "test  2 rows, 50.00% positive, dense 3.8% missing, sparse 1.9% missing, 26 ids a row",
        f"data set: {tmp_path / 'out'}",
        f"next: python -m rechpc.submit experiment=criteo_8k data.path={tmp_path / 'out'}",
    ]
    assert re.search(r"read 4 rows, 100%, [\d,]+ rows/s", err)


@pytest.mark.parametrize(("bad", "status"), [("column", 1), ("setting", 2)])
def test_a_mistake_ends_the_command_with_one_line_and_its_status(bad: str, status: int, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(b"0\t1") if bad == "column" else text(line()))
    process = start(source, tmp_path / ("out" if bad == "column" else "in"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "")
    assert len(err.splitlines()) == 1
    assert "2 columns, expected 40" in err or "exists already" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing_that_is_in_the_way(number: signal.Signals, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "in", train=text(*lines(500)) * 600), tmp_path / "out"
    process = start(source, out)
    while not (tmp_path / "out.tmp").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert not out.exists()
    if number is not signal.SIGKILL:
        assert process.returncode == 130
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
    read_index(convert(folder(tmp_path / "in", train=text(line())), out))

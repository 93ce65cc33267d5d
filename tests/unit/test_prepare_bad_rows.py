"""What rechpc.prepare says of bad text, and that it leaves nothing behind then."""

import gzip
import resource
from pathlib import Path

import numpy as np
import pytest

from rechpc.config import BadRows
from rechpc.dataset import read_index
from rechpc.errors import DataError, RechpcError
from rechpc.prepare import criteo
from tests.unit.test_prepare import (
    ROOT,
    TABLE_ROWS,
    convert,
    folder,
    line,
    lines,
    plain_dense,
    plain_ids,
    plain_rows,
    table,
    text,
)

RAGGED = ROOT.parent / "shared/data/criteo_ragged.tsv"

BAD_LINES = {
    "too few columns": (line().rpartition(b"\t")[0].rpartition(b"\t")[0], "38 columns, expected 40"),
    "too many columns": (line() + b"\t", "41 columns, expected 40"),
    "blank line": (b"", "a blank line, expected 40"),
    "commas": (line().replace(b"\t", b","), "1 columns.*replace the commas by tabs"),
    "label 2": (line("2"), "label='2', expected 0 or 1"),
    "label -1": (line("-1"), "label='-1', expected 0 or 1"),
    "label 1.0": (line("1.0"), "label='1.0', expected 0 or 1"),
    "missing label": (line(""), "label='', expected 0 or 1"),
    "word for an integer": (line(I5="many"), "I5='many', expected a 32-bit integer or nothing"),
    "fraction": (line(I1="1.5"), "I1='1.5'"),
    "exponent": (line(I1="1e3"), "I1='1e3'"),
    "underscore": (line(I1="1_000"), "I1='1_000'"),
    "digit that is not ASCII": (line(I1="\N{FULLWIDTH DIGIT FIVE}"), r"I1='\\xef\\xbc\\x95'"),
    "lone minus": (line(I1="-"), "I1='-'"),
    "minus inside": (line(I1="1-2"), "I1='1-2'"),
    "space": (line(I13=" 5"), "I13=' 5'"),
    "integer of 33 bits": (line(I1="2147483648"), "I1='2147483648'"),
    "integer of 37 bits": (line(I1="-99999999999"), "I1='-99999999999'"),
    "letters in front of many digits": (line(I1="x123456789"), "I1='x123456789'"),
    "endless integer": (line(I1="1" * 5000), r"I1='1+'\.\.\., expected"),
    "no hexadecimal": (line(C1="zzzzzzzz"), "C1='zzzzzzzz', expected 1 to 8 hexadecimal digits"),
    "hexadecimal of 36 bits": (line(C9="0fffffffff"), "C9='0fffffffff'"),
    "hexadecimal of 65 bits": (line(C9="10000000000000000"), "C9='10000000000000000'"),
    "prefix of a hexadecimal": (line(C9="0xff"), "C9='0xff'"),
    "minus in a category": (line(C9="-fffffff"), "C9='-fffffff'"),
    "quoted category": (line(C2='"68fd1e64"'), """C2='"68fd1e64"'"""),
    "quote": (line(C2='"8fd1e64'), """C2='"8fd1e64'"""),
    "word for a missing value": (line(C2="null"), "C2='null'"),
    "NUL byte": (line(C3="\0fb936136"), r"C3='\\x00fb936136'.*the file is damaged"),
    "not UTF-8": (line(C3="fb\udcff"), r"C3='fb\\xff'.*the file is damaged"),
    "carriage return inside": (line(I2="1\r2"), r"I2='1\\r2'"),
    "carriage return at the end": (line(I2="1\r"), r"I2='1\\r'"),
    "carriage return alone": (line(C3="\r"), r"C3='\\r'"),
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_row_is_an_error_that_names_it_and_leaves_nothing(case: str, split: str, tmp_path: Path) -> None:
    bad, message = BAD_LINES[case]
    source = folder(tmp_path / "in", **{split: text(line(), line("1"), bad, line())})
    with pytest.raises(DataError, match=rf"{split}\.tsv, line 3: {message}"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_bad_row_far_into_a_file_has_its_line_number(split: str, tmp_path: Path) -> None:
    good = text(*lines(1000))
    copies = 1 + 2 * criteo._BLOCK_BYTES // len(good)
    source = folder(tmp_path / "in", **{split: good * copies + text(line(I1="?")) + good})
    with pytest.raises(DataError, match=rf"{split}\.tsv, line {copies * 1000 + 1}: I1='[?]'"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_the_first_of_several_bad_rows_is_reported(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(line(), line(C1="g"), line(I1="x"), line("7"), b"short"))
    with pytest.raises(DataError, match="line 2: C1='g'"):
        convert(source, tmp_path / "out")


def test_one_changed_byte_is_read_as_documented_or_refused(tmp_path: Path) -> None:
    original = text(*lines(10), line(I1="-12345678", I2="1234567890"))
    train = plain_rows(text(line("0"), line("1")))
    rng = np.random.default_rng(0)
    refused = 0
    for i in range(250):
        damaged = bytearray(original)
        interesting = b"\t\n\r\0-09afAFgx \"'+.\xff"
        damaged[rng.integers(len(damaged))] = interesting[rng.integers(len(interesting))]
        source = folder(tmp_path / "in", test=bytes(damaged))
        try:
            rows = plain_rows(bytes(damaged))
        except ValueError as error:
            with pytest.raises(RechpcError, match=f"test.tsv, line {error}:|test.tsv has 39 columns"):
                convert(source, tmp_path / "out")
            refused += 1
        else:
            got = table(convert(source, tmp_path / f"out{i}"), "test")
            assert got["label"].to_pylist() == [row[0] for row in rows]
            ids = [list(row) for row in zip(*(got[c].to_pylist() for c in criteo.SPARSE), strict=True)]
            assert ids == [plain_ids(row, TABLE_ROWS) for row in rows]
            assert got["dense"].to_pylist() == [pytest.approx(row, abs=1e-6) for row in plain_dense(rows, train)]
    assert 50 < refused < 200


def test_stripped_trailing_tabs_are_an_error(tmp_path: Path) -> None:
    if not RAGGED.is_file():
        pytest.skip(f"no ragged rows at {RAGGED}")
    number = next(i for i, row in enumerate(RAGGED.read_bytes().splitlines(), 1) if row.count(b"\t") != 39)
    with pytest.raises(DataError, match=rf"line {number}: 3[78] columns, expected 40 .* lost its trailing tabs"):
        convert(RAGGED, tmp_path / "out")


def test_a_header_is_recognised(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text("\t".join(criteo.COLUMNS).encode(), line()))
    with pytest.raises(DataError, match=r"train\.tsv, line 1: label='label'.* header; remove the first line"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("start", ["x^", "x\x01", "\x1f\udc8b", "\x28\udcb5\x2f\udcfd", "\ufeff1", "#1"])
def test_a_file_that_starts_like_another_format_is_an_error(start: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(line(start), line()))
    with pytest.raises(DataError, match=r"train\.tsv, line 1: label='.*, expected 0 or 1"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_file_is_an_error(split: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{split}.tsv: empty, expected 40 columns"):
        convert(folder(tmp_path / "in", **{split: b""}), tmp_path / "out")


def test_too_few_rows_to_split_by_order_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(text(*lines(9)))
    with pytest.raises(DataError, match="9 rows, expected at least 10"):
        convert(tmp_path / "train.txt", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]


def test_a_cut_off_gz_file_is_an_error(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    (source / "train.tsv").unlink()
    (source / "train.tsv.gz").write_bytes(gzip.compress(text(*lines(100)))[:-100])
    with pytest.raises(DataError, match=r"train\.tsv\.gz: cannot be read"):
        convert(source, tmp_path / "out")


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", train=text(*lines(1000)))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    try:
        with pytest.raises(DataError, match=r"out: cannot be written .*; free some space"):
            convert(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# The policies.

POLICY_LINES = {
    "short line": (line(C25="", C26="").rstrip(b"\t"), "columns", True),
    "long line": (line() + b"\t\t", "columns", True),
    "long line with a value": (line() + b"\tx", "columns", False),
    "line cut in the middle": (line().partition(b"a")[0], "columns", True),
    "row without a label": (line(I13="7", C1="68fd1e64").partition(b"\t")[2], "columns", False),
    "blank line": (b"", "blank line", True),
    "header": ("\t".join(criteo.COLUMNS).encode(), "label", False),
    "label": (line("2"), "label", False),
    "number": (line(I3="1.5"), "number", True),
    "hexadecimal": (line(C3="xyz"), "hexadecimal", True),
    "NUL byte": (line(C3="a\0"), "NUL byte", True),
    "not UTF-8": (line(C3="a\udcff"), "not UTF-8", True),
}


@pytest.mark.parametrize("case", POLICY_LINES)
@pytest.mark.parametrize("policy", ["skip", "fix"])
def test_a_bad_line_is_skipped_or_fixed_and_counted(case: str, policy: str, tmp_path: Path) -> None:
    bad, kind, fixable = POLICY_LINES[case]
    good = lines(20)
    source = folder(tmp_path / "in", test=text(*good[:7], bad, *good[7:]))
    out = convert(source, tmp_path / "out", bad_rows=BadRows(policy))
    fixed = policy == "fix" and fixable
    assert read_index(out).bad_rows == {f"{kind}: {'fixed' if fixed else 'skipped'}": 1}
    labels = table(out, "test")["label"].to_pylist()
    expected = [row[0] for row in plain_rows(text(*good))]
    if fixed and case != "blank line":
        expected.insert(7, 0)
    assert labels == expected


def test_a_header_in_the_first_line_is_skipped_as_one(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", test=text("\t".join(criteo.COLUMNS).encode(), line("1")))
    out = convert(source, tmp_path / "out", bad_rows=BadRows.fix)
    assert read_index(out).bad_rows == {"header: skipped": 1}
    assert table(out, "test")["label"].to_pylist() == [1]


def test_stripped_trailing_tabs_are_put_back(tmp_path: Path) -> None:
    if not RAGGED.is_file():
        pytest.skip(f"no ragged rows at {RAGGED}")
    out = convert(RAGGED, tmp_path / "out", bad_rows=BadRows.fix)
    assert read_index(out).bad_rows == {"columns: fixed": 498}
    whole = b"".join(row + b"\t" * (39 - row.count(b"\t")) + b"\n" for row in RAGGED.read_bytes().splitlines())
    rows = plain_rows(whole)
    got = table(out, "test")
    ids = [list(row) for row in zip(*(got[c].to_pylist() for c in criteo.SPARSE), strict=True)]
    assert ids == [plain_ids(row, TABLE_ROWS) for row in rows[900:]]
    assert got["dense"].to_pylist() == [pytest.approx(row, abs=1e-6) for row in plain_dense(rows, rows[:800])[900:]]


def test_bad_lines_count_once_each_up_to_the_limit(tmp_path: Path) -> None:
    bad = [line("2", I1="x", C1="?"), line(I1="x"), b"short"]
    source = folder(tmp_path / "in", train=text(*bad, *lines(5)), test=text(line("3"), line()))
    out = convert(source, tmp_path / "out", bad_rows=BadRows.skip, max_bad_rows=4)
    assert read_index(out).bad_rows == {"columns: skipped": 1, "label: skipped": 2, "number: skipped": 1}
    with pytest.raises(DataError, match=r"more bad rows than data.max_bad_rows=3 .*test\.tsv, line 1: label='3'"):
        convert(source, tmp_path / "other", bad_rows=BadRows.skip, max_bad_rows=3)

"""Criteo's text: label, I1 to I13, C1 to C26, separated by tabs, without a header.

The one file that knows this format. Polars parses a block of good lines at once; only a block in which that cannot be
right is looked at line by line.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from rechpc.config import DataConfig
from rechpc.errors import ConfigError, DataError
from rechpc.prepare.rows import DAMAGED, LABEL, Finding, Judge, Rows, message

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *DENSE, *SPARSE)
LAYOUT = f"{len(COLUMNS)} columns separated by tabs (label, I1 to I13, C1 to C26)"

_BLOCK_BYTES = 2**24
_CACHED_BYTES = 2**18
_TABS = len(COLUMNS) - 1
# Without it, Polars 2.1 takes a block that begins with "x^" for a zlib stream.
_HEADER = "\t".join(COLUMNS).encode() + b"\n"


def read(path: Path, config: DataConfig, judge: Judge) -> Iterator[Rows]:
    """The rows of a file in its order: integers as int32, hexadecimals as uint32."""
    first_line, size = 1, path.stat().st_size
    for block, position in _blocks(path):
        num_lines = _count(block, b"\n")
        if first_line == 1:
            _check_first(block.partition(b"\n")[0], path)
        numbers_N = np.arange(first_line, first_line + num_lines)
        rows = Rows(frame=pl.DataFrame(), path=path, numbers_N=numbers_N, share=position / max(size, 1), unit="line")
        frame = _parse(block, num_lines, config)
        yield _parse_slowly(block, rows, config, judge) if frame is None else replace(rows, frame=frame)
        first_line += num_lines
    if first_line == 1:
        raise DataError(f"{path}: empty, expected {LAYOUT} in every line; get the file again")


def count(path: Path) -> int:
    """The lines of a file."""
    return sum(_count(block, b"\n") for block, _ in _blocks(path))


def check_columns(config: DataConfig) -> None:
    """Raise ConfigError for a feature that this format does not have."""
    for key, names, known in (("dense", config.dense, DENSE), ("sparse", [f.name for f in config.sparse], SPARSE)):
        if unknown := sorted({config.columns.get(name, name) for name in names} - set(known)):
            raise ConfigError(f"data.{key}: no such column: {unknown}; Criteo's are {known[0]} to {known[-1]}")


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file in blocks of whole lines, each of which ends with one newline; and how far that is in it."""
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while block := file.read(_BLOCK_BYTES):
                # The limit is for a file without newlines; its pieces fail as lines of too few columns.
                block += file.readline(_BLOCK_BYTES)
                if b"\r" in block:
                    block = block.replace(b"\r\n", b"\n")
                yield block if block.endswith(b"\n") else block + b"\n", raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from error


def _count(block: bytes, byte: bytes) -> int:
    # In parts that stay in the cache: ten times as fast as bytes.count.
    array = np.frombuffer(block, np.uint8)
    return sum(
        int(np.count_nonzero(array[i : i + _CACHED_BYTES] == ord(byte))) for i in range(0, len(array), _CACHED_BYTES)
    )


def _features(config: DataConfig) -> dict[str, str]:
    """The column of each feature."""
    return {name: config.columns.get(name, name) for name in (LABEL, *config.dense, *(f.name for f in config.sparse))}


def _check_first(line: bytes, path: Path) -> None:
    fields = line.split(b"\t")
    if len(fields) == _TABS and not re.fullmatch(rb"[-+]?[0-9]*", fields[len(DENSE)]):
        raise ConfigError(
            f"data.source: {path} has {_TABS} columns, expected {LAYOUT}; it looks like Kaggle's test.txt, which has "
            "no labels; set data.source= to the labelled train.txt itself, and it is split by order"
        )


def _parse(block: bytes, num_lines: int, config: DataConfig) -> pl.DataFrame | None:
    """The features of a block without a fault; None where there may be one."""
    # Polars pads a short line with nulls and refuses a long one, so that their sum leaves nothing to hide.
    if _count(block, b"\t") != _TABS * num_lines or any(byte in block for byte in (b"\r", b"\0", b" ")):
        return None
    names = _features(config)
    used = set(names.values())
    types = {c: pl.Int8 if c == LABEL else pl.Int32 if c in DENSE and c in used else pl.String for c in COLUMNS}
    try:
        text = pl.read_csv(_HEADER + block, separator="\t", quote_char=None, schema=types)
    except pl.exceptions.PolarsError:
        return None
    categories = [c for c in SPARSE if c in used]
    frame = text.with_columns(pl.col(categories).str.to_integer(base=16, dtype=pl.UInt32, strict=False))
    lost = frame.null_count().row(0) != text.null_count().row(0)
    if lost or len(frame) != num_lines or not frame[LABEL].is_in([0, 1]).all(ignore_nulls=False):
        return None
    return frame.select(pl.col(column).alias(name) for name, column in names.items())


def _parse_slowly(block: bytes, rows: Rows, config: DataConfig, judge: Judge) -> Rows:
    """As `_parse`, with a finding for every fault."""
    lines, kept = block.removesuffix(b"\n").split(b"\n"), []
    findings: list[Finding] = []
    for i, line in enumerate(lines):
        if line.count(b"\t") != _TABS:
            if len(findings) < judge.most:
                findings.append(_bad_columns(line, rows, int(rows.numbers_N[i])))
            if line:  # what may be meant, where fixing is asked for: trailing empty columns were lost or added
                line = line.rstrip(b"\t")
                line += b"\t" * (_TABS - line.count(b"\t"))
                lines[i] = line
        if line.count(b"\t") == _TABS:
            kept.append(i)
    good = replace(rows, frame=_text([lines[i] for i in kept]), numbers_N=rows.numbers_N[kept])
    misfits = {f.number for f in findings}
    values = []
    for name, column in _features(config).items():
        raw = good.frame[column]
        value = _number(raw, column)
        bad = value.is_null() if column == LABEL else value.is_null() & raw.is_not_null()
        for i in np.flatnonzero(bad.to_numpy())[: judge.most]:
            text = lines[kept[i]].split(b"\t")[COLUMNS.index(column)]
            number = int(good.numbers_N[i])
            # In a row that has lost columns, a bad value says that they were not the last ones.
            findings.append(_bad_field(text, column, good, number, fixable=number not in misfits))
        values.append(value.alias(name))
    return replace(good, frame=pl.DataFrame(values)).keep(judge.drop(findings))


def _text(lines: list[bytes]) -> pl.DataFrame:
    """Lines of the right number of columns as text."""
    # What is not UTF-8 becomes U+FFFD, no digit either; a carriage return would be dropped at the end of a field.
    content = _HEADER + b"\n".join(lines).replace(b"\r", b"\0")
    return pl.read_csv(content, separator="\t", quote_char=None, infer_schema=False, encoding="utf8-lossy")


def _number(raw: pl.Series, column: str) -> pl.Series:
    """The values of a column of text, null where it has none."""
    if column in SPARSE:
        return raw.str.to_integer(base=16, dtype=pl.UInt32, strict=False)
    value = raw.cast(pl.Int8 if column == LABEL else pl.Int32, strict=False)
    return pl.select(pl.when(value.is_in([0, 1])).then(value)).to_series() if column == LABEL else value


def _bad_field(text: bytes, column: str, rows: Rows, number: int, *, fixable: bool) -> Finding:
    kind = "label" if column == LABEL else "number" if column in DENSE else "hexadecimal"
    expected = "a 32-bit integer or nothing" if column in DENSE else "1 to 8 hexadecimal digits or nothing"
    decoded, advice = text.decode(errors="replace"), ""
    if "\0" in decoded or "\ufffd" in decoded:
        kind, advice = "NUL byte" if "\0" in decoded else "not UTF-8", DAMAGED
    elif column == LABEL and any(c.isalpha() for c in decoded) and number == 1:
        kind, advice = "header", "it looks like a header; remove the first line"
    error = message(rows, number, column, text, "0 or 1" if column == LABEL else expected, advice)
    return Finding(number=number, kind=kind, error=error, fixable=fixable and column != LABEL)


def _bad_columns(line: bytes, rows: Rows, number: int) -> Finding:
    num_columns = line.count(b"\t") + 1
    kind, what, advice = "columns", f"{num_columns} columns", "correct or remove the line, or set data.bad_rows"
    if not line:
        kind, what = "blank line", "a blank line"
    elif num_columns == 1 and line.count(b",") > 1:
        advice = "replace the commas by tabs"
    elif num_columns < len(COLUMNS):
        advice = "the file was cut off or lost its trailing tabs; get it again, or set data.bad_rows=fix"
    fixable = not line.strip(b"\t") or (line.rstrip(b"\t").count(b"\t") <= _TABS and num_columns > 1)
    error = f"{rows.path}, line {number}: {what}, expected {LAYOUT}; {advice}"
    return Finding(number=number, kind=kind, error=error, fixable=fixable)

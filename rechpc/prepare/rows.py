"""Rows on their way from a source to a data set: their types, what is wrong with them, and what is done about it.

Every value passes `typed`, whatever the format it comes from. It must not know formats or statistics.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from rechpc.choices import BadRows, IdMapping
from rechpc.config import DataConfig, SparseFeature
from rechpc.errors import DataError

LABEL = "label"
DAMAGED = "the file is damaged or not text; get it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Some rows of a file: columns by the name of their feature, in the types that the file has."""

    frame: pl.DataFrame
    path: Path
    numbers_N: npt.NDArray[np.int64]  # of each row, from 1
    share: float  # of the file that has been read with these rows
    unit: str = "row"

    def keep(self, drop: set[int]) -> "Rows":
        """Without the rows of these numbers."""
        if not drop:
            return self
        kept_N = ~np.isin(self.numbers_N, list(drop))
        return replace(self, frame=self.frame.filter(kept_N), numbers_N=self.numbers_N[kept_N])

    def part(self, start: int, end: int) -> "Rows":
        """The rows in these places."""
        return replace(self, frame=self.frame[start:end], numbers_N=self.numbers_N[start:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something wrong with a row; `fixable` when a missing value, or no row, is a sane reading of it."""

    number: int
    kind: str
    error: str
    fixable: bool = True


@dataclass(slots=True)
class Judge:
    """Applies data.bad_rows, and counts by kind."""

    config: DataConfig
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def most(self) -> int:
        """Findings after which more of them change nothing."""
        return self.config.max_bad_rows + 1

    def drop(self, findings: list[Finding]) -> set[int]:
        """The numbers of the rows to leave out; the others have been fixed. Raises DataError as the policy says."""
        policy, limit = self.config.bad_rows, self.config.max_bad_rows
        by_row: dict[int, list[Finding]] = {}
        for finding in findings:
            by_row.setdefault(finding.number, []).append(finding)
        dropped = set()
        for number, (first, *others) in sorted(by_row.items()):
            if policy is BadRows.fail:
                raise DataError(first.error)
            fixed = policy is BadRows.fix and all(f.fixable for f in (first, *others))
            self.counts[f"{first.kind}: {'fixed' if fixed else 'skipped'}"] += 1
            if not fixed:
                dropped.add(number)
            if self.counts.total() > limit:
                raise DataError(
                    f"more bad rows than data.max_bad_rows={limit} ({self}); "
                    f"raise it if that is what you expect; the last one: {first.error}"
                )
        return dropped

    def __str__(self) -> str:
        return ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.counts.items()))


def message(rows: Rows, number: int, name: str, value: Any, expected: str, advice: str = "") -> str:
    """What a user reads of a bad value."""
    text = repr(value[:40] if isinstance(value, str | bytes) else value).removeprefix("b")
    more = "..." if isinstance(value, str | bytes) and len(value) > 40 else ""
    advice = advice or "correct or remove the row, or set data.bad_rows"
    return f"{rows.path}, {rows.unit} {number}: {name}={text}{more}, expected {expected}; {advice}"


def typed(rows: Rows, config: DataConfig, judge: Judge) -> pl.DataFrame:
    """The rows that are good: label 0 or 1, dense numbers or null, and by feature what `_Column.ids` says.

    Raises DataError for a column that can never fit, and for bad rows as data.bad_rows says.
    """
    columns = [_Column(rows, judge, LABEL).label(), *(_Column(rows, judge, name).dense() for name in config.dense)]
    columns += [_Column(rows, judge, f.name).ids(f, config) for f in config.sparse]
    frame = pl.DataFrame([column.result for column in columns])
    drop = judge.drop([finding for column in columns for finding in column.findings])
    return frame.filter(~np.isin(rows.numbers_N, list(drop))) if drop else frame


class _Column:
    """One column on its way to its type."""

    def __init__(self, rows: Rows, judge: Judge, name: str) -> None:
        self._rows, self._most, self._name = rows, judge.most, name
        self.result = rows.frame[name]
        self.findings: list[Finding] = []
        # The row of each value, as long as there is one value a row.
        self._row_N: npt.NDArray[np.int64] = rows.numbers_N

    def label(self) -> "_Column":
        raw = self._text(self.result)
        value = raw.cast(pl.Int8, strict=False)
        bad = (~value.is_in([0, 1])).fill_null(True)
        if raw.dtype.is_float():
            bad |= (raw != value).fill_null(True)
        self._find(bad, raw, "label", "0 or 1", fixable=False)
        self.result = value
        return self

    def dense(self) -> "_Column":
        raw = self._text(self.result)
        if not (raw.dtype.is_numeric() or raw.dtype in (pl.String, pl.Boolean, pl.Null)):
            raise DataError(f"{self._rows.path}: column of {self._name!r} has {raw.dtype}; expected numbers")
        if raw.dtype == pl.Int32:
            return self
        value = raw.cast(pl.Float64, strict=False)
        self._find(value.is_null() & raw.is_not_null(), raw, "number", "a number or nothing")
        self._find(~value.is_finite().fill_null(True), raw, "NaN or inf", "a finite number or nothing")
        self.result = pl.select(pl.when(value.is_finite()).then(value)).to_series().alias(self._name)
        return self

    def ids(self, feature: SparseFeature, config: DataConfig) -> "_Column":
        """Ids, int32; keys of values that the train split will give ids, int64, where mapping=vocabulary."""
        column = self._text(self.result)
        is_list = feature.ids_per_sample != 1
        if is_list and column.dtype == pl.String:
            column = column.str.split(config.list_separator)
        if is_list != (column.dtype.base_type() in (pl.List, pl.Array)):
            has, says = ("one id", "a list") if is_list else ("lists of ids", "exactly one")
            hint = "set its ids_per_sample in data.sparse to " + ("1" if is_list else "the mean length of the lists")
            raise DataError(f"{self._rows.path}: column of {self._name!r} has {has}, expected {says}; {hint}")
        if not is_list:
            self.result = self._map(column, feature).alias(self._name)
            return self
        column = column.arr.to_list() if column.dtype == pl.Array else column
        lengths_N = column.list.len().fill_null(0).to_numpy()
        self._row_N = np.repeat(self._rows.numbers_N, lengths_N)
        values = self._map(column.filter(column.list.len() > 0).explode(), feature)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)]))
        # An empty explode is one null in Polars.
        arrow = pa.LargeListArray.from_arrays(offsets, values.head(len(self._row_N)).to_arrow())
        self.result = pl.Series(self._name, arrow)
        return self

    def _map(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        if raw.dtype.is_float():  # integers with missing values, as Pandas writes them
            raw = raw.fill_nan(None)
        if feature.mapping is IdMapping.hash:
            key = self._keys(raw, as_number=False).alias(self._name)
            id_ = pl.first() % (feature.rows - 1) + 1
            # Without a look at every value, where the type has as many bits.
            id_ = id_.reinterpret(signed=True) if key.dtype == pl.UInt32 else id_.cast(pl.Int32)
            # The remainder of a division by 0 is null too.
            return key.to_frame().select(id_.fill_null(0)).to_series()
        if feature.mapping is IdMapping.vocabulary:
            return self._keys(raw, as_number=False).cast(pl.Int64)
        ids = self._keys(raw, as_number=True).cast(pl.Int64)
        good = ids.is_between(0, feature.rows - 1).fill_null(False)
        self._find(raw.is_null(), raw, "missing id", "an id, which mapping=as_is needs", fixable=False)
        self._find(~good & ids.is_not_null(), raw, "id out of range", f"0 to {feature.rows - 1}", fixable=False)
        return pl.select(pl.when(good).then(ids)).to_series().cast(pl.Int32)

    def _keys(self, raw: pl.Series, *, as_number: bool) -> pl.Series:
        """An integer for every value: itself, or 63 bits of a hash of a text."""
        if raw.dtype == pl.UInt32 or raw.dtype == pl.Null:
            return raw.cast(pl.UInt32)
        if raw.dtype == pl.UInt64:
            return raw.reinterpret(signed=True)
        if raw.dtype.is_integer() or raw.dtype == pl.Boolean:
            return raw.cast(pl.Int64)
        if raw.dtype.is_float():
            key = raw.cast(pl.Int64, strict=False)
            whole = (key.cast(pl.Float64) == raw).fill_null(False)
            self._find(~whole & raw.is_not_null(), raw, "number", "a whole number or nothing", fixable=not as_number)
            return pl.select(pl.when(whole).then(key)).to_series()
        if raw.dtype != pl.String:
            raise DataError(f"{self._rows.path}: column of {self._name!r} has {raw.dtype}; expected integers or text")
        if as_number:
            key = raw.cast(pl.Int64, strict=False)
            self._find(key.is_null() & raw.is_not_null(), raw, "number", "a whole number", fixable=False)
            return key
        unique = raw.unique(maintain_order=True).drop_nulls()
        hashes = [_hash(text) for text in unique]
        return raw.replace_strict(unique, pl.Series(hashes, dtype=pl.Int64), default=None, return_dtype=pl.Int64)

    def _text(self, raw: pl.Series) -> pl.Series:
        """Bytes as text, and missing where they are not."""
        if raw.dtype == pl.Categorical or raw.dtype == pl.Enum:
            return raw.cast(pl.String)
        if raw.dtype != pl.Binary:
            return raw
        try:
            text = raw.cast(pl.String)
        except pl.exceptions.ComputeError:
            text = pl.Series([_decode(value) for value in raw], dtype=pl.String)
        self._find(text.is_null() & raw.is_not_null(), raw, "not UTF-8", "text", advice=DAMAGED)
        has_nul = raw.bin.contains(b"\0")
        self._find(has_nul.fill_null(False), raw, "NUL byte", "text", advice=DAMAGED)
        return pl.select(pl.when(~has_nul).then(text)).to_series().alias(self._name)

    def _find(
        self, bad: pl.Series, raw: pl.Series, kind: str, expected: str, *, fixable: bool = True, advice: str = ""
    ) -> None:
        if not bad.any():
            return
        for i in np.flatnonzero(bad.to_numpy())[: self._most]:
            value, number = raw[int(i)], int(self._row_N[i])
            error = message(self._rows, number, self._name, value, expected, advice)
            self.findings.append(Finding(number=number, kind=kind, error=error, fixable=fixable))


def _decode(value: bytes | None) -> str | None:
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

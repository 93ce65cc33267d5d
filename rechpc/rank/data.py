"""Global batches that depend on the seed and the step alone, never on the world size or the plan.

Global batch k of size G is rows [kG, (k+1)G) of one seeded order of an epoch, rank r of W takes its part, and
the whole position in the data is one integer, the step. All ranks make the same number of steps, with the same
number of rows in each: a last partial batch is padded with empty rows of weight 0, so no sample is lost and no
collective waits for a rank that has no data. A thread reads a few batches ahead.

Shape legend: B rows of a local batch, F dense features.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from rechpc.choices import DataKind
from rechpc.config import DataConfig
from rechpc.dataset import Index, check_index, check_sha256, read_index
from rechpc.errors import DataError
from rechpc.rank.blocks import Block, Source, check, gather, one_each, pad
from rechpc.rank.process import Process
from rechpc.rank.synthetic import Synthetic

_AHEAD = 8  # batches at most, half of that at least
_RUN_ROWS = 1024
_DRAWN_AT_ONCE = 64  # blocks


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch; `weights_B` is 0 for padding, else world size / rows of the global batch.

    With these weights the mean over ranks of the weighted sum of losses is the mean loss of the global batch.
    """

    dense_BF: torch.Tensor
    sparse: KeyedJaggedTensor
    labels_B: torch.Tensor
    weights_B: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same batch on another device (the pipeline calls this)."""
        return Batch(
            dense_BF=self.dense_BF.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels_B=self.labels_B.to(device, non_blocking=non_blocking),
            weights_B=self.weights_B.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """The same batch in memory that a GPU copies from while it computes."""
        return Batch(
            dense_BF=self.dense_BF.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels_B=self.labels_B.pin_memory(),
            weights_B=self.weights_B.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` is done with it (the pipeline calls this)."""
        for part in (self.dense_BF, self.sparse, self.labels_B, self.weights_B):
            part.record_stream(stream)  # type: ignore[arg-type]


class GlobalBatches:
    """The sequence of global batches of one split, as one rank sees it."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        seed: int | None,
        pin: bool = False,
    ) -> None:
        """`seed` None keeps the order of the split, as evaluation wants it; `pin` is for batches that go to a GPU."""
        self._source = source
        self._config = config
        self._global_batch = global_batch
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._pin = pin
        self._block = lru_cache(maxsize=2)(self._checked_block)
        self._epoch_order = lru_cache(maxsize=1)(self._order_of_blocks)
        self._runs = lru_cache(maxsize=2)(self._runs_of_blocks)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._source.rows // self._global_batch)

    def num_samples(self, step: int) -> int:
        """Rows of the global batch of a step; fewer than the global batch size only at the end of an epoch."""
        start = step % self.steps_per_epoch * self._global_batch
        return min(self._global_batch, self._source.rows - start)

    def num_local_samples(self, step: int) -> int:
        """Those of them in this rank's part, where they come before the padding."""
        first, last, _ = self._bounds(step)
        return last - first

    def _bounds(self, step: int) -> tuple[int, int, int]:
        """Where this rank's rows begin and end in the global batch of a step, and how many they are with padding."""
        num_samples = self.num_samples(step)
        local_rows = -(-num_samples // self._world_size)
        first = min(self._rank * local_rows, num_samples)
        return first, min(first + local_rows, num_samples), local_rows

    def batches(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This rank's part of the global batches of steps [start, stop), read ahead; ends its thread when closed.

        Raises DataError for a bad value, when the step comes that needs it.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        try:
            pending: deque[Future[Batch]] = deque()
            for step in range(start, stop):
                # Several at a time: a thread that is woken in every step takes turns with the one that trains.
                if len(pending) <= _AHEAD // 2:
                    wanted = range(step + len(pending), min(step + _AHEAD, stop))
                    pending.extend(pool.submit(self._ready, further) for further in wanted)
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ready(self, step: int) -> Batch:
        batch = self.batch(step)
        return batch.pin_memory() if self._pin else batch

    def nothing(self) -> Batch:
        """A batch of one empty row of weight 0, which leaves every weight as it is."""
        return self._collate(pad(self._rows(0, 0, 0), 1), 0, 0.0)

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of a step. Raises DataError for a bad value."""
        epoch, index = divmod(step, self.steps_per_epoch)
        first, last, local_rows = self._bounds(step)
        start = index * self._global_batch
        rows = self._rows(epoch, start + first, start + last)
        return self._collate(pad(rows, local_rows), last - first, self._world_size / self.num_samples(step))

    def _rows(self, epoch: int, first: int, last: int) -> Block:
        """Rows [first, last) of the order of an epoch."""
        blocks, ends = self._epoch_order(epoch)
        place = min(int(np.searchsorted(ends, first, side="right")), len(blocks) - 1)
        if first == last:  # no rows for this rank
            return gather([(self._block(int(blocks[place])), 0, 0)])
        parts: list[tuple[Block, int, int]] = []
        while first < last:
            begin = int(ends[place - 1]) if place else 0
            stop = min(last, int(ends[place]))
            runs = self._runs(epoch, place // _DRAWN_AT_ONCE)[place % _DRAWN_AT_ONCE]
            block = self._block(int(blocks[place]))
            parts += [(block, *part) for part in _part(runs, first - begin, stop - begin)]
            first, place = stop, place + 1
        return gather(parts)

    def _order_of_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in the order of an epoch, and the position in that order at which each one ends."""
        block_rows, rows = self._source.block_rows, self._source.rows
        num_blocks = -(-rows // block_rows)
        blocks = np.arange(num_blocks)
        if self._seed is not None:
            blocks = np.random.default_rng([self._seed, epoch]).permutation(num_blocks)
        return blocks, np.cumsum(np.minimum(block_rows, rows - blocks * block_rows))

    def _runs_of_blocks(self, epoch: int, group: int) -> list[list[tuple[int, int]]]:
        """The runs of rows [start, stop) that make the order in some blocks, which follow each other in an epoch.

        Why runs: docs/decisions/0004. Of several blocks at once, for on its own, between two reads, a generator is out
        of every cache, and takes as long as 400 rows.
        """
        block_rows, rows = self._source.block_rows, self._source.rows
        blocks, _ = self._epoch_order(epoch)
        found = []
        for block in blocks[group * _DRAWN_AT_ONCE : (group + 1) * _DRAWN_AT_ONCE].tolist():
            size = min(block_rows, rows - block * block_rows)
            if self._seed is None:
                found.append([(0, size)])
                continue
            rng = np.random.default_rng([self._seed, epoch, block])
            cuts = [0, *range(int(rng.integers(1, _RUN_ROWS + 1)), size, _RUN_ROWS), size]
            found.append([(cuts[i], cuts[i + 1]) for i in rng.permutation(len(cuts) - 1)])
        return found

    def _checked_block(self, block: int) -> Block:
        rows = self._source.read(block)
        check(rows, self._config.sparse, self._config.dense, f"data {self._source_name()}, block {block}")
        return rows

    def _source_name(self) -> str:
        return self._config.path or str(self._config.kind)

    def _collate(self, block: Block, num_real: int, weight: float) -> Batch:
        names = [feature.name for feature in self._config.sparse]
        lengths = np.concatenate([block.bags[name][0] for name in names], dtype=np.int32, casting="same_kind")
        values = np.concatenate([block.bags[name][1] for name in names], dtype=np.int64)
        weights_B = np.zeros(len(block), dtype=np.float32)
        weights_B[:num_real] = weight
        return Batch(
            dense_BF=torch.from_numpy(np.ascontiguousarray(block.dense_NF, dtype=np.float32)),
            sparse=KeyedJaggedTensor(
                keys=names,
                values=torch.from_numpy(values),
                lengths=torch.from_numpy(lengths),
            ),
            labels_B=torch.from_numpy(block.labels_N.astype(np.float32)),
            weights_B=torch.from_numpy(weights_B),
        )


def _part(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The runs that hold rows [first, last) of their order, the outer ones cut to size."""
    parts, begin = [], 0
    for start, stop in runs:
        end = begin + stop - start
        if begin < last and first < end:
            parts.append((start + max(first - begin, 0), stop - max(end - last, 0)))
        begin = end
    return parts


class ArrowSplit:
    """One split of a prepared data set, memory-mapped."""

    def __init__(self, path: Path, index: Index, split: str) -> None:
        self.block_rows = index.block_rows
        self.rows = index.splits[split].rows
        self._path = path
        self._sparse = list(index.sparse_rows)
        self._batches: list[tuple[pa.RecordBatchFileReader, int]] = []
        for file in index.splits[split].files:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path / file.name)))
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(f"{path / file.name}: not an Arrow file ({error}); prepare the data again") from error
            if (found := reader.num_record_batches) != (wanted := -(-file.rows // self.block_rows)):
                raise DataError(
                    f"{path / file.name}: {found} record batches, expected {wanted}, for {file.rows} rows of "
                    f"{self.block_rows} each; prepare the data set again"
                )
            if missing := {"label", "dense", *self._sparse} - set(reader.schema.names):
                raise DataError(f"{path / file.name}: no column {sorted(missing)}; prepare the data set again")
            self._batches += [(reader, i) for i in range(found)]

    def read(self, block: int) -> Block:
        """Rows [block * block_rows, ...) of the split."""
        reader, index = self._batches[block]
        try:
            batch = reader.get_batch(index)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path}, block {block}: cannot be read ({error}); prepare it again") from error
        expected = min(self.block_rows, self.rows - block * self.block_rows)
        if len(batch) != expected:
            raise DataError(
                f"{self._path}, block {block}: {len(batch)} rows, the index says {expected}; prepare it again"
            )
        for name in ("label", "dense", *self._sparse):
            column = batch.column(name)
            nested = pa.types.is_nested(column.type)
            if column.null_count or (nested and column.flatten().null_count):
                raise DataError(
                    f"{self._path}, block {block}: column {name!r} has a null, expected none; prepare it again"
                )
        labels_N = batch.column("label").to_numpy(zero_copy_only=False)
        dense = batch.column("dense")
        dense_NF = dense.flatten().to_numpy(zero_copy_only=False).reshape(len(labels_N), -1)
        return Block(labels_N=labels_N, dense_NF=dense_NF, bags={n: _bag(batch.column(n)) for n in self._sparse})


class Rehearsed:
    """The first rows of a split, its ids folded from the tables that it was prepared for into smaller ones."""

    def __init__(self, source: Source, tables: dict[str, tuple[int, int]], *, rows: int) -> None:
        """`tables` has the rows that each feature was prepared for, and those that it has here."""
        self.rows, self.block_rows = min(source.rows, rows), source.block_rows
        self._source, self._tables = source, tables

    def read(self, block: int) -> Block:
        """Rows [block * block_rows, ...) of the split; bad ids stay bad, for `check` to find."""
        whole = self._source.read(block)
        part = gather([(whole, 0, min(len(whole), self.rows - block * self.block_rows))])
        bags = {}
        for name, (lengths_N, ids) in part.bags.items():
            real, small = self._tables[name]
            bags[name] = lengths_N, np.where((ids >= 0) & (ids < real), ids % small, ids)
        return replace(part, bags=bags)


def _bag(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        return np.diff(offsets).astype(np.int32), column.flatten().to_numpy(zero_copy_only=False)
    return one_each(len(column)), column.to_numpy(zero_copy_only=False)


def open_checked(config: DataConfig, here: Process, beat: Callable[[], None]) -> dict[str, Source]:
    """As `open_splits`, after all ranks together have read every file and compared its checksum; `beat` after each.

    Collective: every rank, and all raise the first DataError that one of them has.
    """
    error = None
    splits: dict[str, Source] = {}
    try:
        splits = open_splits(config)
        if config.path and config.verify_checksums and config.kind is not DataKind.synthetic:
            for file in read_index(Path(config.path)).files()[here.env.rank :: here.env.world_size]:
                check_sha256(Path(config.path) / file.name, file)
                beat()
    except DataError as found:
        error = str(found)
    errors = here.gather(error) or []
    if first := here.agree(next((e for e in errors if e), None)):
        raise DataError(first)
    return splits


def open_splits(config: DataConfig) -> dict[str, Source]:
    """The non-empty splits of the configured data set by name. Raises DataError when it does not fit the configuration.

    `train` and `test` are always there; `val` is optional.
    """
    splits: dict[str, Source]
    if config.kind is DataKind.synthetic:
        splits = {name: Synthetic(config, name) for name in ("train", "val", "test")}
    else:
        if config.path is None:
            raise DataError("data.path=null: expected a data set made by python -m rechpc.prepare")
        path = Path(config.path)
        index = read_index(path)
        check_index(index, config)
        splits = {name: ArrowSplit(path, index, name) for name, split in index.splits.items() if split.rows}
        if config.rehearsal_rows:
            tables = {f.name: (index.sparse_rows[f.name], f.rows) for f in config.sparse}
            splits = {name: Rehearsed(s, tables, rows=config.rehearsal_rows) for name, s in splits.items()}
    splits = {name: source for name, source in splits.items() if source.rows}
    for name in ("train", "test"):
        if name not in splits:
            raise DataError(f"data {config.path or config.kind}: the {name} split is empty or missing")
    return splits

"""The model of a checkpoint as safetensors files that any framework reads, table by table.

Streams: of a table, no more than a block of rows is in memory at a time, which the safetensors package cannot do; its
format is a JSON header and the raw values (https://github.com/huggingface/safetensors).
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rechpc.errors import CheckpointError, ConfigError
from rechpc.manifest import DTYPE_BYTES, Manifest, Tensor
from rechpc.rundir import fsync_directory, write_json

_TABLE = re.compile(r".*\.embedding_bags\.(.+)\.weight")
_BLOCK_BYTES = 64 << 20
_DTYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "float16": "F16", "bfloat16": "BF16",
    "int8": "I8", "uint8": "U8",
}  # fmt: skip

Values = np.ndarray[Any, np.dtype[np.void]]  # opaque: numpy has no bfloat16


def size_bytes(found: Manifest) -> int:
    """Bytes of the values that an export holds."""
    return sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in _weights(found).values())


def write(
    source: Path, found: Manifest, target: Path, *, max_file_bytes: int, on_write: Callable[[int], None]
) -> list[str]:
    """Export the checkpoint at `source` into the new directory `target`, which appears when all of it is there.

    Returns the names of its files. Raises ConfigError where `target` is in the way, CheckpointError for a hole.
    """
    temporary = target.with_name(target.name + ".tmp")
    try:
        if target.exists():
            raise ConfigError(f"{target}: is there already; choose another directory")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
        try:
            _write_all(source, found, temporary, max_file_bytes, on_write)
            temporary.rename(target)
            fsync_directory(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror}") from error
    return sorted(path.name for path in target.iterdir())


def _weights(found: Manifest) -> dict[str, Tensor]:
    return {n: t for n, t in found.tensors.items() if "/" not in n}  # optimizer and random states have one


def _write_all(
    source: Path, found: Manifest, target: Path, max_file_bytes: int, on_write: Callable[[int], None]
) -> None:
    files = {f.name: np.memmap(source / f.name, dtype=np.uint8, mode="r") for f in found.files if f.size_bytes}
    weights = _weights(found)
    tables = {match[1]: tensor for name, tensor in weights.items() if (match := _TABLE.fullmatch(name))}
    rest = {name.removeprefix("model."): t for name, t in weights.items() if not _TABLE.fullmatch(name)}
    index = _features(found)
    for name, table in tables.items():
        rows, row_bytes = table.shape[0], math.prod(table.shape[1:]) * DTYPE_BYTES[table.dtype]
        step = max(1, max_file_bytes // row_bytes)
        starts = range(0, rows, step)
        for number, first in enumerate(starts, start=1):
            suffix = f"-{number:05d}-of-{len(starts):05d}" if len(starts) > 1 else ""
            stop = min(first + step, rows)
            _write_file(target / f"{name}{suffix}.safetensors", {name: (table, first, stop)}, files, on_write)
            piece = {"file": f"{name}{suffix}.safetensors", "first_row": first, "rows": stop - first}
            index[name]["files"].append(piece)
    whole = {name: (tensor, 0, tensor.shape[0] if tensor.shape else 1) for name, tensor in rest.items()}
    _write_file(target / "dense.safetensors", whole, files, on_write)
    facts = {"format": 1, "step": found.step, "dense": found.made_for["data"]["dense"]}
    write_json(target / "model.json", {**facts, "model": found.made_for["model"], "tables": index})


def _features(found: Manifest) -> dict[str, dict[str, Any]]:
    """The tables in the order of the model, each with the features that look it up."""
    tables: dict[str, dict[str, Any]] = {}
    for feature in found.made_for["data"]["sparse"]:
        fresh = {"pooling": feature["pooling"], "features": [], "files": []}
        table = tables.setdefault(feature["table"] or f"t_{feature['name']}", fresh)
        table["features"].append(feature["name"])
    return tables


def _write_file(
    path: Path, tensors: dict[str, tuple[Tensor, int, int]], files: dict[str, Any], on_write: Callable[[int], None]
) -> None:
    """Write rows [first, stop) of tensors as one safetensors file, durably."""
    header, position = {}, 0
    for name, (tensor, first, stop) in tensors.items():
        shape = [stop - first, *tensor.shape[1:]] if tensor.shape else []
        end = position + math.prod(shape) * DTYPE_BYTES[tensor.dtype]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (tensor, first, stop) in tensors.items():
            for block in _blocks(name, tensor, first, stop, files):
                file.write(block.tobytes())
                on_write(block.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _blocks(name: str, tensor: Tensor, first: int, stop: int, files: dict[str, Any]) -> Iterator[Values]:
    """Rows [first, stop) of a tensor, a block at a time, put together from the parts that hold them."""
    opaque = np.dtype(f"V{DTYPE_BYTES[tensor.dtype]}")
    shape = tensor.shape or (1,)
    rows = max(1, _BLOCK_BYTES // max(1, math.prod(shape[1:]) * opaque.itemsize))
    for begin in range(first, stop, rows):
        end, filled = min(begin + rows, stop), 0
        block = np.empty((end - begin, *shape[1:]), opaque)
        for part in tensor.parts:
            offset, part_shape = part.offset or (0,), part.shape or (1,)
            low, high = max(begin, offset[0]), min(end, offset[0] + part_shape[0])
            if low >= high:
                continue
            size = math.prod(part_shape) * opaque.itemsize
            values = files[part.file][part.byte : part.byte + size].view(opaque).reshape(part_shape)
            columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], part_shape[1:], strict=True))
            block[(slice(low - begin, high - begin), *columns)] = values[low - offset[0] : high - offset[0]]
            filled += (high - low) * math.prod(part_shape[1:])
        if filled != block.size:
            raise CheckpointError(f"{name}: {block.size - filled} values of rows {begin} to {end - 1} are missing")
        yield block

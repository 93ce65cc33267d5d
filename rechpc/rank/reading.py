"""How the values of a checkpoint get from its files into tensors: every byte is read once and checked as it comes.

What a rank needs of the files that it checks goes straight to its place; a rank that needs more, as after a change of
plan or world size, maps the other files once all of them are known to be whole. Must not know what the tensors mean.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from rechpc.errors import CheckpointError
from rechpc.manifest import Block, File, Manifest

_CHUNK_BYTES = 4 << 20  # small enough to be hashed while it is in a cache


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a named tensor that this rank holds; `tensor` is the live memory."""

    name: str
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]  # of this part in the whole
    tensor: torch.Tensor
    owned: bool  # this rank writes it; the others hold a replica

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Copy:
    """What goes from a saved block to a part: where it is in the block, and its place in the part."""

    block: Block
    source: tuple[slice, ...]
    target: torch.Tensor  # a view of the part

    @property
    def is_direct(self) -> bool:
        """Whether the whole block goes to one piece of host memory."""
        return tuple(self.target.shape) == self.block.shape and self.target.is_contiguous() and self.target.is_cpu


def copies(path: Path, found: Manifest, wanted: list[Part]) -> list[Copy]:
    """What to copy to fill all parts. Raises CheckpointError where the checkpoint does not have all of one."""
    return [copy for part in wanted for copy in _copies_of(path, found, part)]


def _copies_of(path: Path, found: Manifest, part: Part) -> list[Copy]:
    saved = found.tensors[part.name]
    if saved.dtype != part.dtype or saved.shape != part.shape:
        raise CheckpointError(
            f"{path}: {part.name}: saved as {saved.dtype} {list(saved.shape)}, expected {part.dtype} {list(part.shape)}"
        )
    result, filled = [], 0
    end = [o + n for o, n in zip(part.offset, part.tensor.shape, strict=True)]
    for block in saved.parts:
        begin = [max(a, b) for a, b in zip(part.offset, block.offset, strict=True)]
        stop = [min(a, o + n) for a, o, n in zip(end, block.offset, block.shape, strict=True)]
        if any(b >= s for b, s in zip(begin, stop, strict=True)):
            continue
        source = tuple(slice(b - o, s - o) for b, s, o in zip(begin, stop, block.offset, strict=True))
        target = part.tensor[tuple(slice(b - o, s - o) for b, s, o in zip(begin, stop, part.offset, strict=True))]
        result.append(Copy(block, source, target))
        filled += target.numel()
    missing = part.tensor.numel() - filled
    if missing:
        raise CheckpointError(
            f"{path}: {part.name}: {missing} of {part.tensor.numel()} values are not in the checkpoint"
        )
    return result


def check(path: Path, files: list[File], wanted: list[Copy]) -> list[Copy]:
    """Read files whole, and on the way do the direct copies from them; the copies that are left to do.

    Raises CheckpointError with what is wrong with a file; then what was copied may be wrong too.
    """
    names = {file.name for file in files}
    direct = {(c.block.file, c.block.byte): c for c in wanted if c.is_direct and c.block.file in names}
    for file in files:
        targets = [(byte, copy.target) for (name, byte), copy in sorted(direct.items()) if name == file.name]
        try:
            _stream(path / file.name, file, targets)
        except OSError as error:
            raise CheckpointError(f"{file.name}: {error.strerror}") from error
    return [c for c in wanted if direct.get((c.block.file, c.block.byte)) is not c]


def _stream(path: Path, file: File, targets: list[tuple[int, torch.Tensor]]) -> None:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != file.size_bytes:
            raise CheckpointError(f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}")
        for memory in _memory(file.size_bytes, targets):
            done = 0
            while done < len(memory):
                count = stream.readinto(memory[done:])
                if not count:
                    raise CheckpointError(f"{file.name} ended while it was read")
                done += count
            digest.update(memory)
    if digest.hexdigest() != file.xxh3_128:
        raise CheckpointError(f"{file.name} does not have its checksum")


def _memory(size_bytes: int, targets: list[tuple[int, torch.Tensor]]) -> Iterator[memoryview]:
    """Where each chunk of a file goes: to its target or, between targets, to memory that nobody looks at."""
    scratch = memoryview(bytearray(min(_CHUNK_BYTES, size_bytes)))
    position = 0
    for byte, target in targets:
        yield from (scratch[: min(_CHUNK_BYTES, byte - b)] for b in range(position, byte, _CHUNK_BYTES))
        memory = memoryview(target.reshape(-1).view(torch.uint8).numpy())
        yield from (memory[b : b + _CHUNK_BYTES] for b in range(0, len(memory), _CHUNK_BYTES))
        position = byte + len(memory)
    yield from (scratch[: min(_CHUNK_BYTES, size_bytes - b)] for b in range(position, size_bytes, _CHUNK_BYTES))


def fill(path: Path, wanted: list[Copy]) -> None:
    """Do copies from files that were checked."""
    # Copied on write only because torch has no read-only tensors.
    files: dict[str, Any] = {
        name: np.memmap(path / name, dtype=np.uint8, mode="c") for name in {c.block.file for c in wanted}
    }
    for copy in wanted:
        block, dtype = copy.block, copy.target.dtype
        size_bytes = math.prod(block.shape) * dtype.itemsize
        raw = torch.from_numpy(files[block.file][block.byte : block.byte + size_bytes])
        copy.target.copy_(raw.view(dtype).reshape(block.shape)[copy.source])

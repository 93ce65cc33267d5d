"""The manifest of a checkpoint: what is in it, how it becomes complete, how it is verified, and how it goes away.

docs/checkpoints.md describes the format. Standard library only, for the login node reads checkpoints too. Nothing
that a file says is trusted before it was checked here: a checkpoint may come from anywhere.
"""

import concurrent.futures
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rechpc.errors import CheckpointError
from rechpc.rundir import RunDir, fsync_directory, write_text

logger = logging.getLogger(__name__)

NAME = "manifest.json"
DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
RNG = "rng/"
"""First part of the names of random states, one for each rank that saved."""

_FORMAT = 2
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file of raw little-endian values."""

    name: str
    size_bytes: int
    sha256: str  # of `verify`; needs nothing but a standard library
    xxh3_128: str  # of a restore: several times as fast as the disk


@dataclass(frozen=True, slots=True)
class Block:
    """Where a part of a tensor is: in which file, from which byte on, and its place in the whole tensor."""

    file: str
    byte: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor and the blocks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Block]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All of a checkpoint but the values."""

    step: int
    optimizer_step: int  # what dense optimizers count; another than `step` after a warm start with their state
    made_for: dict[str, Any]  # what must be the same for the state to mean the same
    made_by: dict[str, Any]  # attempts, versions, code and the rest of the configuration
    state: dict[str, Any]  # of the run, as its loop wants it back
    files: list[File]
    tensors: dict[str, Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError with what is wrong with it."""
    try:
        raw = json.loads((path / NAME).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{NAME} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{NAME} has format {found!r}, expected {_FORMAT}")
    if raw.pop("sha256", None) != _digest(raw):
        raise CheckpointError(f"{NAME} does not have its checksum")
    try:
        return _parse(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{NAME} is not what format {_FORMAT} says: {type(error).__name__} {error}") from error


def _parse(raw: dict[str, Any]) -> Manifest:
    files = [File(**file) for file in raw["files"]]
    sizes = {file.name: _natural(file.size_bytes) for file in files}
    for name in sizes:
        if not re.fullmatch(r"rank-\d{5,8}\.bin", name):  # a path, perhaps to elsewhere
            raise ValueError(f"file {name!r}")
    tensors = {}
    for name, tensor in raw["tensors"].items():
        shape = tuple(_natural(n) for n in tensor["shape"])
        blocks = [Block(b["file"], b["byte"], tuple(b["offset"]), tuple(b["shape"])) for b in tensor["parts"]]
        for block in blocks:
            size_bytes = DTYPE_BYTES[tensor["dtype"]] * math.prod(_natural(n) for n in block.shape)
            inside = [_natural(o) + n <= w for o, n, w in zip(block.offset, block.shape, shape, strict=True)]
            if not all(inside) or _natural(block.byte) + size_bytes > sizes[block.file]:
                raise ValueError(f"a part of {name!r} is outside of it or of its file")
        tensors[name] = Tensor(tensor["dtype"], shape, blocks)
    objects: dict[str, Any] = {key: dict(raw[key]) for key in ("made_for", "made_by", "state")}
    counts: dict[str, Any] = {key: _natural(raw[key]) for key in ("step", "optimizer_step")}
    return Manifest(files=files, tensors=tensors, **counts, **objects)


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _digest(raw: dict[str, Any]) -> str:
    """Checksum of a manifest as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def commit(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Give a directory with all its files a manifest and its final name, durably; then look at it again.

    Raises OSError or CheckpointError, and then `final` is what it was.
    """
    raw = {"format": _FORMAT, **asdict(manifest)}
    write_text(temporary / NAME, json.dumps({**raw, "sha256": _digest(raw)}, indent=1) + "\n")
    problem = damage(temporary, sizes_only=True)
    if problem:
        raise CheckpointError(problem)
    if final.exists():  # the same step again, after a restore of an older one
        logger.warning("checkpoint=%s replaced by a new one of the same step", final.name)
        discard(final)
    os.rename(temporary, final)
    fsync_directory(final.parent)


def damage(path: Path, *, sizes_only: bool = False, on_read: Callable[[int], None] | None = None) -> str | None:
    """What is wrong with the checkpoint at `path`, if anything is; `on_read` is told of bytes as they are read."""
    try:
        found = read(path)
        if path.name.startswith("step-") and path.name[5:].isdigit() and int(path.name[5:]) != found.step:
            return f"{NAME} is of step {found.step}"
    except CheckpointError as error:
        return str(error)
    problems = (file_damage(path, file, sizes_only=sizes_only, on_read=on_read) for file in found.files)
    return next((p for p in problems if p), None)


def file_damage(
    path: Path, file: File, *, sizes_only: bool = False, on_read: Callable[[int], None] | None = None
) -> str | None:
    """What is wrong with one file of the checkpoint at `path`, if anything is."""
    try:
        size_bytes = (path / file.name).stat().st_size
        if size_bytes != file.size_bytes:
            return f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}"
        if not sizes_only and _sha256(path / file.name, on_read) != file.sha256:
            return f"{file.name} does not have its checksum"
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return None


def _sha256(path: Path, on_read: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    # Reads the next chunk while a thread hashes the one before.
    with open(path, "rb", buffering=0) as stream, concurrent.futures.ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(digest.update, b"")
        for buffer in itertools.cycle((bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES))):
            count = stream.readinto(buffer)
            hashed.result()
            if not count:
                break
            hashed = beside.submit(digest.update, memoryview(buffer)[:count])
            if on_read:
                on_read(count)
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Remove a checkpoint, at once for every reader; logs what cannot be removed, which is in nobody's way."""
    gone = path.with_name(f"{path.name}.gone.tmp")  # half of it must not look like a damaged one
    try:
        os.rename(path, gone)
    except OSError as error:
        logger.warning("path=%s not removed: %s", path, error.strerror)
        return
    remove(gone)


def remove(path: Path) -> None:
    """Remove a directory that has no final name, if it is there; logs why it cannot."""

    def tell(_: object, name: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            logger.warning("path=%s not removed: %s", name, info[1])

    shutil.rmtree(path, onerror=tell)


def locate(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run whose manifest and sizes are right.

    Raises CheckpointError when there is none.
    """
    if (path / NAME).is_file():
        return path
    run = RunDir(path)
    for step in run.committed_steps():
        if damage(run.checkpoint_path(step), sizes_only=True) is None:
            return run.checkpoint_path(step)
    raise CheckpointError(f"{path}: expected a checkpoint, or a run directory with one that can be read")


def best_step(run: RunDir, metric: str) -> int | None:
    """The committed step with the best value of a metric of metrics.jsonl: the highest AUC, the lowest of others."""
    scores = {r["step"]: r[metric] for r in run.metrics() if r.get(metric) is not None}
    steps = [step for step in run.committed_steps() if step in scores]
    return max(steps, key=lambda step: scores[step] * (1 if metric.endswith("auc") else -1), default=None)


def kept_for(run: RunDir, *, newest: int, keep: int, keep_every: int, best: int | None) -> dict[int, str]:
    """Committed steps up to `newest` that a retention policy keeps, each with the reason.

    Damaged ones do not count towards `keep`. What is newer than `newest` was skipped at a restore and is left alone.
    """
    steps = [step for step in run.committed_steps() if step <= newest]
    reasons: dict[int, str] = {}
    for step in steps:
        if len(reasons) == keep:
            break
        if damage(run.checkpoint_path(step), sizes_only=True) is None:
            reasons[step] = "newest"
    for step in steps:
        if step == best:
            reasons.setdefault(step, "best")
        elif keep_every and step % keep_every == 0:
            reasons.setdefault(step, "every")
    return reasons


def retire(run: RunDir, kept: dict[int, str], *, newest: int) -> None:
    """Remove the committed checkpoints up to `newest` that are not kept; a damaged one is named as it goes."""
    for step in run.committed_steps():
        if step > newest or step in kept:
            continue
        path = run.checkpoint_path(step)
        problem = damage(path, sizes_only=True)
        if problem:
            logger.warning("checkpoint=%s removed, it was damaged: %s", path.name, problem)
        discard(path)

"""Checkpoints: a directory that is complete or not there, and that any world size and plan can read.

Tensors are stored by name and place in the whole, so a table's shards of one plan can be read as the shards of
another. `docs/decisions/0001-checkpoint-format.md` says why this is not torch.distributed.checkpoint.

    step-000000500/
      manifest.json        tensors (dtype, shape, and for each part its file, byte offset and place), files with
                           size and sha256, and the state of the run as JSON
      rank-00000.bin       the parts that rank 0 wrote, raw little-endian bytes one after the other

Nothing is pickled. All tensors of a step are read and written by every rank together.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor

from rechpc.config import RunConfig
from rechpc.errors import CheckpointError
from rechpc.rank.optim import Optimizers
from rechpc.rank.process import Process, seed
from rechpc.rank.sharding import local_shards
from rechpc.rundir import RunDir, fsync_directory, read_json, write_json

logger = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 16 << 20
_RNG = "rng/"
# The second moment has one name in every plan: FBGEMM calls it momentum1, torch.optim sum.
_STATE_NAMES = {"momentum1": "sum"}

State = dict[str, Any]  # what the loop wants back, plain JSON


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a named tensor that this rank holds; `tensor` is the live memory."""

    name: str
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]  # of this part in the whole
    tensor: torch.Tensor
    owned: bool  # this rank writes it; the others hold a replica


def save(
    run: RunDir, step: int, state: State, model: DistributedModelParallel, optimizers: Optimizers,
    config: RunConfig, process: Process,
) -> None:  # fmt: skip
    """Write and commit the checkpoint of a step, then drop the oldest ones over `checkpoint.keep`.

    Collective: every rank. Raises CheckpointError on every rank when any of them cannot write; then nothing is
    committed and the earlier checkpoints are as they were.
    """
    final = run.checkpoint_path(step)
    temporary = final.with_name(final.name + ".tmp")
    _agree_on_failure(process, _empty_directory(temporary) if process.is_main else None, step)
    try:
        written: dict[str, Any] = _write_parts(
            temporary / f"rank-{process.env.rank:05d}.bin", model, optimizers, process
        )
    except OSError as error:
        written = {"error": f"{temporary}/rank-{process.env.rank:05d}.bin: {error.strerror}"}
    everything = process.gather(written)
    failure = None
    if everything is not None:
        errors = [w["error"] for w in everything if "error" in w]
        try:
            if errors:
                raise OSError(errors[0])
            _commit(temporary, final, _manifest(everything, step, state, config))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            failure = str(error)
    _agree_on_failure(process, failure, step)
    if process.is_main:
        for old in run.committed_steps()[config.checkpoint.keep :]:
            # What cannot be removed is in nobody's way; the save itself is committed.
            shutil.rmtree(run.checkpoint_path(old), onerror=_warn_not_removed)


def _empty_directory(path: Path) -> str | None:
    """Make an empty directory; what is in the way, if anything is."""
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _agree_on_failure(process: Process, failure: str | None, step: int) -> None:
    """Raise CheckpointError on every rank when rank 0 passes a failure."""
    failure = process.agree(failure)
    if failure:
        raise CheckpointError(f"step {step}: checkpoint not written: {failure}")


def _warn_not_removed(function: object, path: str, info: object) -> None:  # noqa: ARG001
    logger.warning("path=%s not removed: %s", path, info)


def restore(
    run: RunDir, model: DistributedModelParallel, optimizers: Optimizers, config: RunConfig, process: Process
) -> State | None:
    """Load the newest checkpoint that verifies, and return its state; None where the run has none.

    Collective: every rank. Torn ones are removed, damaged ones are named and skipped. Raises CheckpointError on
    every rank when the run has checkpoints but none that can be read, when the run's configuration is not the one
    that was saved, or when a tensor would be left unset or ignored.
    """
    if process.is_main:
        for torn in run.checkpoints_path.glob("step-*.tmp"):
            shutil.rmtree(torn)
    steps = process.agree(run.committed_steps() if process.is_main else None)
    for step in steps:
        path = run.checkpoint_path(step)
        manifest, problem = process.agree(_read_manifest(path) if process.is_main else None)
        problem = problem or _first(process, _verify_files(path, manifest, process))
        if problem:
            logger.warning("checkpoint=%s skipped: %s", path.name, problem)
            continue
        failure = _first(process, _load(path, manifest, model, optimizers, config, process))
        if failure:
            raise CheckpointError(f"{path}: {failure}")
        state = manifest["state"]
        assert isinstance(state, dict)
        return state
    if steps:
        raise CheckpointError(
            f"{run.checkpoints_path}: none of {len(steps)} checkpoints can be read; see the log above"
        )
    return None


def parts(model: DistributedModelParallel, optimizers: Optimizers, rank: int) -> Iterator[Part]:
    """Every tensor of the run that this rank holds, by a name that does not depend on the plan."""
    for name, tensor in sorted(model.state_dict().items()):
        yield from _parts_of(name, tensor, rank)
    for optimizer in (optimizers.fused, optimizers.dense, optimizers.replicated):
        if optimizer is None:
            continue
        for name, states in sorted(optimizer.state_dict()["state"].items()):
            for key, tensor in sorted(states.items()):
                short = key.rpartition(".")[2]
                # The step counters of torch.optim equal the step of the checkpoint; `_load` sets them.
                if short != "step":
                    yield from _parts_of(f"{name}/{_STATE_NAMES.get(short, short)}", tensor, rank)
    yield _rng_part(rank)


def _parts_of(name: str, tensor: torch.Tensor | ShardedTensor, rank: int) -> Iterator[Part]:
    sharded = isinstance(tensor, ShardedTensor)
    if not sharded and name.endswith("/sum") and tensor.dim() == 2 and tensor.shape[1] == 1:
        tensor = tensor.view(-1)  # TorchRec's RowWiseAdagrad keeps (rows, 1), FBGEMM's (rows,)
    for offset, local in local_shards(tensor):
        yield Part(name, tuple(tensor.size()), offset, local.detach(), owned=sharded or rank == 0)


def _rng_part(rank: int) -> Part:
    state = torch.get_rng_state()
    return Part(f"{_RNG}{rank}", tuple(state.shape), (0,), state, owned=True)


def _write_parts(
    path: Path, model: DistributedModelParallel, optimizers: Optimizers, process: Process
) -> dict[str, Any]:
    digest, position, entries = hashlib.sha256(), 0, []
    with open(path, "xb") as file:
        for part in parts(model, optimizers, process.env.rank):
            if not part.owned:
                continue
            data = part.tensor.cpu().contiguous()
            if data.is_floating_point() and not torch.isfinite(data).all():
                return {"error": f"{part.name} holds a value that is not finite; training has diverged"}
            entries.append(
                {
                    "name": part.name,
                    "dtype": str(data.dtype).removeprefix("torch."),
                    "shape": part.shape,
                    "part": {"file": path.name, "byte": position, "offset": part.offset, "shape": tuple(data.shape)},
                }
            )
            view = memoryview(data.flatten().view(torch.uint8).numpy())
            for begin in range(0, len(view), _CHUNK_BYTES):
                file.write(view[begin : begin + _CHUNK_BYTES])
                digest.update(view[begin : begin + _CHUNK_BYTES])
            position += len(view)
        file.flush()
        os.fsync(file.fileno())
    return {"file": {"name": path.name, "size_bytes": position, "sha256": digest.hexdigest()}, "parts": entries}


def _manifest(everything: list[dict[str, Any]], step: int, state: State, config: RunConfig) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {}
    for entry in (e for written in everything for e in written["parts"]):
        tensor = tensors.setdefault(entry["name"], {"dtype": entry["dtype"], "shape": entry["shape"], "parts": []})
        tensor["parts"].append(entry["part"])
    return {
        "format": _FORMAT,
        "step": step,
        "made_for": _made_for(config),
        "state": state,
        "files": [written["file"] for written in everything],
        "tensors": tensors,
    }


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    write_json(temporary / _MANIFEST, {**manifest, "sha256": _digest(manifest)})
    fsync_directory(temporary)
    if final.exists():  # the same step again, after a restore of an older one
        shutil.rmtree(final)
    os.rename(temporary, final)
    fsync_directory(final.parent)


def _read_manifest(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest, or what is wrong with it."""
    try:
        manifest = read_json(path / _MANIFEST)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return None, f"{_MANIFEST} cannot be read: {error}"
    if manifest is None:
        return None, f"{_MANIFEST} is missing"
    if manifest.get("format") != _FORMAT:
        return None, f"{_MANIFEST} has format {manifest.get('format')!r}, expected {_FORMAT}"
    if manifest.pop("sha256", None) != _digest(manifest):
        return None, f"{_MANIFEST} does not have its checksum"
    return manifest, None


def _digest(manifest: dict[str, Any]) -> str:
    """Checksum of a manifest as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _verify_files(path: Path, manifest: dict[str, Any], process: Process) -> str | None:
    """What is wrong with the files that this rank checks, if anything is."""
    for file in manifest["files"][process.env.rank :: process.env.world_size]:
        try:
            size = (path / file["name"]).stat().st_size
            if size != file["size_bytes"]:
                return f"{file['name']} has {size} bytes, expected {file['size_bytes']}"
            with open(path / file["name"], "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                    return f"{file['name']} does not have its checksum"
        except OSError as error:
            return f"{file['name']}: {error.strerror}"
    return None


def _first(process: Process, problem: str | None) -> str | None:
    """The first problem of any rank, on all of them."""
    problems = process.gather(problem)
    return process.agree(next((p for p in problems if p), None) if problems is not None else None)  # type: ignore[no-any-return]


def _load(
    path: Path, manifest: dict[str, Any], model: DistributedModelParallel, optimizers: Optimizers, config: RunConfig,
    process: Process,
) -> str | None:  # fmt: skip
    """Fill every tensor of this rank; what would be left unset or ignored, if anything would."""
    changed = _differences(manifest["made_for"], _made_for(config))
    if changed:
        return f"made for another run: {', '.join(changed)} differ; start a new run"
    rank, tensors = process.env.rank, manifest["tensors"]
    wanted = [p for p in parts(model, optimizers, rank) if not p.name.startswith(_RNG)]
    names = process.gather({p.name for p in wanted})
    expected = process.agree(set().union(*names) if names is not None else None)
    saved = {name for name in tensors if not name.startswith(_RNG)}
    if expected != saved:
        return f"not in the checkpoint: {sorted(expected - saved)}; not in this program: {sorted(saved - expected)}"
    files = {f["name"]: np.memmap(path / f["name"], dtype=np.uint8, mode="r") for f in manifest["files"]}
    for part in wanted:
        problem = _fill(part, tensors[part.name], files)
        if problem:
            return problem
    for optimizer in (optimizers.dense, optimizers.replicated):
        for states in optimizer.state.values() if optimizer else ():
            if "step" in states:
                states["step"].fill_(float(manifest["step"]))
    rng = _rng_part(rank)
    if rng.name not in tensors:  # more ranks than were saved
        seed(config.seed, rank, step=manifest["step"])
        return None
    problem = _fill(rng, tensors[rng.name], files)
    torch.set_rng_state(rng.tensor)
    return problem


def _fill(part: Part, saved: dict[str, Any], files: dict[str, np.memmap[Any, np.dtype[np.uint8]]]) -> str | None:
    """Copy what the saved parts hold of this part; what is missing, if anything is."""
    dtype = str(part.tensor.dtype).removeprefix("torch.")
    if saved["dtype"] != dtype or tuple(saved["shape"]) != part.shape:
        return f"{part.name}: saved as {saved['dtype']} {saved['shape']}, expected {dtype} {list(part.shape)}"
    filled = 0
    end = [o + n for o, n in zip(part.offset, part.tensor.shape, strict=True)]
    for source in saved["parts"]:
        begin = [max(a, b) for a, b in zip(part.offset, source["offset"], strict=True)]
        stop = [min(a, o + n) for a, o, n in zip(end, source["offset"], source["shape"], strict=True)]
        if any(b >= s for b, s in zip(begin, stop, strict=True)):
            continue
        count = math.prod(source["shape"])
        raw = files[source["file"]][source["byte"] : source["byte"] + count * part.tensor.element_size()]
        whole = torch.from_numpy(raw.copy()).view(part.tensor.dtype).reshape(source["shape"])
        taken = whole[tuple(slice(b - o, s - o) for b, s, o in zip(begin, stop, source["offset"], strict=True))]
        part.tensor[tuple(slice(b - o, s - o) for b, s, o in zip(begin, stop, part.offset, strict=True))].copy_(taken)
        filled += taken.numel()
    missing = part.tensor.numel() - filled
    return f"{part.name}: {missing} of {part.tensor.numel()} values are not in the checkpoint" if missing else None


def _made_for(config: RunConfig) -> dict[str, Any]:
    """What must be the same for the state to mean the same: not the world size, the plan or where files are."""
    data = asdict(config.data)
    for place in ("source", "path"):
        data.pop(place)
    values = {
        "seed": config.seed,
        "model": asdict(config.model),
        "data": data,
        "optimizer": asdict(config.optimizer),
        "trainer": {"global_batch": config.trainer.global_batch},
    }
    made_for = json.loads(json.dumps(values))
    assert isinstance(made_for, dict)
    return made_for


def _differences(saved: Any, now: Any, key: str = "") -> list[str]:
    """The dotted keys whose values differ."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [d for k in keys for d in _differences(saved.get(k), now.get(k), f"{key}.{k}" if key else k)]
    return [] if saved == now else [key]

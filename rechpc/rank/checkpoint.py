"""What a checkpoint holds: every tensor of a run, written by all ranks and read under any plan and world size.

Tensors are stored by name and place in the whole, so a table's shards of one plan can be read as the shards of
another. Nothing is pickled. `docs/checkpoints.md` describes the format, `docs/decisions/0001-checkpoint-format.md`
says why this is not torch.distributed.checkpoint; `rechpc.manifest` knows the files, `rechpc.rank.saver` when.
"""

import fnmatch
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor

from rechpc import dataset, manifest
from rechpc.choices import DataKind
from rechpc.config import CheckpointConfig, RunConfig
from rechpc.errors import CheckpointError, RechpcError, TrainingError
from rechpc.manifest import RNG, Block, File, Manifest, Tensor
from rechpc.rank import reading, writing
from rechpc.rank.optim import Optimizers
from rechpc.rank.process import Process, seed
from rechpc.rank.reading import Copy, Part
from rechpc.rank.sharding import local_shards
from rechpc.rundir import RunDir

logger = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
# The second moment has one name in every plan: FBGEMM calls it momentum1, torch.optim sum.
_STATE_NAMES = {"momentum1": "sum"}

State = dict[str, Any]  # what the loop wants back, plain JSON


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
    return Part(f"{RNG}{rank}", tuple(state.shape), (0,), state, owned=True)


class HostCopy:
    """Host memory for what this rank writes, taken at the first copy and used again for every other.

    Its size is that of the rank's shards and their optimizer state; pinned where they are on a GPU, so that the copy
    runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def of(self, found: list[Part]) -> list[tuple[str, torch.Tensor]]:
        """Copies of the pieces of all parts, finished when this returns."""
        pieces = list(_pieces(found))
        if not self._pieces:
            self._pieces = [torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda) for _, p in pieces]
        for copy, (_, piece) in zip(self._pieces, pieces, strict=True):
            copy.copy_(piece, non_blocking=True)
        if any(piece.is_cuda for _, piece in pieces):
            torch.cuda.current_stream().synchronize()
        return [(name, copy) for copy, (name, _) in zip(self._pieces, pieces, strict=True)]


def _pieces(found: list[Part]) -> Iterator[tuple[str, torch.Tensor]]:
    for part in found:
        flat = part.tensor.contiguous().flatten()
        yield from ((part.name, piece) for piece in flat.split(_PIECE_BYTES // flat.element_size()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What this rank writes of one step; `pieces` are the values of `parts`, flat, in order."""

    step: int
    optimizer_step: int
    state: State
    parts: list[Part]
    pieces: list[tuple[str, torch.Tensor]]


def share(
    step: int, state: State, model: DistributedModelParallel, optimizers: Optimizers, rank: int, host: HostCopy | None
) -> Share:
    """This rank's share of a checkpoint, copied to `host`; without one, live memory that must not change meanwhile."""
    found = [part for part in parts(model, optimizers, rank) if part.owned]
    counters = [int(states["step"]) for states in _dense_states(optimizers) if "step" in states]
    return Share(
        step=step,
        optimizer_step=max(counters, default=step),
        state=state,
        parts=found,
        pieces=host.of(found) if host else list(_pieces(found)),
    )


def _dense_states(optimizers: Optimizers) -> list[dict[str, Any]]:
    both = (optimizers.dense, optimizers.replicated)
    return [states for optimizer in both if optimizer for states in optimizer.state.values()]


def write(run: RunDir, mine: Share, facts: dict[str, Any], process: Process) -> Manifest | None:
    """Write and commit a checkpoint of which every rank has a share; returns the manifest on rank 0.

    Collective: every rank. `facts` are `made_for` and `made_by` of the manifest. Raises on every rank when any of them
    cannot write (CheckpointError) or has a value that is not finite (TrainingError); then nothing is committed, what
    was written is removed, and the earlier checkpoints are as they were.
    """
    final = run.checkpoint_path(mine.step)
    temporary = final.with_name(final.name + ".tmp")
    try:
        _together(process, lambda: _make_empty(temporary) if process.is_main else None)
        written = _together(process, lambda: _write_share(temporary, mine, process.env.rank))
        whole = _manifest(written, mine, facts) if written is not None else None
        _together(process, lambda: manifest.commit(temporary, final, whole) if whole else None)
    except RechpcError:
        if process.is_main:
            manifest.remove(temporary)
        raise
    return whole


def _together(process: Process, action: Callable[[], Any]) -> list[Any] | None:
    """Results of an action by rank, on rank 0; the first failure of any rank is raised on all of them."""
    result, failure = None, None
    try:
        result = action()
    except RechpcError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"{error.filename or 'a file'}: {error.strerror}")
    everything = process.gather((result, failure))
    failure = process.agree(next((f for _, f in everything if f), None) if everything is not None else None)
    if failure:
        raise failure
    return [r for r, _ in everything] if everything is not None else None


def _make_empty(path: Path) -> None:
    manifest.remove(path)
    path.mkdir(mode=0o700)


def _write_share(directory: Path, mine: Share, rank: int) -> tuple[File, list[tuple[str, str, tuple[int, ...], Block]]]:
    """Write a rank's file, durably; what it holds."""
    path = directory / f"rank-{rank:05d}.bin"
    try:
        file = writing.write(path, _finite(mine))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    entries, position = [], 0
    for part in mine.parts:
        block = Block(path.name, position, part.offset, tuple(part.tensor.shape))
        entries.append((part.name, part.dtype, part.shape, block))
        position += part.tensor.numel() * part.tensor.element_size()
    return file, entries


def _finite(mine: Share) -> Iterator[memoryview]:
    """The bytes of a share, each checked while it is on its way into a cache. Raises TrainingError."""
    for name, piece in mine.pieces:
        for chunk in piece.cpu().split(writing.CHUNK_BYTES // piece.element_size()):
            if chunk.is_floating_point() and chunk.numel() and not all(map(math.isfinite, chunk.aminmax())):
                raise TrainingError(f"step {mine.step}: {name} holds a value that is not finite: diverged")
            yield memoryview(chunk.view(torch.uint8).numpy())


def _manifest(written: list[Any], mine: Share, facts: dict[str, Any]) -> Manifest:
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape, block in (entry for _, entries in written for entry in entries):
        tensors.setdefault(name, Tensor(dtype, shape, [])).parts.append(block)
    return Manifest(
        step=mine.step,
        optimizer_step=mine.optimizer_step,
        state=mine.state,
        files=[file for file, _ in written],
        tensors=tensors,
        **facts,
    )


def restore(
    run: RunDir, model: DistributedModelParallel, optimizers: Optimizers, config: RunConfig, process: Process
) -> Manifest | None:
    """Load the newest checkpoint that verifies, and return its manifest; None where the run has none.

    Collective: every rank. Torn ones are removed, damaged ones are named and skipped. Raises CheckpointError on
    every rank when the run has checkpoints but none that can be read, when the run's configuration is not the one
    that was saved, or when a tensor would be left unset or ignored.
    """
    if process.is_main:
        for torn in run.checkpoints_path.glob("step-*.tmp"):
            manifest.remove(torn)
    steps = process.agree(run.committed_steps() if process.is_main else None)
    wanted = [part for part in parts(model, optimizers, process.env.rank) if not part.name.startswith(RNG)]
    for step in steps:
        path = run.checkpoint_path(step)
        try:
            found = _read_manifest(path, process)
        except CheckpointError as error:
            _tell_skipped(path, error)
            continue
        changed = differences(found.made_for, made_for(config))
        if changed:
            raise CheckpointError(f"{path}: made for another run: {', '.join(changed)} differ; start a new run")
        needed = _needed(path, found, wanted, {name for name in found.tensors if not name.startswith(RNG)}, process)
        try:
            _load(path, found, needed, process)
        except CheckpointError as error:
            _tell_skipped(path, error)  # what it left in tensors, the next one overwrites
            continue
        _set_optimizer_step(optimizers, found.optimizer_step)
        _together(process, functools.partial(_restore_rng, path, found, config, process))
        return found
    if steps:
        raise CheckpointError(
            f"{run.checkpoints_path}: none of {len(steps)} checkpoints can be read; see the log above"
        )
    return None


def _tell_skipped(path: Path, error: CheckpointError) -> None:
    logger.warning("checkpoint=%s skipped: %s", path.name, error)


def warm_start(
    config: CheckpointConfig, model: DistributedModelParallel, optimizers: Optimizers, process: Process
) -> tuple[Path, list[str]]:
    """Load what `checkpoint.init_*` selects of another run's checkpoint; which one, and the names.

    Collective: every rank. Raises CheckpointError on every rank when what is selected of the program and of the
    checkpoint is not the same set of tensors.
    """
    source = Path(config.init_from or "")
    located = _together(process, lambda: manifest.locate(source) if process.is_main else None)
    path = process.agree(located and located[0])
    try:
        found = _read_manifest(path, process)
        wanted = [p for p in parts(model, optimizers, process.env.rank) if _selected(p.name, config)]
        saved = {name for name in found.tensors if _selected(name, config)}
        _load(path, found, _needed(path, found, wanted, saved, process), process)
    except CheckpointError as error:
        hint = "name what to leave out in checkpoint.init_exclude, or choose with checkpoint.init_include"
        raise CheckpointError(f"checkpoint.init_from={source}: {error}; {hint}") from error
    if config.init_optimizer:
        _set_optimizer_step(optimizers, found.optimizer_step)
    return path, sorted(name for name in found.tensors if _selected(name, config))


def _selected(name: str, config: CheckpointConfig) -> bool:
    if name.startswith(RNG) or ("/" in name and not config.init_optimizer):
        return False
    included, excluded = (
        any(fnmatch.fnmatchcase(name, p) for p in patterns) for patterns in (config.init_include, config.init_exclude)
    )
    return included and not excluded


def _read_manifest(path: Path, process: Process) -> Manifest:
    """Collective: every rank. Raises CheckpointError on every rank with what is wrong."""
    read = _together(process, lambda: manifest.read(path) if process.is_main else None)
    found = process.agree(read[0] if read is not None else None)
    assert isinstance(found, Manifest)
    return found


def _needed(path: Path, found: Manifest, wanted: list[Part], saved: set[str], process: Process) -> list[Copy]:
    """What fills the parts of this rank from the tensors `saved`.

    Collective: every rank. Raises CheckpointError on every rank when a name or value would be left unset or ignored.
    """
    names = _together(process, lambda: {part.name for part in wanted})
    expected = process.agree(set().union(*names) if names is not None else None)
    if expected != saved:
        raise CheckpointError(
            f"{path}: not in the checkpoint: {sorted(expected - saved)}; not in this program: "
            f"{sorted(saved - expected)}"
        )
    needed: list[Copy] = []
    _together(process, lambda: needed.extend(reading.copies(path, found, wanted)))
    return needed


def _load(path: Path, found: Manifest, needed: list[Copy], process: Process) -> None:
    """Do the copies while every byte of the checkpoint is looked at, by one rank or another.

    Collective: every rank. Raises CheckpointError on every rank with what is wrong with a file.
    """
    mine = found.files[process.env.rank :: process.env.world_size]
    left: list[Copy] = []
    _together(process, lambda: left.extend(reading.check(path, mine, needed)))
    _together(process, lambda: reading.fill(path, left))


def _set_optimizer_step(optimizers: Optimizers, step: int) -> None:
    for states in _dense_states(optimizers):
        if "step" in states:
            states["step"].fill_(float(step))


def _restore_rng(path: Path, found: Manifest, config: RunConfig, process: Process) -> None:
    rng = _rng_part(process.env.rank)
    if rng.name not in found.tensors:  # more ranks than were saved
        seed(config.seed, process.env.rank, step=found.step)
        return
    reading.fill(path, reading.copies(path, found, [rng]))
    try:
        torch.set_rng_state(rng.tensor)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {rng.name}: {error}") from error


def made_for(config: RunConfig) -> dict[str, Any]:
    """What must be the same for the state to mean the same: not the world size, the plan or where files are."""
    data = asdict(config.data)
    for place in ("source", "path"):
        data.pop(place)
    if config.data.kind is not DataKind.synthetic and config.data.path:
        index = Path(config.data.path) / dataset.INDEX_NAME  # it has the checksums of the files
        data["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    values = {
        "seed": config.seed,
        "model": asdict(config.model),
        "data": data,
        "optimizer": asdict(config.optimizer),
        "trainer": {"global_batch": config.trainer.global_batch},
    }
    plain = json.loads(json.dumps(values))  # as it comes back
    assert isinstance(plain, dict)
    return plain


def differences(saved: Any, now: Any, key: str = "") -> list[str]:
    """The dotted keys whose values differ."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [d for k in keys for d in differences(saved.get(k), now.get(k), f"{key}.{k}" if key else k)]
    return [] if saved == now else [key]

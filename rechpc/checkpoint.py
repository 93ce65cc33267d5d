"""`python -m rechpc.checkpoint list|verify|export`: what a run has saved, whether it is whole, the model for others.

list and verify need no more than Python; export needs numpy.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rechpc import manifest, rules
from rechpc.choices import KeepBest
from rechpc.errors import CheckpointError, ConfigError, RechpcError
from rechpc.rundir import RunDir
from rechpc.state import duration

HELP = """
  list RUN_DIR            every checkpoint: step, age, size, ranks that wrote it, what it is kept for, state by sizes
  verify RUN_DIR          read every byte of every checkpoint and compare checksums; also of one checkpoint directory
  export RUN_DIR OUT      the model of the newest intact checkpoint, or of a checkpoint directory, as safetensors:
                          one file a table (several where it is larger than --max-file-gib), dense.safetensors with
                          the rest, model.json with the configuration; docs/checkpoints.md reads it in ten lines

Exit status: 0; 1 where a checkpoint is damaged or there is none; 2 where the command cannot work.
"""
_PROGRESS_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rechpc.checkpoint",
        description="What a run has saved: list it, verify it, export the model." + "\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["list", "verify", "export"])
    parser.add_argument("path", type=Path, metavar="RUN_DIR", help="run directory; verify, export: or a checkpoint")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="export: directory to make")
    parser.add_argument("--step", type=int, help="only this step of the run")
    parser.add_argument("--max-file-gib", type=float, default=4.0, help="export: largest file (default: 4)")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.command == "export"):
        parser.error("export takes RUN_DIR and OUT, list and verify take RUN_DIR alone")
    path = options.path.expanduser().absolute()
    try:
        if options.step is not None:
            path = _of_step(path, options.step)
        if options.command == "list":
            return _list(RunDir.open(path))
        if options.command == "verify":
            return _verify(path)
        return _export(path, options.out.expanduser().absolute(), options.max_file_gib)
    except RechpcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _of_step(path: Path, step: int) -> Path:
    run = RunDir.open(path)
    if step not in run.committed_steps():
        raise ConfigError(f"--step {step}: {path} has {_known(run)}")
    return run.checkpoint_path(step)


def _known(run: RunDir) -> str:
    return "the steps " + ", ".join(map(str, run.committed_steps())) if run.committed_steps() else "no checkpoint"


def _list(run: RunDir) -> int:
    steps = run.committed_steps()
    if not steps:
        print(f"{run.path}: no checkpoint")
        return 1
    policy = rules.load(run.config_path).checkpoint
    best = None if policy.keep_best is KeepBest.none else manifest.best_step(run, policy.keep_best)
    kept = manifest.kept_for(run, newest=steps[0], keep=policy.keep, keep_every=policy.keep_every, best=best)
    print(f"{'step':>12} {'age':>9} {'size':>11} {'ranks':>6} {'kept as':8} state")
    any_damaged = False
    for step in steps:
        path = run.checkpoint_path(step)
        problem = manifest.damage(path, sizes_only=True)
        any_damaged |= problem is not None
        age = duration(max(0.0, time.time() - path.stat().st_mtime))
        size, ranks = "", ""
        if problem is None:
            found = manifest.read(path)
            size, ranks = f"{found.size_bytes / (1 << 20):,.1f} MiB", str(len(found.files))
        print(f"{step:>12,} {age:>9} {size:>11} {ranks:>6} {kept.get(step, ''):8} {problem or 'complete'}")
    return 1 if any_damaged else 0


def _verify(path: Path) -> int:
    checkpoints = [path]
    if not (path / manifest.NAME).exists() and not path.name.startswith("step-"):
        run = RunDir.open(path)
        checkpoints = [run.checkpoint_path(step) for step in run.committed_steps()]
    if not checkpoints:
        raise CheckpointError(f"{path}: no checkpoint")
    sizes = [sum(f.stat().st_size for f in c.glob("*.bin")) for c in checkpoints]
    progress = _Progress(sum(sizes), "verified")
    any_damaged = False
    for checkpoint in checkpoints:
        problem = manifest.damage(checkpoint, on_read=progress.add)
        progress.clear()
        any_damaged |= problem is not None
        print(f"{checkpoint.name}: {problem or 'every checksum is right'}")
    return 1 if any_damaged else 0


def _export(path: Path, out: Path, max_file_gib: float) -> int:
    try:
        from rechpc import export  # noqa: PLC0415 - list and verify run where there is no numpy
    except ImportError as error:
        raise ConfigError(f"export needs {error.name}; install it with pip install numpy") from error
    if max_file_gib <= 0:
        raise ConfigError(f"--max-file-gib {max_file_gib:g}: expected more than 0")
    source = manifest.locate(path)
    found = manifest.read(source)
    progress = _Progress(found.size_bytes, "verified")
    problem = manifest.damage(source, on_read=progress.add)
    progress.clear()
    if problem:
        raise CheckpointError(f"{source}: {problem}; choose another with --step")
    progress = _Progress(export.size_bytes(found), "written")
    files = export.write(source, found, out, max_file_bytes=int(max_file_gib * (1 << 30)), on_write=progress.add)
    progress.clear()
    print(f"step {found.step:,}: {len(files)} files in {out}")
    return 0


class _Progress:
    """A line on a terminal that says how far a long read or write has come."""

    def __init__(self, total_bytes: int, verb: str) -> None:
        self._total_bytes, self._verb, self._done_bytes, self._shown_s = total_bytes, verb, 0, time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """So many bytes more."""
        self._done_bytes += count
        if self._is_terminal and time.monotonic() - self._shown_s > _PROGRESS_S:
            self._shown_s = time.monotonic()
            share = self._done_bytes / max(1, self._total_bytes)
            print(f"\r{self._verb} {self._done_bytes / (1 << 30):,.2f} GiB, {share:.0%} ", end="", file=sys.stderr)

    def clear(self) -> None:
        """Make room for other output."""
        if self._is_terminal:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head`
        os._exit(0)

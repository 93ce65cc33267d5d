"""Disks that are full, read-only or forbidden while a run saves itself: what is committed stays, training goes on."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rechpc import manifest
from rechpc.config import RunConfig
from rechpc.errors import CheckpointError
from rechpc.rules import dump
from rechpc.rundir import Outcome, RunDir, write_text
from tests.configs import tiny
from tests.distributed.trainer import attempt_in_process, trainer

SIZE = 1_500_000  # two checkpoints of half a megabyte, and not a third
NOBODY = 65534


def mount(path: Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)], check=True, timeout=30)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mount(path, f"size={SIZE}")
    except (OSError, subprocess.CalledProcessError):
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("needs to mount a tmpfs: run it as root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=30)


@pytest.fixture
def disk_with_quota(tmp_path) -> Iterator[Path]:
    """A file system that counts what is in it; btrfs, whose quotas hold for root too."""
    path, image = tmp_path / "disk", tmp_path / "image"
    path.mkdir()
    with open(image, "wb") as file:
        file.truncate(160 << 20)
    commands = [["mkfs.btrfs", "-q", image], ["mount", "-o", "loop", image, path], ["btrfs", "quota", "enable", path]]
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        yield path
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no btrfs to be had here: {getattr(error, 'stderr', None) or error}")
    finally:
        subprocess.run(["umount", "--lazy", path], check=False, timeout=30)


@contextlib.contextmanager
def full(run: RunDir) -> Iterator[None]:
    filler = run.path / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(run: RunDir) -> Iterator[None]:
    disk = run.path.parents[1]
    mount(disk, "remount", "ro")
    yield
    mount(disk, "remount", "rw")


@contextlib.contextmanager
def forbidden(run: RunDir) -> Iterator[None]:
    run.checkpoints_path.chmod(0o500)
    if os.geteuid() == 0:  # whom nothing is forbidden
        os.seteuid(NOBODY)
    yield
    if os.getuid() == 0:
        os.seteuid(0)
    run.checkpoints_path.chmod(0o700)


@contextlib.contextmanager
def over_quota(run: RunDir) -> Iterator[None]:
    def limit(size: str) -> None:
        subprocess.run(["btrfs", "qgroup", "limit", size, str(run.path.parents[1])], check=True, timeout=30)

    limit("700000")  # a checkpoint, and part of another
    yield
    limit("none")


@contextlib.contextmanager
def too_large(run: RunDir) -> Iterator[None]:
    """A write fails at some byte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


CONFIG = tiny("sharding.type=row_wise", "checkpoint.keep=1", world_size=2)


def free_bytes(run: RunDir) -> int:
    found = os.statvfs(run.path)
    return found.f_bavail * found.f_frsize


def save_in_trouble(env, config: RunConfig, run: RunDir, trouble: Callable[..., Any]) -> dict[str, Any]:
    """Save with one failure, then with two in a row, on a disk that works in between; what happened."""
    with trainer(env, config, run) as one:

        def save(step: int) -> None:
            one.saver.save(step, {"step": step})
            one.saver.settle()

        @contextlib.contextmanager
        def in_trouble() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                if env.rank == 0 or trouble is forbidden:
                    stack.enter_context(trouble(run))
                one.here.agree(None)
                yield
                one.here.agree(None)  # nobody needs the trouble any more
            one.here.agree(None)

        found: dict[str, Any] = {}
        save(1)
        one.here.agree(None)
        free = free_bytes(run)
        with in_trouble():
            save(2)
        found["space_kept_bytes"] = free - free_bytes(run)
        found["committed_after_a_failure"] = run.committed_steps()
        save(3)
        with in_trouble():
            save(4)
            try:
                save(5)
            except CheckpointError as error:
                found["error"] = str(error)
        found["failures"] = [r["checkpoint_failed"] for r in one.records if "checkpoint_failed" in r]
        return found


TROUBLES = {
    "No space left on device": full,
    "Read-only file system": read_only,
    "Permission denied": forbidden,
    "Disk quota exceeded": over_quota,
    "File too large": too_large,
}
DISKS = {full: "disk", read_only: "disk", over_quota: "disk_with_quota", forbidden: "tmp_path", too_large: "tmp_path"}


@pytest.mark.parametrize("reason", TROUBLES)
def test_training_outlives_a_failed_save_and_stops_after_two_in_a_row(ranks, request, reason):
    trouble = TROUBLES[reason]
    run = RunDir.create(request.getfixturevalue(DISKS[trouble]), "run")
    for found in ranks(2, save_in_trouble, CONFIG, run, trouble):
        assert found["committed_after_a_failure"] == [1]
        assert [failure.rpartition(": ")[2] for failure in found["failures"]] == [reason] * 3
        assert found["error"].startswith(f"step 5: checkpoint not written: {run.checkpoints_path}")
        assert found["error"].endswith(f"{reason} (failures in a row: 2; the last one is of step 3)")
        assert found["space_kept_bytes"] <= 0 or DISKS[trouble] != "disk"
    assert run.committed_steps() == [3]
    assert manifest.damage(run.checkpoint_path(3)) is None
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["step-000000003"]


def test_a_run_that_fills_its_disk_stops_and_goes_on_where_it_was_when_there_is_space(ranks, disk):
    values = ["trainer.max_steps=40", "trainer.epochs=4", "trainer.log_every=2", "checkpoint.every=4"]
    config = tiny("sharding.type=row_wise", "checkpoint.keep=5", *values, world_size=2)
    run = RunDir.create(disk, "run")
    write_text(run.config_path, dump(config))
    run.start_attempt("full.0")
    (error,) = set(ranks(2, attempt_in_process, config, run, "full.0"))
    assert "No space left on device (failures in a row: 2; the last one is of step 8)" in error
    assert run.committed_steps() == [8, 4]
    assert [manifest.damage(run.checkpoint_path(step)) for step in (8, 4)] == [None, None]
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == ["step-000000004", "step-000000008"]

    mount(disk, "remount", f"size={10 * SIZE}")
    run.start_attempt("space.0")
    assert ranks(2, attempt_in_process, config, run, "space.0") == [Outcome.finished] * 2
    assert {r["resumed_at_step"] for r in run.metrics() if "resumed_at_step" in r} == {0, 8}

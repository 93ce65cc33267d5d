"""Manifests from anywhere, and which checkpoints are kept."""

import json
import os
from pathlib import Path

import pytest

from rechpc import checkpoint as command
from rechpc import manifest
from rechpc.errors import CheckpointError
from rechpc.manifest import Block, File, Manifest, Tensor
from rechpc.rundir import RunDir

VALUES = bytes(range(64))


def commit(run: RunDir, step: int) -> Path:
    """A checkpoint of one 4 x 4 tensor."""
    path = run.checkpoint_path(step)
    temporary = path.with_name(path.name + ".tmp")
    temporary.mkdir()
    (temporary / "rank-00000.bin").write_bytes(VALUES)
    sha256 = "fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108"
    block = Block("rank-00000.bin", 0, (0, 0), (4, 4))
    found = Manifest(
        step=step, optimizer_step=step, made_for={}, made_by={}, state={},
        files=[File("rank-00000.bin", len(VALUES), sha256, "")], tensors={"w": Tensor("float32", (4, 4), [block])},
    )  # fmt: skip
    manifest.commit(temporary, path, found)
    return path


@pytest.fixture
def run(make_run) -> RunDir:
    return make_run("checkpoint.keep=2")


def edited(path: Path, change) -> Path:
    """The checkpoint with another manifest, whose checksum is right."""
    raw = json.loads((path / manifest.NAME).read_text())
    del raw["sha256"]
    change(raw)
    (path / manifest.NAME).write_text(json.dumps({**raw, "sha256": manifest._digest(raw)}))
    return path


def part(raw) -> dict:
    return raw["tensors"]["w"]["parts"][0]


MALICIOUS = {
    "another file of this machine": lambda m: m["files"][0].update(name="../../../../etc/passwd"),
    "an absolute path": lambda m: m["files"][0].update(name="/etc/passwd"),
    "a part beyond its file": lambda m: part(m).update(byte=1),
    "a part before its file": lambda m: part(m).update(byte=-1),
    "a part beyond its tensor": lambda m: part(m).update(offset=[1, 0]),
    "a part of a file that is not there": lambda m: part(m).update(file="rank-00001.bin"),
    "a type that no program has": lambda m: m["tensors"]["w"].update(dtype="object"),
    "a shape of words": lambda m: m["tensors"]["w"].update(shape=["4", "4"]),
    "a list for a dictionary": lambda m: m.update(tensors=[]),
    "an entry that nobody knows": lambda m: m["files"][0].update(call="os.system"),
    "no step": lambda m: m.pop("step"),
}


@pytest.mark.parametrize("attack", MALICIOUS)
def test_a_manifest_that_is_not_what_the_format_says_is_refused(run, attack):
    path = edited(commit(run, 1), MALICIOUS[attack])
    with pytest.raises(CheckpointError, match=r"manifest.json is not what format 2 says: "):
        manifest.read(path)


def test_json_that_exhausts_the_parser_is_refused(run):
    path = commit(run, 1)
    (path / manifest.NAME).write_text("[" * 200_000)
    assert "manifest.json cannot be read" in (manifest.damage(path) or "")


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(run):
    os.rename(commit(run, 1), run.checkpoint_path(2))
    assert manifest.damage(run.checkpoint_path(2)) == "manifest.json is of step 1"


def test_a_zeroed_block_is_found_by_its_checksum_alone(run):
    path = commit(run, 1)
    (path / "rank-00000.bin").write_bytes(bytes(16) + VALUES[16:])
    assert manifest.damage(path, sizes_only=True) is None
    assert manifest.damage(path) == "rank-00000.bin does not have its checksum"


def kept(run: RunDir, newest: int, *, keep: int = 2, keep_every: int = 0, best: int | None = None) -> dict[int, str]:
    return manifest.kept_for(run, newest=newest, keep=keep, keep_every=keep_every, best=best)


def test_the_newest_the_best_and_every_so_many_steps_are_kept(run):
    for step in (10, 20, 30, 40, 50):
        commit(run, step)
    assert kept(run, 50) == {50: "newest", 40: "newest"}
    assert kept(run, 50, keep_every=20) == {50: "newest", 40: "newest", 20: "every"}
    assert kept(run, 50, keep=1, best=10) == {50: "newest", 10: "best"}


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(run):
    for step in (10, 20, 30):
        commit(run, step)
    (run.checkpoint_path(20) / "rank-00000.bin").write_bytes(b"short")
    assert kept(run, 30) == {30: "newest", 10: "newest"}


def test_what_a_restore_skipped_is_neither_counted_nor_removed(run):
    for step in (10, 20, 99):
        commit(run, step)
    assert kept(run, 20, keep=1) == {20: "newest"}
    manifest.retire(run, {20: "newest"}, newest=20)
    assert run.committed_steps() == [99, 20]


def test_a_damaged_checkpoint_is_named_when_it_is_removed(run, caplog):
    commit(run, 10)
    (run.checkpoint_path(10) / "rank-00000.bin").unlink()
    manifest.retire(run, {20: "newest"}, newest=20)
    assert run.committed_steps() == []
    assert "checkpoint=step-000000010 removed, it was damaged: rank-00000.bin: No such file" in caplog.text


@pytest.mark.parametrize(("metric", "best"), [("val_ne", 20), ("val_auc", 10)])
def test_the_best_is_chosen_among_what_is_there_and_was_evaluated(run, metric, best):
    for step in (10, 20, 40):
        commit(run, step)
    scores = {10: 0.9, 20: 0.7, 30: 0.1, 40: None}  # no checkpoint of 30, no score of 40
    lines = [{"attempt": 0, "step": step, "val_ne": value, "val_auc": value} for step, value in scores.items()]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert manifest.best_step(run, metric) == best


# The command


def test_list_says_what_each_checkpoint_is_kept_for_and_whether_it_is_complete(run, capsys):
    for step in (10, 20, 30):
        commit(run, step)
    (run.checkpoint_path(20) / "rank-00000.bin").write_bytes(b"short")
    assert command.main(["list", str(run.path)]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows] == [("30", "complete"), ("20", "64"), ("10", "complete")]
    assert [row[-2] for row in rows if row[-1] == "complete"] == ["newest", "newest"]


def test_verify_reads_every_byte(run, capsys):
    for step in (10, 20):
        commit(run, step)
    assert command.main(["verify", str(run.path)]) == 0
    (run.checkpoint_path(20) / "rank-00000.bin").write_bytes(bytes(64))
    assert command.main(["verify", str(run.path)]) == 1
    assert "step-000000020: rank-00000.bin does not have its checksum" in capsys.readouterr().out
    assert command.main(["verify", str(run.path), "--step", "10"]) == 0
    assert command.main(["verify", str(run.checkpoint_path(20))]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "{run}", "--step", "7"], "--step 7: {run} has the steps 10"),
        (["list", "{run}/nothing"], "{run}/nothing: not a run directory; expected one with a config.yaml in it"),
        (["export", "{run}", "{run}"], "{run}: is there already; choose another directory"),
        (["export", "{run}", "{run}/out", "--max-file-gib", "0"], "--max-file-gib 0: expected more than 0"),
    ],
)
def test_a_mistake_costs_one_line(run, capsys, arguments, message):
    commit(run, 10)
    assert command.main([a.format(run=run.path) for a in arguments]) == 2
    assert capsys.readouterr().err == message.format(run=run.path) + "\n"

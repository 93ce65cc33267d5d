"""Preflight on a real Slurm with a real Apptainer: a node that is really broken is found, named and left out."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.slurm.runs import ON_CLUSTER, SMALL, cancelled_at_end, submit

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the cluster

DEVICE = "/dev/dri/renderD128"
# Node 0 of a job of two nodes, and the other one: both must be found.
BROKEN = {
    "a missing device file": (
        "n1",
        [f"preflight.devices=[{DEVICE}]"],
        "mount -t tmpfs tmpfs /dev/dri",
        "umount /dev/dri",
        f"devices: {DEVICE}: no such file or directory; preflight.devices says that every node has it",
    ),
    "a full disk": (
        "n2",
        [],
        "mount -t tmpfs -o size=64k,mode=1777 tmpfs /tmp",
        "umount /tmp",
        "temporary space: /tmp has 0.0 GiB free, expected preflight.min_free_gib=1",
    ),
}


def on_node(cluster: Cluster, node: str, command: str) -> None:
    """Run a command as root among what one node has mounted."""
    join = f"nsenter --target $(cat /run/slurmd.{node}.pid) --mount -- sh -c '{command}'"
    cluster.check("sh", "-c", join, user="root")


@pytest.fixture(params=BROKEN)
def broken(request, cluster: Cluster) -> Iterator[tuple[str, list[str], str]]:
    """One node broken for the time of a test: its name, the overrides that make it matter, and the words for it."""
    node, overrides, break_it, mend_it, words = BROKEN[request.param]
    cluster.check("sh", "-c", f"mkdir -p /dev/dri; test -e {DEVICE} || mknod -m 666 {DEVICE} c 1 3", user="root")
    on_node(cluster, node, break_it)
    yield node, overrides, words
    on_node(cluster, node, mend_it)


def test_a_broken_node_is_left_out_and_the_run_finishes_on_the_others(
    cluster: Cluster, broken: tuple[str, list[str], str]
) -> None:
    node, overrides, words = broken
    run = submit(cluster, "trainer.max_steps=20", "preflight.enabled=true", *overrides)
    with cancelled_at_end(run):
        run.wait_for_state("finished")
        job = cluster.check("scontrol", "show", "job", "--oneliner", run.job_id)
    assert f"ExcNodeList={node}" in job
    assert "Restarts=1" in job
    first, second = (json.loads((a / "preflight.json").read_text()) for a in run.attempts())
    assert list(first["bad"]) == [node]
    assert words in first["bad"][node][0]
    assert second["bad"] == {}
    assert node not in {report["node"] for report in second["reports"]}
    assert [outcome for outcome, *_ in run.outcomes()] == ["failed", "finished"]
    assert f"left out   {node}: {words}" in run.status_text()
    log = "".join(path.read_text() for path in (run.path / "submission").glob(f"{run.job_id}_*_log.out"))
    (line,) = [line for line in log.splitlines() if "for the administrators" in line]
    assert f"job={run.job_id}" in line
    assert f"node={node} reason=" in line


def test_preflight_alone_names_the_node_and_ends_with_status_1(
    cluster: Cluster, broken: tuple[str, list[str], str]
) -> None:
    node, overrides, words = broken
    argv = ["python", "-m", "rechpc.preflight", *ON_CLUSTER, *SMALL, "job.nodes=2", *overrides]
    done = cluster.run(*argv, timeout_s=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"node {node}: {words}" in done.stderr
    assert f"leave them out with job.exclude={node}" in done.stderr

    done = cluster.run(*argv, f"job.exclude={node}", timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight    2 node(s) ok in " in done.stdout
    assert "all-to-all of" in done.stdout


def test_what_is_wrong_on_the_login_node_costs_no_job(cluster: Cluster) -> None:
    argv = ["python", "-m", "rechpc.preflight", *ON_CLUSTER, "job.nodes=2", "job.partition=nowhere"]
    done = cluster.run(*argv, "+container.env.MY_TOKEN=x")
    assert done.returncode == 2
    assert "MY_TOKEN looks like a secret" in done.stdout
    assert "job.partition=nowhere: no such partition" in done.stdout
    assert done.stderr.strip() == "preflight: the login node fails: secrets, Slurm"

"""The batch scripts of slurm/ on the cluster: they run what the launcher runs."""

import re
from pathlib import Path

import pytest

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster
from tests.slurm.runs import (
    ON_CLUSTER,
    SMALL,
    ClusterRun,
    assert_same_end,
    cancelled_at_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the cluster

TEMPLATES = Path(__file__).resolve().parents[2] / "slurm"


def start(cluster: Cluster, template: str, *overrides: str) -> ClusterRun:
    """Stage a run and hand it to Slurm with the command that the stage names, in the given template."""
    text = cluster.check("python", "-m", "rechpc.submit", "stage=true", *ON_CLUSTER, *SMALL, *overrides)
    command = re.search(r"^next +(sbatch .*)$", text, re.MULTILINE)
    assert command, text
    _, named, run_dir = command[1].split()
    assert named == f"slurm/{'single' if template == 'single_node' else 'multi'}_node.sbatch"
    return ClusterRun(cluster=cluster, inside=run_dir, job_id=sbatch(cluster, template, run_dir))


def sbatch(cluster: Cluster, template: str, argument: str) -> str:
    return cluster.check("sbatch", "--parsable", f"/checkout/slurm/{template}.sbatch", argument, cwd=SCRATCH).strip()


@pytest.mark.parametrize(
    ("template", "overrides"),
    [("single_node", ["job.ranks_per_node=4"]), ("multi_node", ["job.nodes=2"])],
)
def test_a_template_ends_with_the_model_of_the_launcher(
    cluster: Cluster, undisturbed: ClusterRun, template: str, overrides: list[str]
) -> None:
    run = start(cluster, template, *overrides)
    with cancelled_at_end(run):
        assert_same_end(run, undisturbed)


def test_the_requeue_template_goes_on_after_a_drain(cluster: Cluster, undisturbed: ClusterRun) -> None:
    run = start(cluster, "requeue", "job.nodes=2")
    with cancelled_at_end(run):
        run.wait_for_step(25)
        run.send("USR2")
        assert_same_end(run, undisturbed)
    assert [outcome for outcome, *_ in run.outcomes()] == ["requeued", "finished"]


def test_the_preflight_template_shows_what_every_node_sees(cluster: Cluster) -> None:
    log = cluster.scratch / f"rechpc-preflight-{sbatch(cluster, 'preflight', IMAGE)}.log"

    def nodes() -> set[str]:
        text = log.read_text() if log.exists() else ""
        return set(re.findall(r"^\d: (n\d) torch \S+ torchrec \S+ GPUs 0$", text, re.MULTILINE))

    wait_until(lambda: len(nodes()) == 2, lambda: log.read_text() if log.exists() else "its log")


def test_a_template_is_short_and_there_is_one_test_for_each() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in TEMPLATES.iterdir()}
    assert set(lengths) == {"single_node", "multi_node", "requeue", "preflight"}
    assert max(lengths.values()) < 40

"""What a site would refuse costs one line and exit status 2; nothing is queued and nothing left behind."""

import pytest

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster
from tests.slurm.runs import ON_CLUSTER


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.partition=nowhere"], ["job.partition=nowhere", "expected one of high, low"]),
        (["job.constraint=h100"], ["job.constraint=h100"]),
        (["job.nodes=9", "trainer.global_batch=1800"], ["job.nodes=9"]),
        (["job.partition=low", "job.time_limit_min=2880"], ["job.time_limit_min=2880", "allows 1440"]),
        (["container.image=/srv/images/none.sif"], ["container.image=/srv/images/none.sif", "no such file"]),
        (["container.binds=[/no/such/place]"], ["container.binds", "/no/such/place"]),
        ([f"runs_root={SCRATCH}/../proc/x"], ["runs_root="]),
        (["runs_root=/tmp/runs"], ["runs_root=/tmp/runs", "share"]),
        (["job.partition='a\nb'"], ["job.partition", "control character"]),
    ],
)
def test_a_mistake_costs_one_line(cluster: Cluster, overrides: list[str], words: list[str]) -> None:
    before = sorted((cluster.scratch / "runs").glob("*/*"))

    done = cluster.run("python", "-m", "rechpc.submit", *ON_CLUSTER, *overrides)

    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
    assert sorted((cluster.scratch / "runs").glob("*/*")) == before


def test_without_sbatch_it_says_where_to_go(cluster: Cluster) -> None:
    done = cluster.run("env", "PATH=/srv/venv/bin", "python", "-m", "rechpc.submit", *ON_CLUSTER)

    assert done.returncode == 2
    assert "sbatch is not on the PATH" in done.stderr
    assert IMAGE not in done.stderr

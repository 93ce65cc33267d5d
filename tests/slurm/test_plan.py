"""Planning on a login node that has no torch: a child process in the image does it, and the ranks use its answer."""

import pytest

from tests.cluster.cluster import IMAGE, Cluster
from tests.slurm.runs import ON_CLUSTER

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the cluster

GPUS = ("cluster=mi300x", "container=apptainer", f"container.image={IMAGE}", "job.nodes=2")


@pytest.fixture(autouse=True)
def empty_cache(cluster: Cluster) -> None:
    assert cluster.run("python", "-c", "import torch").returncode == 1
    cluster.check("sh", "-c", "rm -rf ~/.cache/rechpc")


def job_ids(cluster: Cluster) -> set[str]:
    return set(cluster.check("squeue", "--noheader", "--states=all", "--format=%i").split())


def test_the_image_plans_where_there_is_no_torch_and_once_only(cluster: Cluster) -> None:
    command = ["python", "-m", "rechpc.plan", *GPUS, "sharding=table_row_wise"]

    first = cluster.run(*command, timeout_s=300)

    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines() == [f"planning 1 run(s) with the torch of {IMAGE} ..."]
    assert "plan of 6 tables for 2 x 8 gfx942 with 192 GiB, sharding table_row_wise" in first.stdout
    again = cluster.run(*command)
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_submit_asks_the_image_too_and_refuses_what_does_not_fit(cluster: Cluster) -> None:
    jobs = job_ids(cluster)
    tables = "data.sparse=[{name: big, rows: 2_000_000_000}]"

    done = cluster.run(
        "python", "-m", "rechpc.submit", *ON_CLUSTER, *GPUS, tables, "sharding=table_wise", timeout_s=300
    )

    assert done.returncode == 2, done.stdout + done.stderr
    planning, line = done.stderr.splitlines()
    assert IMAGE in planning
    assert "no plan fits 4 ranks" in line
    assert "sharding=row_wise fits" in line
    assert job_ids(cluster) <= jobs  # Slurm forgets old ones meanwhile

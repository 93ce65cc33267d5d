"""What a site would refuse costs one line and exit status 2; nothing is queued and nothing left behind."""

import pytest

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster
from tests.slurm.runs import ON_CLUSTER

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the cluster

CLOSED = f"{SCRATCH}/closed"


@pytest.fixture(autouse=True)
def closed(cluster: Cluster) -> None:
    """A directory that the user may not enter."""
    cluster.check("install", "-d", "-m", "700", CLOSED, user="root")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.partition=nowhere"], ["job.partition=nowhere", "expected one of high, low"]),
        (["job.constraint=h100"], ["job.constraint=h100"]),
        (["job.nodes=9", "trainer.global_batch=1800"], ["job.nodes=9"]),
        (["job.partition=low", "job.time_limit_min=2880"], ["job.time_limit_min=2880", "allows 1440"]),
        (["container.image=/srv/images/none.sif"], ["container.image=/srv/images/none.sif", "no such file"]),
        (["container.binds=[/no/such/place]"], ["container.binds", "/no/such/place"]),
        (["container.image=/etc/shadow"], ["container.image=/etc/shadow", "not readable by you"]),
        ([f"container.image={CLOSED}/x.sif"], [f"container.image={CLOSED}/x.sif", "no such file"]),
        ([f"container.binds=[{CLOSED}/x]"], ["container.binds", f"{CLOSED}/x", "does not exist"]),
        ([f"runs_root={SCRATCH}/../proc/x"], ["runs_root="]),
        ([f"runs_root={CLOSED}/runs"], [f"runs_root={CLOSED}/runs", "Permission denied"]),
        (["runs_root=/tmp/runs"], ["runs_root=/tmp/runs", "share"]),
        (["job.partition='a\nb'"], ["job.partition", "control character"]),
        (["+job.sbatch.partition=low"], ["job.sbatch.partition", "set that instead"]),
        (["+job.sbatch.nonsense=x"], ["Slurm refuses the job", "nonsense"]),
    ],
)
def test_a_mistake_costs_one_line(cluster: Cluster, overrides: list[str], words: list[str]) -> None:
    assert_refused(cluster, overrides, words)


def test_an_unknown_account_costs_one_line(accounting_cluster: Cluster) -> None:
    assert_refused(accounting_cluster, ["job.account=nobody"], ["Invalid account", "job.account=nobody"])


def assert_refused(cluster: Cluster, overrides: list[str], words: list[str]) -> None:
    """One line with these words, exit status 2, no job and no file."""

    def jobs() -> set[str]:
        return set(cluster.check("squeue", "--noheader", "--states=all", "--format=%i").split())

    files, queue = sorted((cluster.scratch / "runs").glob("*/*")), jobs()

    done = cluster.run("python", "-m", "rechpc.submit", *ON_CLUSTER, *overrides)

    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
    assert sorted((cluster.scratch / "runs").glob("*/*")) == files
    assert jobs() <= queue


def test_without_sbatch_it_says_where_to_go(cluster: Cluster) -> None:
    done = cluster.run("env", "PATH=/srv/venv/bin", "python", "-m", "rechpc.submit", *ON_CLUSTER)

    assert done.returncode == 2
    assert "sbatch is not on the PATH" in done.stderr
    assert IMAGE not in done.stderr

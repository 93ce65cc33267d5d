import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import accounting_cluster, cluster
from tests.slurm.runs import ClusterRun, cancelled_at_end, submit

__all__ = ["accounting_cluster", "cluster"]


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> ClusterRun:
    """2 nodes x 2 ranks in Apptainer, left alone."""
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_for_state("finished")
    return run

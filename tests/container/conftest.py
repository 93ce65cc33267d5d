from tests.cluster.fixtures import cluster

__all__ = ["cluster"]

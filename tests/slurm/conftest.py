from tests.cluster.fixtures import accounting_cluster, cluster

__all__ = ["accounting_cluster", "cluster"]

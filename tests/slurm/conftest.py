from collections.abc import Iterator

import pytest

from tests.cluster import cluster as test_cluster
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    was_up = found.is_up
    test_cluster.up(found)
    yield found
    if not was_up:
        test_cluster.down(found)

"""The test cluster as pytest fixtures, for the conftest.py of every directory that needs it."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster import cluster as test_cluster
from tests.cluster import machine
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster without accounting; one that was up before stays up."""
    yield from _up(Cluster())


@pytest.fixture(scope="session")
def accounting_cluster() -> Iterator[Cluster]:
    """A second one, with slurmdbd."""
    yield from _up(Cluster(accounting=True))


def _up(cluster: Cluster) -> Iterator[Cluster]:
    if reason := machine.why_not():
        message = f"the test cluster cannot run here: {reason}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    was_up = cluster.is_up
    test_cluster.up(cluster)
    yield cluster
    if not was_up:
        test_cluster.down(cluster)

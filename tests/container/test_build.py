"""containers/build.sh and the definition end early, and leave no image, where something is wrong."""

import pytest

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster

pytestmark = pytest.mark.timeout(900)


def test_too_little_space_is_noticed_before_anything_is_downloaded(cluster: Cluster) -> None:
    cluster.check("mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", "/mnt", user="root")
    small = {"APPTAINER_TMPDIR": "/mnt", "APPTAINER_CACHEDIR": "/mnt"}
    try:
        done = cluster.run("/checkout/containers/build.sh", "rocm", f"{SCRATCH}/x.sif", env=small)
    finally:
        cluster.check("umount", "/mnt", user="root")

    assert done.returncode == 2
    assert "=/mnt: 0 GiB free, expected 120" in done.stderr


def test_an_unknown_variant_is_refused(cluster: Cluster) -> None:
    done = cluster.run("/checkout/containers/build.sh", "cuda")

    assert done.returncode == 2
    assert "rocm|rocm-gfx90a|cpu" in done.stderr


def test_a_torch_for_other_gpus_fails_the_build(cluster: Cluster) -> None:
    cluster.check("mkdir", "-p", f"{SCRATCH}/tmp")

    done = cluster.run(
        *("apptainer", "build", "--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"BASE={IMAGE}"),
        *("--build-arg", "ARCH=gfx90a", f"{SCRATCH}/wrong.sif", "containers/rechpc.def"),
        cwd="/checkout",
        env={"APPTAINER_TMPDIR": f"{SCRATCH}/tmp", "APPTAINER_CACHEDIR": f"{SCRATCH}/tmp"},
        timeout_s=300,
    )

    assert done.returncode != 0
    assert "was not built for ROCm" in done.stdout + done.stderr
    assert not (cluster.scratch / "wrong.sif").exists()

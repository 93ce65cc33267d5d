"""containers/build.sh and the definition end early, and leave no image, where something is wrong."""

import pytest

from tests.cluster.cluster import BASE, IMAGE, SCRATCH, Cluster

pytestmark = pytest.mark.timeout(900)


def test_too_little_space_is_noticed_before_anything_is_downloaded(cluster: Cluster) -> None:
    cluster.check("mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", "/mnt", user="root")
    small = {"APPTAINER_TMPDIR": "/mnt", "APPTAINER_CACHEDIR": "/mnt"}
    try:
        done = cluster.run("/checkout/containers/build.sh", "rocm", f"{SCRATCH}/x.sif", env=small)
    finally:
        cluster.check("umount", "/mnt", user="root")

    assert done.returncode == 2
    assert "=/mnt: 0 GiB free, expected 120; point it at a larger file system" in done.stderr


def test_an_unknown_variant_is_refused(cluster: Cluster) -> None:
    done = cluster.run("/checkout/containers/build.sh", "cuda")

    assert done.returncode == 2
    assert "rocm|rocm-gfx90a|cpu" in done.stderr


def test_a_base_without_torch_and_pip_fails_the_build_for_gpus(cluster: Cluster) -> None:
    done = cluster.run(
        *("apptainer", "build", "--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"BASE={BASE}"),
        *("--build-arg", "ARCH=gfx90a", f"{SCRATCH}/wrong.sif", "containers/rechpc.def"),
        cwd="/checkout",
        timeout_s=300,
    )

    assert done.returncode != 0
    assert f"/usr/bin/python3 in {BASE} has no pip" in done.stdout + done.stderr
    assert not (cluster.scratch / "wrong.sif").exists()


def test_a_torch_for_other_hardware_fails_the_check_that_ends_a_build(cluster: Cluster) -> None:
    check = ("python", "-I", "/opt/rechpc/install.py", "check")
    good = cluster.run("apptainer", "exec", IMAGE, *check, "cpu", timeout_s=120)
    bad = cluster.run("apptainer", "exec", IMAGE, *check, "gfx942,gfx950", timeout_s=120)

    assert good.returncode == 0, good.stderr
    assert bad.returncode == 1
    assert "was not built for ROCm" in bad.stderr

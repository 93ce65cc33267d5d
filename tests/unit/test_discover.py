"""What a node is found to have. The trees stand in for /sys, /proc and /dev of nodes that are not here."""

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from rechpc import compose
from rechpc.config import CommandConfig
from rechpc.errors import ConfigError
from rechpc.host.discover import discover

GIB = 1 << 30


class Node:
    """Files of a node, by what they say."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 2113929216 kB\n")
        self.write("proc/cpuinfo", "processor : 0\nmodel name : AMD EPYC 9654 96-Core Processor\n")
        self.write("proc/mounts", "a / ext4 rw 0 0\nb /scratch lustre rw,flock 0 0\nhome:/x /home nfs4 rw 0 0\n")
        self.write("sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add_gpus(self, count, *, version=90402, gib=192, readable=True):
        for i in range(count):
            node = f"sys/class/kfd/kfd/topology/nodes/{i + 1}"
            self.write(
                f"{node}/properties", f"simd_count 1216\ngfx_target_version {version}\ndrm_render_minor {128 + i}\n"
            )
            self.write(f"{node}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {gib * GIB}\n")
            self.write(f"sys/class/drm/renderD{128 + i}/device/numa_node", f"{i * 2 // count}\n")
            if readable:
                self.write(f"dev/dri/renderD{128 + i}", "")
        self.write("dev/kfd", "")
        for i in range(2):
            self.write(f"sys/devices/system/node/node{i}/cpulist", f"{96 * i}-{96 * i + 95}\n")

    def add_rdma(self, name, driver, *, layer="Ethernet", state="4: ACTIVE"):
        device = f"sys/class/infiniband/{name}"
        self.write(f"{device}/ports/1/link_layer", layer)
        self.write(f"{device}/ports/1/rate", "400 Gb/sec (4X NDR)")
        self.write(f"{device}/ports/1/state", state)
        self.write(f"{device}/device/numa_node", "0")
        (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        (self.root / device / "device/driver").symlink_to(self.root / f"sys/bus/pci/drivers/{driver}")

    def add_interface(self, name, *, up=True, real=True):
        self.write(f"sys/class/net/{name}/operstate", "up\n" if up else "down\n")
        if real:
            self.write(f"sys/class/net/{name}/device/vendor", "0x1")

    def add_directories(self, *paths):
        for path in paths:
            (self.root / path).mkdir(parents=True)


@pytest.fixture
def node(tmp_path, commands):
    commands(
        sinfo='[ "$1" = --version ] && echo slurm 24.05.4 || echo gpu:mi300x:8',
        apptainer="echo apptainer version 1.4.5",
    )
    return Node(tmp_path / "root")


def composed(text, monkeypatch, tmp_path):
    """The configuration with this profile, laid beside those that there are."""
    for path in compose.CONF_PATH.rglob("*.yaml"):
        copy = tmp_path / "conf" / path.relative_to(compose.CONF_PATH)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "conf/cluster/found.yaml").write_text(text)
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    with hydra.initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        return compose.typed(hydra.compose("config", ["cluster=found", "trainer.global_batch=2048"])).cluster


def test_a_node_with_roce_becomes_a_profile_that_composes(node, monkeypatch, tmp_path):
    node.add_gpus(8)
    for i in (0, 1, 2, 10):
        node.add_rdma(f"bnxt_re{i}", "bnxt_en", state="4: ACTIVE" if i < 10 else "1: DOWN")
    node.add_interface("ens9f1")
    node.add_interface("ens10f0")
    node.add_interface("eth9", up=False)
    node.add_interface("docker0", real=False)
    node.add_directories("boot", "etc/libibverbs.d", "usr/lib/x86_64-linux-gnu/libibverbs")
    text = discover(node.root)
    found = composed(text, monkeypatch, tmp_path)
    assert (found.ranks_per_node, found.gpu_arch, found.hbm_gib, found.host_memory_gib) == (8, "gfx942", 192, 2016)
    assert found.gpu_request == "gpus_per_node"
    assert found.env["NCCL_SOCKET_IFNAME"] == "ens9f1,ens10f0"
    assert found.env["NCCL_IB_HCA"] == "=bnxt_re0,bnxt_re1,bnxt_re2"
    assert found.env["HSA_NO_SCRATCH_RECLAIM"] == "1"  # of the profile that it builds on
    assert found.binds[0] == "/boot:/boot:ro"
    assert len(found.binds) == 3
    for line in (
        "#   - mi300x_roce_broadcom".replace("#   ", "  "),
        "# 4 GPUs gfx942 of 192 GiB on NUMA node 1, CPUs 96-191",
        "# RDMA bnxt_re10: driver bnxt_en, Ethernet, 400 Gb/sec (4X NDR), NUMA node 0, NOT active",
        "# Apptainer: apptainer version 1.4.5",
        "# Slurm: slurm 24.05.4",
        "# file systems for runs_root: /home (nfs4), /scratch (lustre)",
    ):
        assert f"{line}\n" in text


@pytest.mark.parametrize(
    ("version", "gib", "rdma", "base"),
    [
        (90402, 192, ("mlx5_0", "mlx5_core", "InfiniBand"), "mi300x_infiniband"),
        (90402, 192, ("mlx5_0", "mlx5_core", "Ethernet"), "mi300x_roce_mellanox"),
        (90402, 191, ("rdma0", "ionic_rdma", "Ethernet"), "mi300x_roce_ainic"),
        (90402, 192, None, "mi300x_single_node  # no RDMA device was found"),
        (90402, 256, None, "mi325x  # the hardware; "),
        (90402, 126, None, "mi300a  # "),
        (90010, 64, None, "mi250x  # "),
        (90500, 287, None, "mi355x  # "),
        (110000, 48, None, "slurm  # "),
    ],
)
def test_the_profile_builds_on_the_nearest_that_there_is(node, version, gib, rdma, base):
    node.add_gpus(1, version=version, gib=gib)
    if rdma:
        node.add_rdma(rdma[0], rdma[1], layer=rdma[2])
    text = discover(node.root)
    assert f"defaults:\n  - {base}" in text
    if rdma is None:
        assert "# no RDMA device: runs of several nodes would use sockets" in text


def test_what_is_wrong_with_a_node_is_said(node):
    node.add_gpus(2, readable=False)
    node.write("proc/sys/kernel/numa_balancing", "1\n")
    node.write("sys/class/kfd/kfd/topology/nodes/2/mem_banks/0/properties", f"size_in_bytes {64 * GIB}\n")
    node.add_directories("sys/class/cxi/cxi0")
    text = discover(node.root)
    assert (
        "# NOT readable and writable for you: /dev/kfd or renderD128, renderD129; ask for groups video and render"
        in text
    )
    assert "# the GPUs are NOT alike" in text
    assert "# kernel.numa_balancing=1" in text
    assert "# Slingshot (cxi): take env and binds from lumi.yaml or frontier.yaml" in text


def test_without_the_commands_it_says_that_they_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    node = Node(tmp_path)
    node.add_gpus(1)
    text = discover(node.root)
    assert "# Apptainer: NOT on the PATH; job.setup may load it" in text
    assert "# Slurm: NOT on the PATH" in text


def test_a_node_without_gpus_is_an_error_that_says_where_to_go(tmp_path):
    with pytest.raises(ConfigError, match=r"no GPU on \S+; run this on a compute node, as srun"):
        discover(Node(tmp_path).root)

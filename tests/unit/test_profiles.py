"""What every cluster profile makes of a run: the batch script, and the command that starts the ranks of a node.

`python -m tests.unit.test_profiles` writes golden/ anew; a change there is reviewed like code.
"""

import itertools
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from rechpc import topology
from rechpc.compose import CONF_PATH, typed
from rechpc.config import CommandConfig, NumaBinding
from rechpc.errors import ConfigError, LaunchError
from rechpc.host import container, slurm, task
from rechpc.rundir import RunDir
from tests.configs import changed, compose

GOLDEN = Path(__file__).with_name("golden")
RUN = RunDir(Path("/runs/dlrm/RUN_ID"))
NO_PROFILES = ("local", "slurm", "rehearsal")  # no hardware of their own
PROFILES = sorted(path.stem for path in (CONF_PATH / "cluster").glob("*.yaml") if path.stem not in NO_PROFILES)
IMAGE = ("container=apptainer", "container.image=/images/rechpc.sif", "trainer.global_batch=2048")


def submitted(profile: str) -> str:
    """Everything that is handed to others, with the places of this machine taken out."""
    nodes = 1 if profile.endswith("single_node") else 2
    config = compose(f"cluster={profile}", *IMAGE, f"job.nodes={nodes}", "job.account=project_1")
    meet = task.Rendezvous(host="NODE_0", port=0) if nodes > 1 else None
    ranks = shlex.join(task.command(RUN, config, attempt_name="JOB_ID.0", rendezvous=meet))
    text = f"{slurm.batch_script(RUN, config)}\n# On each node\n{ranks}\n"
    text = re.sub(r"/\S*rechpc-\d+-JOB_ID.0", "CACHES", text)
    return text.replace(sys.executable, "PYTHON")


@pytest.fixture(autouse=True)
def same_machine_everywhere(monkeypatch):
    monkeypatch.setattr(topology, "num_cpus", lambda: 128)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("profile", PROFILES)
def test_batch_script_and_command_line(profile):
    assert submitted(profile) == (GOLDEN / f"{profile}.txt").read_text()


@pytest.mark.parametrize("profile", PROFILES)
def test_every_line_of_a_profile_says_why_and_where_from(profile):
    text = (CONF_PATH / "cluster" / f"{profile}.yaml").read_text()
    lines = re.sub(r"^defaults:\n(  - .*\n)+", "", text, flags=re.M).splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"  \S|rank_cpus|numa_binding", line):
            assert re.search(r"^ *#|  # ", line) or above.strip().startswith("#"), line


def test_variables_binds_and_options_of_run_and_cluster_add_up_and_the_run_wins():
    config = compose(
        *(
            "cluster=lumi",
            *IMAGE,
            "job.nodes=2",
            "container.binds=[/flash]",
            "+job.sbatch={mem-per-gpu: 30G, hold: 'true'}",
        ),
        "+container.env={NCCL_DEBUG: INFO, NCCL_NET_GDR_LEVEL: SYS}",
    )
    script = slurm.batch_script(RUN, config)
    assert "#SBATCH --mem-per-gpu=30G\n" in script
    assert "#SBATCH --hold\n" in script
    argv = task.command(RUN, config, attempt_name="1.0", rendezvous=task.Rendezvous(host="n", port=1))
    assert {"NCCL_DEBUG=INFO", "NCCL_NET_GDR_LEVEL=SYS", "GLOO_SOCKET_IFNAME=hsn0"} <= set(argv)
    assert "NCCL_NET_GDR_LEVEL=PHB" not in argv
    assert {"--bind=/opt/cray", "--bind=/flash"} <= set(argv)


def test_the_files_that_the_documentation_shows_compose(tmp_path):
    text = (CONF_PATH.parent / "docs/add-your-cluster.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) == 2
    shutil.copytree(CONF_PATH, tmp_path / "conf")
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    for block in blocks:
        (tmp_path / "conf/cluster/shown.yaml").write_text(block)
        with hydra.initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
            config = typed(hydra.compose("config", ["cluster=shown", "trainer.global_batch=2048"]))
        assert config.cluster.env["NCCL_SOCKET_IFNAME"] == "ens50f0np0"
        assert config.cluster.env["NCCL_IB_HCA"] == "bnxt_re,rdma"
        assert config.cluster.hbm_gib == 192
    assert (config.job.partition, config.container.binds) == ("gpu", ["/scratch"])


def test_an_option_of_the_cluster_that_a_key_stands_for_is_refused_by_its_name():
    config = changed("cluster.launcher=slurm", "cluster.sbatch={mem: 4G}")
    with pytest.raises(ConfigError, match=r"^cluster\.sbatch\.mem: --mem comes from job\.memory_gib; set"):
        slurm.check(RUN, config)


def test_a_bind_of_the_cluster_that_a_node_has_not_is_named_there_and_not_on_the_login_node(commands, tmp_path):
    commands(apptainer="exit 0")
    (tmp_path / "i.sif").touch()
    config = compose(
        "cluster=lumi", *IMAGE[:1], f"container.image={tmp_path}/i.sif", "cluster.binds=[/nowhere/x:/x:ro]"
    )
    container.check(config.container)
    with pytest.raises(
        ConfigError, match=r"cluster.binds: /nowhere/x:/x:ro: /nowhere/x does not exist on \S+; correct"
    ):
        container.check_runtime(config.container, config.cluster.binds)
    container.check_runtime(config.container, [f"{tmp_path}:/x"])


# Binding to CPUs


def bound(cpus, *overrides):
    return changed("cluster.ranks_per_node=2", f"cluster.rank_cpus={cpus}", *overrides)


def test_each_rank_of_a_whole_node_has_its_cpus_and_their_number_of_threads():
    config = bound("['1-3,64','7']")
    assert (topology.bound_cpus(config, 0), topology.bound_cpus(config, 1)) == ({1, 2, 3, 64}, {7})
    assert task.rank_environment(config, {}, code_path=Path("/c"), cpus=128)["OMP_NUM_THREADS"] == "4"


def test_a_job_with_a_part_of_a_node_is_not_bound_for_its_gpus_may_be_any():
    config = bound("['1-3','7']", "job.ranks_per_node=1")
    assert topology.bound_cpus(config, 0) == set()
    topology.bind(config, 0)


def test_binding_takes_effect_and_cpus_of_others_are_refused(monkeypatch):
    taken = []
    monkeypatch.setattr(topology.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(topology.os, "sched_setaffinity", lambda _, cpus: taken.append(cpus))
    topology.bind(bound("['1-2','7']"), 0)
    assert taken == [{1, 2}]
    with pytest.raises(LaunchError, match=r"cluster.rank_cpus\[1\]=2,7: CPU 7 is not among those of this job on "):
        topology.bind(bound("['1-2','2,7']"), 1)


def test_torchrun_is_told_how_to_bind_only_where_the_cluster_says_so():
    config = compose("cluster=mi300x_single_node", "trainer.global_batch=2048")
    assert config.cluster.numa_binding is NumaBinding.node
    argv = task.torchrun_argv(config, RUN, attempt_name="1.0")
    assert argv[argv.index("--numa-binding") + 1] == "node"
    assert "--numa-binding" not in task.torchrun_argv(compose(), RUN, attempt_name="1.0")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    topology.num_cpus = lambda: 128
    for name in PROFILES:
        (GOLDEN / f"{name}.txt").write_text(submitted(name))

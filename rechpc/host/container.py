"""From the command of the ranks to the command that starts them in their container; only this file knows Apptainer.

Pure. Must not know Slurm, submitit or torch.
"""

from rechpc.config import ContainerConfig, ContainerRuntime

# Signals that reach every process of a job must not end the ranks, which are told through the stop file. They are
# ignored in here and not by the host task, for Apptainer resets what its parent ignored (tried with 1.4.5).
_IGNORE_SIGNALS = ["sh", "-c", 'trap "" USR2 TERM; exec "$@"', "sh"]


def argv(
    container: ContainerConfig, inner: list[str], *, env: dict[str, str], binds: list[str], gpu: bool
) -> list[str]:
    """The command that runs `inner` with `env` set; every step of it execs the next, so it stays one process."""
    # The variables are set by env(1): Apptainer's own --env splits a value at its commas, which lists of network
    # interfaces have, and a variable that the image sets would win over one of the host.
    command = [*_IGNORE_SIGNALS, "env", *(f"{name}={value}" for name, value in sorted(env.items())), *inner]
    if container.runtime is ContainerRuntime.none:
        return command
    assert container.image is not None  # RunConfig.validate
    mounts = [f"--bind={bind}" for bind in [*binds, *container.binds]]
    # The home directory stays mounted, for ROCm and torch keep their kernel caches there; PYTHONNOUSERSITE, set by
    # the host task, keeps the Python packages in it out.
    return ["apptainer", "exec", "--cleanenv", *(["--rocm"] if gpu else []), *mounts, container.image, *command]

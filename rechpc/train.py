"""`python -m rechpc.train RUN_DIR`: one rank, started by torchrun (by the host task, or by hand on a laptop)."""

import argparse
import logging
import os
import sys
import time
import traceback
import warnings

from rechpc import lifeline, topology
from rechpc.errors import RechpcError
from rechpc.rules import load
from rechpc.rundir import AttemptDir, RunDir, write_json
from rechpc.topology import RankEnv

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit status 0 when the run finished or was saved on request, else non-zero with an error file."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.train", description=__doc__)
    parser.add_argument("run_dir", help="run directory, with its config.yaml")
    parser.add_argument("--attempt", help="name of the attempt, made by the host task; unset: started by hand")
    arguments = parser.parse_args()
    try:
        run, env = RunDir.open(arguments.run_dir), RankEnv.from_environment()
    except RechpcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    attempt = run.attempt(arguments.attempt) if arguments.attempt else _attempt_by_hand(run, env)
    return _run(run, attempt, env, log_to_file=bool(arguments.attempt))


def _attempt_by_hand(run: RunDir, env: RankEnv) -> AttemptDir:
    """torchrun's process id names the attempt of all its ranks."""
    name = f"by-hand-{os.getppid()}.0"
    if env.rank == 0:
        return run.start_attempt(name)
    attempt = run.attempt(name)
    while not attempt.facts_path.exists():
        time.sleep(0.05)
    return attempt


def _run(run: RunDir, attempt: AttemptDir, env: RankEnv, *, log_to_file: bool) -> int:
    try:
        lifeline.detach_from_signals()
        if log_to_file:
            lifeline.redirect_output(attempt.rank_log_path(env.rank))
        lifeline.show_stacks()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        config = load(run.config_path)
        topology.bind(config, env.local_rank)
        started_s = time.monotonic()
        from rechpc.rank import loop  # noqa: PLC0415 - takes seconds, and a failure belongs into the rank's own log

        _quieten()
        logger.info("rank=%d world_size=%d import_s=%.1f", env.rank, env.world_size, time.monotonic() - started_s)
        loop.run_attempt(config, run, attempt, env)
    except BaseException as error:
        line = " ".join(str(error).split()) if isinstance(error, RechpcError) else f"{type(error).__name__}: {error}"
        text = traceback.format_exc()
        record = {"rank": env.rank, "time_s": time.time(), "error": line, "traceback": text}
        if not attempt.error_path(env.rank).exists():  # a host task that ended the peers has said why
            write_json(attempt.error_path(env.rank), record)
        sys.stderr.write(text)
        return 1
    return 0


def _quieten() -> None:
    """Keep the logs free of what a user can do nothing about."""
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("rechpc").setLevel(logging.INFO)
    for library in ("torchrec", "torch.fx._symbolic_trace"):  # these set a level of their own
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # FBGEMM 1.8's dense kernel, of data-parallel tables: its gradients equal those of the fused kernel (tests).
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: it waits for threads of collectives that a failed rank has left in flight.
    os._exit(status)

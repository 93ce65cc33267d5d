"""Stands in for rechpc.train, so that what surrounds the ranks is tested without torch: the same argv, files and
exit statuses. STAND_IN says what goes wrong: finish, crash, vanish, deaf, or endless (until it is told to stop); stuck,
stopped: rank 1 does not move, and rank 0 waits for it in (a stand-in of) torch."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from rechpc import lifeline


def hang(mode, rank):
    if rank == 0:
        import torch.distributed

        torch.distributed.wait_for_the_others()
    if mode == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    stuck_in_python()


def stuck_in_python():
    while True:
        time.sleep(0.01)


def write(path, value):
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    run, (mode, rank) = Path(sys.argv[1]), (os.environ["STAND_IN"], int(os.environ["RANK"]))
    assert sys.argv[2] == "--attempt"
    attempt = run / "attempts" / sys.argv[3]
    sys.stdout = sys.stderr = (attempt / f"rank-{rank:05d}.log").open("a", buffering=1)
    lifeline.show_stacks()
    facts = {"pid": os.getpid(), "env": dict(os.environ), "file": __file__, "path": sys.path[0]}
    facts["ignored"] = [
        name for name in ("SIGTERM", "SIGUSR2") if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN
    ]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # like the ranks, or torchrun waits 30 s for a failed one's peers
    write(attempt / f"facts-{rank}.json", facts)
    for step in range(1, 10_000):
        beat = {"phase": "training", "time_s": time.time(), "step": step, "total_steps": 10_000, "loss": 0.5, "ne": 0.9}
        beat |= {"samples_per_s": 31_200.0, "seconds_left": 12.0}
        if rank == 0:
            write(attempt / "heartbeat", beat)
        if step == 3 and mode in ("stuck", "stopped"):
            hang(mode, rank)
        if step == 3 and rank == 1 and mode == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and rank == 1 and mode == "crash":
            error = {"rank": 1, "time_s": time.time(), "error": "DataError: id 7\nis too large", "traceback": ""}
            write(attempt / "error-rank-00001.json", error)
            sys.exit(1)
        if step == 3 and mode == "finish":
            result = {"state": "finished", "step": step, "test_auc": 0.7912, "test_ne": 0.842, "optimal_auc": 0.8103}
            result |= {"optimal_ne": 0.821, "samples_per_s": 31_200.0, "world_size": 2, "attempts": 1, "wall_s": 75.0}
            return end(run, attempt, rank, "finished", step, result)
        if mode != "deaf" and (attempt / "stop").exists():
            if rank == 0:
                (run / "checkpoints" / f"step-{step:09d}").mkdir()
            outcome = {"drain": "drained", "requeue": "requeued"}[(attempt / "stop").read_text()]
            return end(run, attempt, rank, outcome, step, None)
        time.sleep(0.02)
    return None


def end(run, attempt, rank, outcome, step, result):
    if rank == 0:
        if result:
            write(run / "result.json", result)
        write(attempt / "outcome.json", {"outcome": outcome, "step": step, "checkpoint_step": step, "error": None})


if __name__ == "__main__":
    main()

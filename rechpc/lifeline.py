"""A process and its parent: how it dies, where its output goes, what it locks.

Each process of an attempt dies with the one that started it, so that SIGKILL anywhere leaves nothing running.
Standard library only: ranks use it before torch is imported, which takes seconds.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from rechpc.errors import LaunchError
from rechpc.rundir import RunDir

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, for `die_with` also runs between fork and exec


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked


def detach_from_signals() -> None:
    """Die with torchrun, and leave stopping to the stop file.

    torchrun ends its workers with SIGTERM when one fails, but the shell in front of it has it ignored; without the
    default action they would linger for its 30 s timeout. Nothing else may interrupt a step.
    """
    die_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for ignored in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)


def show_stacks() -> None:
    """Have a crash in C++ write the Python stacks of all threads to stderr, and SIGUSR1 too, without ending anything.

    Handled in C, so it works where Python itself is stuck; rechpc.host.hang asks.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def redirect_output(log: Path) -> None:
    """Send this process's stdout and stderr to its log, also what C++ prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


@contextlib.contextmanager
def lock(run: RunDir) -> Iterator[None]:
    """Hold the run against a second writer. Called by rank 0. Raises LaunchError when somebody has it."""
    with open(run.lock_path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise LaunchError(
                f"{run.path}: another attempt is writing this run ({file.read().strip() or 'unknown'}); stop it first"
            ) from error
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield

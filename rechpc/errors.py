"""The errors that a user can cause or must act on; everything else is a bug and keeps its traceback.

The entries print these as plain lines and exit with `exit_status`.
"""


class RechpcError(Exception):
    """What is, what was expected, which key or file, what to do: one line a problem."""

    exit_status = 1


class ConfigError(RechpcError):
    """The configuration cannot work; nothing was started."""

    exit_status = 2


class LaunchError(RechpcError):
    """The job could not be started, or a process of it died."""


class DataError(RechpcError):
    """A value, a file or a data set is not what its schema says."""


class CheckpointError(RechpcError):
    """A checkpoint cannot be written, or cannot be restored completely."""


class TrainingError(RechpcError):
    """Training cannot go on, for example because the loss is not a number."""

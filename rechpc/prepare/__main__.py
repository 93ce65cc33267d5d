"""The command: converts, says what the data set holds and what to do next."""

import shlex
import signal
import sys

from rechpc import compose
from rechpc.config import CommandConfig
from rechpc.prepare.convert import prepare

HELP = """
Convert a click log into the data set that a run reads.

  python -m rechpc.prepare experiment=criteo_8k data.source=DIR data.path=OUT

data.source    a folder with train.*, test.* and, if you have it, val.* (also valid or dev), or with folders of these
               names that hold the parts of a split, or with Criteo's day_0, day_1 ..., of which the last becomes val
               and test; or one file, of which the first 80 % become the train split, then 10 % val and 10 % test
data.path      the data set to make; it must not exist
data.bad_rows  fail (the default), skip or fix; at most data.max_bad_rows=1000 are skipped or fixed

What the files are (text of Criteo, CSV, Parquet, npy) and what becomes of each column is in conf/data, in the file
that data=NAME names; docs/data.md shows how to write one.
"""


def main(config: CommandConfig, overrides: list[str]) -> int:
    """Prepare the data set, say what it holds and what to do next."""
    try:
        report = prepare(config.data)
    except KeyboardInterrupt:
        print("interrupted: what was written so far is removed; start again when you like", file=sys.stderr)
        return 130
    print(report)
    done = {"data.source", "data.bad_rows", "data.max_bad_rows"}
    kept = [o for o in overrides if o.partition("=")[0].lstrip("+") not in done]
    print(f"next: {shlex.join(['python', '-m', 'rechpc.submit', *kept])}")
    return 0


if __name__ == "__main__":
    # So that a batch job at its time limit cleans up too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    compose.run(main, HELP)

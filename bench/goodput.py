"""What checkpoint.every=auto chooses, and the share of time that is training, for 8, 64 and 512 nodes.

    PYTHONPATH=. python bench/goodput.py            # with the defaults of the configuration, and the costs below
    PYTHONPATH=. python bench/goodput.py --stall-s 2 --duration-s 30 --restart-s 300 --node-mtbf-h 3600

A failure costs the restart and, on average, half an interval and the time until a checkpoint is complete.
"""

import argparse

from rechpc.config import CheckpointConfig
from rechpc.rank.saver import interval_s


def goodput(every_s: float, *, stall_s: float, duration_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of time that is training and is not lost."""
    return (1 - stall_s / every_s) * (1 - (restart_s + every_s / 2 + duration_s) / mtbf_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stall-s", type=float, default=2.0, help="of a save beside training (default: 2)")
    parser.add_argument("--duration-s", type=float, default=30.0, help="of that save (default: 30)")
    parser.add_argument("--restart-s", type=float, default=300.0, help="from a failure to the next step (default: 300)")
    parser.add_argument("--node-mtbf-h", type=float, default=CheckpointConfig().node_mtbf_h)
    options = parser.parse_args()
    print("| nodes | hours between failures | interval beside | goodput | interval waiting | goodput |")
    print("|---|---|---|---|---|---|")
    for nodes in (8, 64, 512):
        mtbf_s = 3600 * options.node_mtbf_h / nodes
        row = f"| {nodes} | {mtbf_s / 3600:.1f} |"
        for stall_s in (options.stall_s, options.duration_s):  # beside training, and waited for
            every_s = interval_s(stall_s, options.duration_s, mtbf_s)
            share = goodput(
                every_s, stall_s=stall_s, duration_s=options.duration_s, restart_s=options.restart_s, mtbf_s=mtbf_s
            )
            row += f" {every_s / 60:.1f} min | {share:.2%} |"
        print(row)


if __name__ == "__main__":
    main()

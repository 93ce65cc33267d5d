"""`python -m rechpc.plan`: does a run fit, where do its tables go, how long is a step, and what to change if not."""

import sys
from pathlib import Path

from rechpc import compose
from rechpc.config import CommandConfig
from rechpc.errors import ConfigError
from rechpc.host import container, planner
from rechpc.planned import render, summary
from rechpc.rundir import write_json

HELP = """
python -m rechpc.plan [GROUP=OPTION ...] [KEY=VALUE ...]

Plan a run without a GPU, with the arguments that rechpc.submit would get. Needs torch here, or
container=apptainer container.image=IMAGE.sif.

  cluster=mi300x                  the hardware: conf/cluster; job.nodes=2 for more nodes
  sharding=row_wise               a sharding type for all tables; auto lets the planner choose
  'sharding.tables={t_c*: {types: [row_wise, column_wise], column_width: 64}}'
                                  for the tables whose names match
  optimizer=rowwise_adagrad  model.table_precision=fp16  sharding.kernel=fused_uvm_caching
                                  what saves memory
  sharding.forward_precision=fp16 what is sent between ranks
  -m job.nodes=1,2,4,8            a line for every size, to compare
  out=DIR/plan.json               the plan for programs

docs/sharding.md explains the choices, and reads a plan line by line.
"""


def main(command: CommandConfig, overrides: list[str]) -> int:
    """Print the plan, or what does not fit and what would; returns the exit status."""
    del overrides
    container.check(command.container)
    (answer,) = planner.answers([command])
    if "error" in answer:
        print(answer["error"])
        for change in answer["advice"]:
            print(f"fits with   {change}")
        return ConfigError.exit_status
    if command.out:
        write_json(Path(command.out), answer["plan"])
    print(render(answer["plan"], command), end="")
    return 0


def compare(runs: list[tuple[str, CommandConfig | ConfigError]]) -> int:
    """Print a line for every run; exit status 0 if one of them fits."""
    configs = [config for _, config in runs if isinstance(config, CommandConfig)]
    found = iter(planner.answers(configs))
    width = max(len(words) for words, _ in runs)
    fits = False
    for words, config in runs:
        if isinstance(config, ConfigError):
            line = f"refused: {config}"
        elif "error" in (answer := next(found)):
            line = "does not fit" + (f"; fits with {answer['advice'][0]}" if answer["advice"] else "")
        else:
            line, fits = summary(answer["plan"], config), True
        print(f"{words:{width}}  {line}")
    return 0 if fits else ConfigError.exit_status


if __name__ == "__main__":
    try:
        compose.run(main, HELP, each=compare)
    except KeyboardInterrupt:
        sys.exit(130)

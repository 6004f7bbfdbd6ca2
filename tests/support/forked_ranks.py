"""Two ranks as torchrun makes them, but as forks of this process, where torch is imported already.

Run as `-m tests.support.forked_ranks RESTARTS SCRIPT [ARGUMENTS…]`, by `run_forked`.
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def _run_script(*arguments: str) -> None:
    sys.argv = [*arguments]
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    restarts, *command = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(restarts),
        monitor_interval=0.1,
        role="default",  # as torchrun
        start_method="fork",
    )
    elastic_launch(config, _run_script)(*command)

"""Two ranks by `elastic_launch`, which takes a function; each is a process of multiprocessing."""

from elastic import train_rank
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="spawn",
    )
    elastic_launch(config, train_rank)()

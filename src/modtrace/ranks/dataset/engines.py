"""The same function for each bucket of a dataset: in processes here, or as tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ..._errors import ModtraceError
from ..._system.processes import map_in_processes, processor_count

__all__ = ["check_engine", "map_buckets"]

Result = TypeVar("Result")
Bucket = tuple[int, int]


def check_engine(engine: str) -> None:
    """Check the name of an engine: `local`, `ray` (the cluster that this machine is in) or `ray://HOST:PORT`.

    Raises:
        ModtraceError: it is none of them, or Ray is not installed.
    """
    if engine != "local" and engine != "ray" and not engine.startswith("ray://"):
        raise ModtraceError(f"there is no engine {engine!r}; there are local, ray and ray://HOST:PORT")
    if engine != "local" and importlib.util.find_spec("ray") is None:
        raise ModtraceError("Ray is not installed; install the version that the cluster runs (pip install ray)")


def map_buckets(
    function: Callable[..., Result], dataset: str, buckets: Sequence[Bucket], *arguments: Any, engine: str = "local"
) -> Iterator[tuple[Bucket, Result]]:
    """Yield what a function returns for each bucket, as they are done.

    Args:
        function: called with the dataset's path, the first step of a bucket, the one behind its last, and `arguments`;
            of a module that can be imported where it runs.
        dataset: its path; on a cluster a path that all of it can read.
        buckets: which.
        arguments: passed on.
        engine: see `check_engine`.
    """
    check_engine(engine)
    if engine != "local":
        yield from _by_ray(function, dataset, buckets, arguments, engine)
        return
    yield from map_in_processes(partial(_call, function, dataset, arguments), buckets, processor_count())


def _call(function: Callable[..., Result], dataset: str, arguments: Sequence[Any], bucket: Bucket) -> Result:
    return function(dataset, *bucket, *arguments)


def _by_ray(
    function: Callable[..., Result], dataset: str, buckets: Sequence[Bucket], arguments: Sequence[Any], engine: str
) -> Iterator[tuple[Bucket, Result]]:
    ray: Any = importlib.import_module("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(address="auto" if engine == "ray" else engine, log_to_driver=False)
    try:
        task = ray.remote(function)
        left = {task.remote(os.path.abspath(dataset), *bucket, *arguments): bucket for bucket in buckets}
        while left:
            ready, _ = ray.wait(list(left))
            for done in ready:
                yield left.pop(done), ray.get(done)
    finally:
        if started:
            ray.shutdown()

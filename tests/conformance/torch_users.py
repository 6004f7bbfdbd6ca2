"""Torch's own users of its trackers: their counts for a model's modules, with torch's trackers or with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import mem_tracker, mod_tracker, runtime_estimator, sac_estimator
from torch.distributed.tensor.debug import _comm_mode
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import modtrace

__all__ = ["MODULES", "USERS", "Numbers", "counts_the_same", "swapped"]

Numbers = dict[str, Any]
"""Counts by module."""

MODULES = {"Net", "Net.head", *(f"Net.blocks.{n}{path}" for n in (0, 1) for path in ("", ".up", ".act", ".down"))}


class AllReduce(torch.autograd.Function):
    """A collective in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return collectives.all_reduce(x, "sum", dist.group.WORLD).wait()  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return collectives.all_reduce(gradient, "sum", dist.group.WORLD).wait()  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, reduce: bool) -> None:
        super().__init__()
        self.reduce = reduce
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.act(self.up(x)))
        return x + (AllReduce.apply(y) if self.reduce else y)


class Net(nn.Module):
    def __init__(self, checkpointed: bool, reduce: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block(reduce) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def _model(checkpointed: bool, reduce: bool = False) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(checkpointed, reduce), torch.ones(3, 16, requires_grad=True)


def _step(net: Net, x: Tensor) -> None:
    # Not a leaf: for a leaf, torch's trackers run operators of their own, which are counted.
    net(x.exp()).sum().backward()


def flops(checkpointed: bool) -> Numbers:
    net, x = _model(checkpointed)
    with flop_counter.FlopCounterMode(display=False) as mode:
        _step(net, x)
    return dict(mode.get_flop_counts())


def memory(checkpointed: bool) -> Numbers:
    net, x = _model(checkpointed)
    tracker = mem_tracker.MemTracker()
    tracker.track_external(net, x)
    with tracker:
        _step(net, x)
    return {
        stats.mod_fqn: (stats.parameter_mem, stats.input_mem, stats.output_mem, stats.snapshots)
        for stats in tracker.memory_tracking.values()
    }


def _one_millisecond(operator: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    return operator(*args, **(kwargs or {})), 1.0


def runtimes(checkpointed: bool) -> Numbers:
    estimator = runtime_estimator.RuntimeEstimator()("operator-level-cost-model")
    with FakeTensorMode(), redirect_stdout(None):
        net, x = _model(checkpointed)
        with mock.patch.object(estimator, "_estimate", _one_millisecond), estimator:
            _step(net, x)
    return {name: dict(times) for name, times in estimator.mod_runtimes.items()}


def activation_checkpointing(checkpointed: bool) -> Numbers:
    estimator = sac_estimator.SACEstimator()("operator-level-cost-model")
    with FakeTensorMode():
        net, x = _model(checkpointed)
        with mock.patch.object(estimator, "_estimate_runtime", _one_millisecond), estimator:
            net(x.exp()).sum()
    return {name: vars(stats) for name, stats in estimator.sac_mod_stats.items()}


def collective_counts(checkpointed: bool) -> Numbers:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    net, x = _model(checkpointed, reduce=True)
    mode = _comm_mode.CommDebugMode()
    for _ in range(2):  # the mode can be entered again
        with mode:
            _step(net, x)
    modules = mode.advanced_module_tracker
    with NamedTemporaryFile() as log:
        mode.generate_json_dump(log.name)
        tree = log.read()
    names = modules.module_helper_dict
    return {
        name: (mode.comm_module_counts.get(name), names[name], modules.module_parents_dict[name]) for name in names
    } | {"table": mode.generate_comm_debug_tracing_table(), "tree": tree, "after": (modules.parents, modules.name)}


def debug_log(checkpointed: bool) -> Numbers:
    net, x = _model(checkpointed)
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_nn_module=True) as mode:
        _step(net, x)
    return {"log": mode.debug_string()}


USERS: dict[str, Callable[[bool], Numbers]] = {
    "FlopCounterMode": flops,
    "MemTracker": memory,
    "RuntimeEstimator": runtimes,
    "SACEstimator": activation_checkpointing,
    "CommDebugMode": collective_counts,
}
if find_spec("torch.utils._debug_mode") is not None:  # torch 2.8 does not have it
    USERS["DebugMode"] = debug_log


@contextmanager
def swapped(module_tracker: Any, mod_tracker_class: Any) -> Iterator[None]:
    """Give torch's users these classes for `ModuleTracker` and `ModTracker`."""
    tracker_class, torch_bases = _comm_mode._CommModeModuleTracker, _comm_mode._CommModeModuleTracker.__bases__
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(flop_counter, "ModuleTracker", module_tracker))
        # DebugMode imports ModTracker from the module that defines it.
        for user in (mem_tracker, runtime_estimator, sac_estimator, mod_tracker):
            stack.enter_context(mock.patch.object(user, "ModTracker", mod_tracker_class))
        tracker_class.__bases__ = (mod_tracker_class,)
        stack.callback(setattr, tracker_class, "__bases__", torch_bases)
        yield


def counts_the_same(user: str, *, checkpointed: bool) -> bool:
    """Whether a user counts the same with our trackers as with torch's."""
    expected = USERS[user](checkpointed)
    with swapped(modtrace.ModuleTracker, modtrace.ModTracker):
        return USERS[user](checkpointed) == expected

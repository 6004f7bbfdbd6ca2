"""The rows of a summary: what one module took."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CPU_FIELDS", "GpuStepTimes", "GpuTotals", "ModuleTimes"]


class ModuleTimes(NamedTuple):
    """What one module took over the whole timeline; times are integer nanoseconds.

    A self time leaves out what inner modules took. A total is the self time of the module and of those inside it, in
    the same phase; a call within a call of the same module counts once. The totals of the three phases have no moment
    in common. A call inside backward counts to its module and to those that contain it by name, not to the module in
    whose backward it happens to lie. GPU times are sums of the durations of kernels, memcpys and memsets, wherever
    they overlap, without communication, which is counted apart; they are 0 in a summary without GPU columns.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`); empty in a summary by class.
        module_class: the name of its class (`Block`).
        calls: how often its forward ran; a recompute is not a call.
        forward_ns: total of forward on the CPU.
        forward_self_ns: of it, outside inner modules.
        backward_ns: total of backward on the CPU, without the calls inside it.
        backward_self_ns: of it, outside inner modules.
        recompute_ns: total of recompute on the CPU.
        recompute_self_ns: of it, outside inner modules.
        step_p50_ns: median, over the steps in which it ran, of the total of all phases in a step.
        step_p95_ns: of these totals, the one that 95 % of the steps do not exceed.
        kernels: kernels that the module itself launched.
        gpu_forward_ns: GPU time launched in forward, by it or its inner modules.
        gpu_forward_self_ns: of it, launched by itself.
        gpu_backward_ns: the same of backward, recompute included.
        gpu_backward_self_ns: of it, launched by itself.
        gpu_recompute_ns: the same of recompute.
        gpu_recompute_self_ns: of it, launched by itself.
        kernel_ns: of the GPU self times together, kernels.
        memcpy_ns: of the GPU self times together, memcpys.
        memset_ns: of the GPU self times together, memsets.
        collectives: operations of communication that the module itself launched: kernels of NCCL or RCCL, what else was
            launched for a collective, and collectives of gloo, which run on the CPU.
        communication_ns: durations of these, in all phases together; in no other GPU time.
        communication_overlap_ns: of this, while the same device computed (for gloo: while any module ran).
    """

    fqn: str
    module_class: str
    calls: int = 0
    forward_ns: int = 0
    forward_self_ns: int = 0
    backward_ns: int = 0
    backward_self_ns: int = 0
    recompute_ns: int = 0
    recompute_self_ns: int = 0
    step_p50_ns: int = 0
    step_p95_ns: int = 0
    kernels: int = 0
    gpu_forward_ns: int = 0
    gpu_forward_self_ns: int = 0
    gpu_backward_ns: int = 0
    gpu_backward_self_ns: int = 0
    gpu_recompute_ns: int = 0
    gpu_recompute_self_ns: int = 0
    kernel_ns: int = 0
    memcpy_ns: int = 0
    memset_ns: int = 0
    collectives: int = 0
    communication_ns: int = 0
    communication_overlap_ns: int = 0

    @property
    def total_ns(self) -> int:
        """The CPU totals of all phases together, in nanoseconds."""
        return self.forward_ns + self.backward_ns + self.recompute_ns

    @property
    def mean_ns(self) -> int:
        """The CPU total of all phases per call, in whole nanoseconds; 0 where no call was seen."""
        return self.total_ns // self.calls if self.calls else 0

    @property
    def self_ns(self) -> int:
        """The CPU self times of all phases together, in nanoseconds."""
        return self.forward_self_ns + self.backward_self_ns + self.recompute_self_ns

    @property
    def gpu_self_ns(self) -> int:
        """The GPU self times of all phases together, in nanoseconds; without communication."""
        return self.kernel_ns + self.memcpy_ns + self.memset_ns


CPU_FIELDS = ModuleTimes._fields[: ModuleTimes._fields.index("kernels")]
"""The fields of `ModuleTimes` that every summary has; the others are known only where there was a GPU."""


class GpuStepTimes(NamedTuple):
    """What was launched on GPUs in one step; times are integer nanoseconds.

    Attributes:
        step: its number.
        gpu_ns: durations of the kernels, memcpys and memsets that compute.
        communication_ns: durations of what belongs to collectives, those of gloo on the CPU too.
        communication_overlap_ns: of it, while the same device computed.
    """

    step: int
    gpu_ns: int = 0
    communication_ns: int = 0
    communication_overlap_ns: int = 0


class GpuTotals(NamedTuple):
    """GPU time of a whole trace, in integer nanoseconds; the rows of its summary add up to it.

    Attributes:
        kernel_ns: durations of all kernels that compute.
        memcpy_ns: durations of all memcpys.
        memset_ns: durations of all memsets.
        communication_ns: durations of all that belongs to collectives, those of gloo on the CPU too.
        communication_overlap_ns: of it, while the same device computed.
    """

    kernel_ns: int
    memcpy_ns: int
    memset_ns: int
    communication_ns: int = 0
    communication_overlap_ns: int = 0

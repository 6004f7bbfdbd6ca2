"""FLOPs: the formulas of operators, torch's own and a few that it lacks, and the cost of an operator with its inputs.

A formula runs once for each operator and shapes of its inputs, between the user's calls: one formula with every fourth
outermost call, and the others before the ring is read.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils import flop_counter

from ..._interrupts import raised_by_handler
from ...ring import NameTable
from ...timeline.slices import UNKNOWN_FLOPS
from ..unseen import unseen_by_modes

Formula = Callable[..., int]

_ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_MORE_FORMULAS: Mapping[str, Formula] = {
    "aten::_addmm_activation": flop_counter.addmm_flop,
    _ATTENTION_ON_CPU: flop_counter.sdpa_flop,
    f"{_ATTENTION_ON_CPU}_backward": flop_counter.sdpa_backward_flop,
}
"""Formulas that torch up to 2.13 lacks; registered formulas take precedence."""


def formula_by_operator() -> dict[str, Formula]:
    """Return the formulas by the names of their operators (`aten::addmm`)."""
    registered = {
        operator._qualified_op_name: formula
        for operator, formula in flop_counter.flop_registry.items()
        if isinstance(operator, torch._ops.OpOverloadPacket)
    }
    return {**_MORE_FORMULAS, **registered}


_log = logging.getLogger("modtrace")

_WITHOUT_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn"),
        *("miopen_rnn_backward", "mkldnn_linear", "mkldnn_linear_backward", "mv", "addmv", "dot", "vdot", "addr"),
        *("_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm", "_grouped_mm", "_scaled_grouped_mm", "_fft_r2c"),
        *("_fft_c2r", "_fft_c2c", "_cdist_forward", "_trilinear", "linalg_lu_factor_ex", "_linalg_svd"),
    )
)
"""Operators with much work and no formula in torch: a recording names those that it sees."""
_MAX_FLOPS = 2**63 - 1


class NativeFlops:
    """Gives the native engine the operators to count, and writes their costs."""

    def __init__(self, native: ModuleType, table: NameTable) -> None:
        self._native, self._table = native, table
        self._formulas: dict[str, Formula] = {}
        self._formula_count = 0  # number of formulas in torch's registry at the last read
        self._failed_names: set[str] = set()
        self._shown_operators: list[Any] = []  # operators that torch would otherwise call without its callbacks

    def start(self) -> None:
        """Count operators in the running session."""
        self._formula_count = 0
        self._native.start_flops(self._operators, self.answer)

    def stop(self) -> None:
        """Stop counting: torch calls the operators as before."""
        while self._shown_operators:
            self._shown_operators.pop()._enable_pyobj_dispatch(True)

    def _operators(self) -> tuple[str, ...] | None:
        """Return the names of the operators to count; None if they are unchanged."""
        if self._formula_count == len(flop_counter.flop_registry):
            return None
        self._formula_count = len(flop_counter.flop_registry)
        self._formulas = formula_by_operator()
        self._show(operator for operator in flop_counter.flop_registry if not str(operator).startswith("aten."))
        return (*self._formulas, *(_WITHOUT_FORMULA - self._formulas.keys()))

    def _show(self, operators: Iterable[Any]) -> None:
        """Let torch's callbacks see operators of `custom_op`, which torch 2.14 calls without its dispatcher."""
        for operator in operators:
            for name in operator._overload_names if isinstance(operator, torch._ops.OpOverloadPacket) else ():
                overload = getattr(operator, name or "default")
                if getattr(overload, "_pyobj_dispatcher", None) is not None:
                    self._shown_operators.append(overload)
                    overload._enable_pyobj_dispatch(False)

    def answer(self, at_most: int = sys.maxsize) -> None:
        """Write the costs of counted operators; a formula's random numbers do not change the user's random state."""
        operators = self._native.take_operators(at_most)
        if not operators:
            return
        random_state = torch.default_generator.get_state()
        for number, name, overload, device, nbytes, inputs, outputs in operators:
            tensor = next(filter(torch.is_tensor, inputs), None)
            dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            flops = self._count(name, overload, inputs, outputs)
            self._table.operator(number, name, _device_name(device), dtype, flops, nbytes)
        torch.default_generator.set_state(random_state)

    def _count(self, name: str, overload: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Return the FLOPs of an operator; `UNKNOWN_FLOPS` if its formula fails."""
        formula = self._formulas.get(name)
        if formula is None:
            return UNKNOWN_FLOPS
        try:
            with unseen_by_modes():
                args, kwargs = _as_called(name, overload, inputs)
                output = outputs[0] if len(outputs) == 1 else tuple(outputs)
                flops = int(formula(*args, **kwargs, out_val=output))
            if not 0 <= flops <= _MAX_FLOPS:
                raise OverflowError(f"{flops} FLOPs")
            return flops
        except (Exception, SystemExit) as error:
            if raised_by_handler(error):
                raise
            if name not in self._failed_names:
                self._failed_names.add(name)
                _log.warning("flops: the formula of %s failed, so it is not counted: %r", name, error)
            return UNKNOWN_FLOPS


@cache
def _device_name(device_type: str) -> str:
    """Return the name of the device of a type; the type itself for the CPU, or if the name is not known."""
    try:
        return str(torch.get_device_module(device_type).get_device_name())
    except Exception:  # a user's backend may raise anything
        return device_type


def _as_called(name: str, overload: str, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as a dispatch mode gets them: keyword-only ones by name, and no defaults at the end."""
    args: list[Any] = []
    given_count = 0  # number of positional arguments up to the last one that is not the default
    kwargs = {}
    for (argument, has_default, default, kwarg_only), value in zip(_arguments(name, overload), inputs, strict=True):
        is_same = type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default
        is_given = not (has_default and is_same)
        if not kwarg_only:
            args.append(value)
            given_count = len(args) if is_given else given_count
        elif is_given:
            kwargs[argument] = value
    return args[:given_count], kwargs


@cache
def _arguments(name: str, overload: str) -> list[tuple[str, bool, Any, bool]]:
    """Return (name, whether there is a default, the default, whether it is keyword-only) for each argument."""
    namespace, _, operator = name.partition("::")
    schema = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")._schema
    return [(a.name, a.has_default_value(), a.default_value, a.kwarg_only) for a in schema.arguments]

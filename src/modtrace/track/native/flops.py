"""FLOPs: which operators have a formula, and what an operator costs with certain inputs.

The formulas are torch's own registry, `torch.utils.flop_counter.flop_registry`, to which users add theirs by
`register_flop_formula`. The native engine asks once for each operator with inputs of certain shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils import flop_counter

from ...ring import NameTable
from ...ring.operator_text import OperatorName, operator_text
from ..tensors import unseen_by_modes

_log = logging.getLogger("modtrace")

_Formula = Callable[..., int]

_ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_MORE_FORMULAS: Mapping[str, _Formula] = {
    "aten::_addmm_activation": flop_counter.addmm_flop,
    _ATTENTION_ON_CPU: flop_counter.sdpa_flop,
    f"{_ATTENTION_ON_CPU}_backward": flop_counter.sdpa_backward_flop,
}
"""Those that torch up to 2.13 lacks; one that is registered comes first."""
_WITHOUT_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn"),
        *("miopen_rnn_backward", "mkldnn_linear", "mkldnn_linear_backward", "mv", "addmv", "dot", "vdot", "addr"),
        *("_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm", "_grouped_mm", "_scaled_grouped_mm", "_fft_r2c"),
        *("_fft_c2r", "_fft_c2c", "_cdist_forward", "_trilinear", "linalg_lu_factor_ex", "_linalg_svd"),
    )
)
"""Operators that compute much and that torch has no formula for: a recording names those that it met."""
_MAX_FLOPS = 2**63 - 1
UNKNOWN_FLOPS = -1


class NativeFlops:
    """Answers what the native engine asks to count operators.

    Args:
        native: the engine's extension module.
        table: gives out ids.
    """

    def __init__(self, native: ModuleType, table: NameTable) -> None:
        self._native = native
        self._table = table
        self._formulas: dict[str, _Formula] = {}
        self._failed: set[str] = set()

    def start(self) -> None:
        """Count operators in the session that runs."""
        self._formulas = {}
        self._native.start_flops(self._operators, self._count)

    def _operators(self) -> tuple[str, ...] | None:
        """Return the names of the operators to note; None if they are the same as before."""
        registered = {
            operator._qualified_op_name: formula
            for operator, formula in flop_counter.flop_registry.items()
            if isinstance(operator, torch._ops.OpOverloadPacket)
        }
        formulas = {**_MORE_FORMULAS, **registered}
        if formulas.keys() == self._formulas.keys():
            return None
        self._formulas = formulas
        return (*formulas, *(_WITHOUT_FORMULA - formulas.keys()))

    def _count(self, ran: tuple[str, str, str, Sequence[Any], Sequence[Any]]) -> tuple[int, int]:
        """Return what an operator costs, and the id of its text.

        Args:
            ran: its name and overload, the device that it ran on, its inputs and outputs: tensors are on `meta`.
        """
        name, overload, device, inputs, outputs = ran
        dtype = next((str(one.dtype).removeprefix("torch.") for one in inputs if isinstance(one, torch.Tensor)), "")
        text = self._table.text(operator_text(OperatorName(name, _device_name(device), dtype)))
        formula = self._formulas.get(name)
        if formula is None:
            return UNKNOWN_FLOPS, text
        try:
            with unseen_by_modes():
                args, kwargs = _as_called(name, overload, inputs)
                out = outputs[0] if len(outputs) == 1 else tuple(outputs)
                flops = int(formula(*args, **kwargs, out_val=out))
            if not 0 <= flops <= _MAX_FLOPS:
                raise OverflowError(f"{flops} FLOPs")
            return flops, text
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                _log.warning("flops: the formula of %s failed, so it is not counted: %r", name, error)
            return UNKNOWN_FLOPS, text


@cache
def _device_name(device_type: str) -> str:
    """Return what a device of this type is called; the type itself for the CPU, and where that is not known."""
    try:
        return str(torch.get_device_module(device_type).get_device_name())
    except Exception:  # a backend of one's own can do as it likes
        return device_type


def _as_called(name: str, overload: str, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as a dispatch mode gets them: without defaults at the end, and some by keyword."""
    namespace, _, operator = name.partition("::")
    schema = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")._schema
    args: list[Any] = []
    given = 0
    kwargs = {}
    for argument, value in zip(schema.arguments, inputs, strict=True):
        is_given = not argument.has_default_value() or not _is_same(value, argument.default_value)
        if not argument.kwarg_only:
            args.append(value)
            given = len(args) if is_given else given
        elif is_given:
            kwargs[argument.name] = value
    return args[:given], kwargs


def _is_same(value: object, default: object) -> bool:
    return type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default

"""The formulas for FLOPs: torch's own registry, `torch.utils.flop_counter.flop_registry`, and a few that it lacks.

Users add theirs to the registry by `register_flop_formula`.
"""

from collections.abc import Callable, Mapping

import torch
from torch.utils import flop_counter

Formula = Callable[..., int]

_ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_MORE_FORMULAS: Mapping[str, Formula] = {
    "aten::_addmm_activation": flop_counter.addmm_flop,
    _ATTENTION_ON_CPU: flop_counter.sdpa_flop,
    f"{_ATTENTION_ON_CPU}_backward": flop_counter.sdpa_backward_flop,
}
"""Those that torch up to 2.13 lacks; one that is registered comes first."""


def formula_by_operator() -> dict[str, Formula]:
    """Return the formulas by the names of their operators (`aten::addmm`)."""
    registered = {
        operator._qualified_op_name: formula
        for operator, formula in flop_counter.flop_registry.items()
        if isinstance(operator, torch._ops.OpOverloadPacket)
    }
    return {**_MORE_FORMULAS, **registered}

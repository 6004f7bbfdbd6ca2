"""How a ring writes down which operator ran: its name, the device it ran on, and the type of its numbers."""

from __future__ import annotations

import json
from typing import NamedTuple


class OperatorName(NamedTuple):
    """What an operator is called.

    Attributes:
        name: as torch has it (`aten::addmm`).
        device: the type of the device of its first tensor (`cpu`, `cuda`).
        dtype: the type of that tensor's numbers (`bfloat16`).
    """

    name: str
    device: str = ""
    dtype: str = ""


def operator_text(operator: OperatorName) -> str:
    """Return the text of an operator: a JSON array (`["aten::addmm", "cpu", "float32"]`)."""
    return json.dumps(operator)


def parse_operator(text: str) -> OperatorName:
    """Return the operator in a text; any text is one, as a ring can be damaged."""
    try:
        match json.loads(text):
            case [str(name), str(device), str(dtype)]:
                return OperatorName(name, device, dtype)
    except (ValueError, RecursionError):
        pass
    return OperatorName(text)

"""How a ring writes down the name of a range and its category."""

import json
from typing import Literal, NamedTuple, get_args

RangeCategory = Literal[
    "user", "data loading", "optimizer", "communication", "gc", "compile", "saving", "evaluation", "generate", "torch"
]
CATEGORIES: tuple[RangeCategory, ...] = get_args(RangeCategory)
"""What a range is for. `user` is a name of the user's, `torch` one that torch gives and that fits no other.

No engine writes `evaluation`: these are found among the calls.
"""

EVAL, TRAIN = "Module.eval#", "Module.train#"
"""How the names begin of calls that switch a module to eval mode, and back."""

_PLACES = {"optimizer": "the optimizer", "gc": "garbage collection", "compile": "compilation"}


class RangeName(NamedTuple):
    """What a range is called."""

    name: str  # as torch or the user calls it
    category: str  # one of `CATEGORIES`

    @property
    def place(self) -> str:
        """What a sentence calls the place where a thread is: by its category; a range of the user's by its name."""
        return f"range {self.name}" if self.category == "user" else _PLACES.get(self.category, self.category)


def range_text(name: str, category: RangeCategory) -> str:
    """Return the text of a range's name: a JSON array, `["optimizer", "Optimizer.step#AdamW.step"]`."""
    return json.dumps([category, name])


def parse_range(text: str) -> RangeName:
    """Parse the text of a range's name. Any text gives a name, since a ring can be damaged."""
    try:
        match json.loads(text):
            case [str(category), str(name)] if category in CATEGORIES:
                return RangeName(name, category)
    except (ValueError, RecursionError):
        pass
    return RangeName(text, "user")

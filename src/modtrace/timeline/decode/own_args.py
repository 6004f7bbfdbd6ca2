"""What single spans hold beyond the fields that all have: shapes, and the modules inside of what was compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..._typing import AnyArray, Int64Array
from ...ring import Events, Kind, Record
from ..columns import BACKWARD

__all__ = ["find_own_args"]


def find_own_args(
    events: Events, texts: Sequence[str], records: Sequence[Record], rows: Mapping[str, AnyArray]
) -> dict[int, Mapping[str, str]]:
    """Return the args of the spans that have some, by index of the span.

    Args:
        events: what was recorded.
        texts: of the name table.
        records: the name table.
        rows: of each span `start_position`, `phase` and `name`.
    """
    shapes = _shapes(events, texts, rows["start_position"], rows["phase"])
    compiled = {record["name"]: record["modules"] for record in records if record["kind"] == "compiled"}
    if not compiled:
        return {span: {"shapes": text} for span, text in shapes.items()}
    modules = {span: compiled[name] for span, name in enumerate(rows["name"].tolist()) if name in compiled}
    return {
        span: {
            **({"shapes": shapes[span]} if span in shapes else {}),
            **({"compiled_modules": modules[span]} if span in modules else {}),
        }
        for span in sorted(shapes.keys() | modules.keys())
    }


def _shapes(events: Events, texts: Sequence[str], start_position: Int64Array, phase: AnyArray) -> dict[int, str]:
    """Return the shapes of the calls that have them, by index of the span."""
    shapes = np.flatnonzero(events.kind == Kind.SHAPES)
    if not len(shapes):
        return {}
    by_thread = np.lexsort((np.arange(len(events)), events.thread))
    before = np.empty(len(events), np.int64)
    before[by_thread] = np.roll(by_thread, 1)
    # The shapes of a call stand just behind its enter, on the same thread.
    span_at = {position: span for span, position in enumerate(start_position.tolist()) if phase[span] != BACKWARD}
    enters = (2 * before[shapes] + 1).tolist()
    return {
        span_at[enter]: texts[events.name[index]]
        for index, enter in zip(shapes.tolist(), enters, strict=True)
        if enter in span_at
    }

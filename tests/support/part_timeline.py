"""A training whose steps have the parts that a test says: the timeline of a ring as a loop by hand would fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeCategory, range_text
from modtrace.ring.slot_format import COLLECTED_BITS, GENERATION_BITS, NO_NAME
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline

__all__ = ["LAYERS", "part_timeline"]

LAYERS = 8
_RANGES: dict[str, tuple[str, RangeCategory]] = {
    "data loading": ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading"),
    "compile": ("torch.compile 0/1", "compile"),
    "clip": ("clip_grad_norm_", "optimizer"),
    "optimizer": ("Optimizer.step#SGD.step", "optimizer"),
    "saving": ("torch.save", "saving"),
    "evaluation": ("evaluation", "evaluation"),
}
_ORDER = ("data loading", "compile", "forward", "loss", "gc", "backward", "clip", "optimizer", "saving", "other")


def part_timeline(steps: Sequence[Mapping[str, int]], layers: int = LAYERS) -> Timeline:
    """Return steps of a model, whose parts take these nanoseconds.

    `clip` is a part of the optimizer's. An evaluation comes before the end of its step; other names are ranges of the
    user's.
    """
    script, now = EventScript(capacity=64 * len(steps) + 64), 1
    net, *inner = (script.name(fqn, fqn, "Net") for fqn in ("Net", *(f"Net.h.{layer}" for layer in range(layers))))
    ranges = 0
    for number, parts in enumerate(steps):
        for part in (*_ORDER, *(parts.keys() - {*_ORDER})):
            start, end = now, now + parts.get(part, 0)
            now = end
            if end == start or part in {"loss", "other"}:
                continue
            if part == "forward":
                script.enter(start, net)
                for index, layer in enumerate(inner):
                    script.enter(start + (end - start) * index // layers, layer)
                    script.exit(start + (end - start) * (index + 1) // layers, layer)
                script.exit(end, net)
            elif part == "backward":
                script.pass_begin(start, number)
                script.pass_end(end, number)
            elif part == "gc":
                value = (end - start) << COLLECTED_BITS + GENERATION_BITS
                script.event(end, Kind.COLLECTION, NO_NAME, value | 2)
            else:
                ranges += 1
                text = range_text(*_RANGES.get(part, (part, "user")))
                script.collective(start, Kind.RANGE_BEGIN, text, ranges)
                script.collective(end, Kind.RANGE_END, text, ranges)
        script.step(now, number)
    return build_timeline(script.snapshot())

"""The timeline of a large ring whose spans of modules are never in memory together: for writing it to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..._typing import Int64Array
from ..args import Value, distinct_args
from ..contents import WHOLE_RUN
from ..join import put_modules_before
from ..select import keep_rows
from ..slices import COLLECTIVE, MODULE, Slices
from ..summary.parts import DividedSteps, divide_piece
from ..timeline import Timeline
from .analysis import RingAnalysis
from .from_ring import ModuleSpans, assemble_timeline, describe_whole_run, join_modules
from .pieces import ReadRing, RingPieces, find_pieces, place_among


@dataclass(frozen=True)
class LargeTimeline:
    """The timeline of a large ring; its spans of modules are decoded whenever they are asked for, piece by piece.

    Attributes:
        rest: the timeline without spans of modules, but with their tracks and names.
        uses: int64[names], how many spans have each name.
        args: what spans hold beyond the fields that all have, without repetitions.
        divided: its steps in parts, piece by piece.
        start_ns: when the first span of a module begins.
        spans: how many spans of modules there are.
        pieces: yields timelines of them, in order, that have the names and tracks of `rest`.
    """

    rest: Timeline
    uses: Int64Array
    args: list[Mapping[str, Value]]
    divided: list[DividedSteps]
    start_ns: int
    spans: int
    pieces: Callable[[], Iterator[Timeline]]


def find_large(read: ReadRing, serials: range) -> LargeTimeline | None:
    """Return the timeline of a large ring; None if it is not large, or only all its spans together say what is written.

    Args:
        read: reads some of its events.
        serials: those of the ring.
    """
    ring = find_pieces(read, serials)
    # It is read twice: a process that writes to it would overwrite some of it meanwhile.
    return None if ring is None or ring.others.snapshot.writer == "running" else _look_through(ring)


def _look_through(ring: RingPieces) -> LargeTimeline | None:
    """Decode each piece once, and keep of its spans only what is needed to write them."""
    others = ring.others
    is_used = np.zeros(2 * len(others.lookup.threads), np.bool_)
    uses = np.zeros(len(others.lookup.names), np.int64)
    args = dict[tuple[tuple[str, Value], ...], Mapping[str, Value]]()
    firsts, divided, keys, spans = list[ModuleSpans](), list[DividedSteps](), np.zeros(0, np.int64), 0

    def look(piece: RingAnalysis, modules: ModuleSpans) -> None:
        """Keep the first spans of tracks that had none, and all that is not about single spans."""
        nonlocal keys
        columns = modules.columns
        keys, first = np.unique(columns["track"], return_index=True)
        first = first[~is_used[keys]]
        few = {field: column[first] for field, column in columns.items()} | {"parent": np.full(len(first), -1)}
        firsts.append(place_among(others, piece, modules._replace(columns=few, args={})))
        uses[:] += np.bincount(columns["name"], minlength=len(uses))
        args.update((tuple(kind.items()), kind) for kind in distinct_args(modules.args)[2])

    for timeline in ring.timelines(look):
        divided.append(divide_piece(timeline, "optimizer"))
        is_used[keys[timeline.columns.track]] = True
        spans += len(timeline.columns)
    whole = assemble_timeline(others, join_modules(firsts), ring.memory, ring.open_at_end)
    if np.any(whole.slices.kind == COLLECTIVE):
        return None  # arrows lead from spans to collectives
    run = describe_whole_run(others.snapshot, others.step_ends.number, spans)
    rest = replace(
        keep_rows(whole, np.flatnonzero(whole.slices.kind != MODULE)), metadata={**whole.metadata, WHOLE_RUN: run}
    )
    used = np.flatnonzero(is_used)

    def pieces() -> Iterator[Timeline]:
        first_link = 0
        for piece in ring:
            modules = ring.decode(piece)
            link = modules.columns["link"]
            link[link >= 0] += first_link
            first_link = max(first_link, int(link.max(initial=-1)) + 1)
            track = np.searchsorted(used, modules.columns["track"]).astype(np.int32)
            nothing = replace(rest, slices=Slices.empty())
            yield put_modules_before(nothing, modules.columns | {"track": track}, modules.args)

    start_ns = int(whole.columns.start[0])
    uses = np.pad(uses, (0, len(rest.names) - len(uses)))  # those of ranges come last
    return LargeTimeline(rest, uses, [*args.values()], divided, start_ns, spans, pieces)

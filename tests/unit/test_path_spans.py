"""Slices cut from pieces of work, and slices that nest in every reading of their times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modtrace.profiler.merged_json import nest_after_rounding, perfetto_rounding, time_quantum_ns
from modtrace.timeline.nesting import LabelledInterval, PathSpan, clip_and_nest, spans_from_intervals


def test_neighbours_share_the_slices_of_their_common_calls() -> None:
    #   a a a a a . b
    #     c c   c
    pieces = [
        LabelledInterval(0, 10, "a"),
        LabelledInterval(10, 20, "ac"),
        LabelledInterval(25, 30, "ac"),
        LabelledInterval(30, 40, "a"),
        LabelledInterval(41, 50, "ac"),
    ]
    pieces += [LabelledInterval(60, 70, ""), LabelledInterval(70, 80, "b")]
    assert spans_from_intervals(pieces) == [
        PathSpan(0, 50, "a", 0),
        PathSpan(10, 30, "c", 1),
        PathSpan(41, 50, "c", 1),
        PathSpan(70, 80, "b", 0),
    ]


def test_an_interval_that_overlaps_the_next_ends_where_that_begins() -> None:
    assert spans_from_intervals(
        [LabelledInterval(0, 100, "ab"), LabelledInterval(50, 60, "a"), LabelledInterval(55, 70, "c")]
    ) == [
        PathSpan(0, 55, "a", 0),
        PathSpan(0, 50, "b", 1),
        PathSpan(55, 70, "c", 0),
    ]


piece = st.tuples(st.integers(0, 200), st.integers(1, 40), st.text("abc", max_size=4))


@given(st.lists(piece, max_size=30))
def test_cover_nests_and_holds_each_piece(rows: list[tuple[int, int, str]]) -> None:
    pieces, end = [], 0
    for gap, length, path in rows:
        pieces.append(LabelledInterval(end + gap, end + gap + length, path))
        end += gap + length
    slices = spans_from_intervals(pieces)
    for one in slices:
        for other in slices:
            apart = one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
            inside = one.start_ns <= other.start_ns and other.end_ns <= one.end_ns
            assert apart or inside or (other.start_ns <= one.start_ns and one.end_ns <= other.end_ns)
    for start, end, keys in pieces:
        around = [str(s.key) for s in slices if s.start_ns <= start and end <= s.end_ns]
        assert around == list(keys)


spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30)


@pytest.mark.parametrize("base", [0, 4_458_676_522_690_655, 7_900_000_000_000_123, 1_712_195_495_519_689_047_000])
@example([(0, 0, 385), (0, 384, 0), (0, 385, 0)])
@example([(0, 0, 299), (0, 0, 298), (0, 297, 0), (0, 298, 1), (0, 299, 9)])
@given(spans)
def test_rounded_slices_nest_in_both_readings(base: int, rows: list[tuple[int, int, int]]) -> None:
    base = base % (1 << 62)
    track, start, length = np.array(rows, np.int64).reshape(-1, 3).T
    order = np.lexsort((-length, start, track))
    track, start, length = track[order], start[order] + base, length[order]
    end, parent, depth = clip_and_nest(track, start, start + length, np.zeros(len(track), np.int64))
    begin, lasts = nest_after_rounding(track, start, end, parent, depth, time_quantum_ns(int(end.max(initial=0))))
    assert (lasts >= 0).all()
    # One step at most; one more for each further level of slices that start and end within one step, see below.
    assert (np.abs(begin - start) <= 250 * max(1, depth.max(initial=0))).all()
    for reading in (begin, perfetto_rounding(begin)):
        for at, around in enumerate(parent.tolist()):
            if around >= 0:
                assert reading[around] <= reading[at]
                assert reading[at] + lasts[at] <= reading[around] + lasts[around]
        for one in range(len(begin)):
            for other in range(one + 1, len(begin)):
                beside = track[one] == track[other] and parent[one] == parent[other]
                if beside and lasts[one]:
                    assert reading[one] + lasts[one] <= reading[other]


def test_slices_that_end_within_one_step_start_one_step_apart_per_level() -> None:
    # Read exactly, the starts lie at 0, 0, 250, 500 and 750, otherwise at 0, 0, 256, 600 and 768 from the first.
    # [[[] ][ ]][ ]: 297, 298 and 299 lie on one step of 250 ns, where the readings' distances from 0 differ.
    base = 1_259_982_683_128_134_616
    start = base + np.array([0, 0, 297, 298, 299])
    end = base + np.array([299, 298, 297, 299, 308])
    parent, depth = np.array([-1, 0, 1, 0, -1]), np.array([0, 1, 2, 1, 0])
    begin, duration = nest_after_rounding(np.zeros(5, np.int64), start, end, parent, depth, 250)
    assert (begin - base).tolist() == [-116, -116, 134, 384, 634]
    assert duration.tolist() == [600, 419, 163, 0, 0]


def test_perfetto_rounding_equals_the_trace_processors() -> None:
    # Values that the trace processor v52 read: a nanosecond more at x.605 µs, and steps of 256 ns since 1970.
    relative = {
        4458676522690604: 4458676522690604,
        4458676522690605: 4458676522690606,
        4458676522690615: 4458676522690615,
    }
    absolute = {1712195495519689000: 1712195495519689000, 1712195495519689250: 1712195495519689216}
    known = relative | absolute
    assert perfetto_rounding(np.array(list(known), np.int64)).tolist() == list(known.values())

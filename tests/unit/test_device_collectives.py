"""Collectives on a device: their calls and waits end on the host before they complete, so the ends prove nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.live.rank_state import read_rank_progress
from modtrace.live.streams import stream_states
from modtrace.ranks.rank_tables import collective_table
from modtrace.ranks.sync_points import sync_points
from modtrace.reporting.clean_timeline import clean_timeline
from modtrace.reporting.names import ReportNames
from modtrace.ring import Kind
from modtrace.timeline import RingAnalysis
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline

ON_CPU, ON_GPU, BARRIER = '["all_reduce", "0"]', '["all_reduce", "0", -1, "cuda"]', '["barrier", "0"]'


def three_collectives() -> EventScript:
    """A collective on the CPU, one on a GPU that is seen to be complete later, and a barrier, which blocks."""
    script = EventScript()
    script.note_group("0", "0-1", "default_pg")
    for base, text, counter in ((0, ON_CPU, 0), (100, ON_GPU, 1)):
        script.collective(base + 10, Kind.COLLECTIVE_ENTER, text, counter)
        script.collective(base + 20, Kind.COLLECTIVE_EXIT, text, 64)
        script.collective(base + 30, Kind.WAIT_ENTER, text, counter)
        script.collective(base + 40, Kind.WAIT_EXIT, text, counter)
        script.collective(base + 50, Kind.COLLECTIVE_DONE, text, counter)
    script.collective(210, Kind.COLLECTIVE_ENTER, BARRIER, 2)
    script.collective(220, Kind.COLLECTIVE_DONE, BARRIER, 2)
    script.collective(230, Kind.COLLECTIVE_EXIT, BARRIER, 0)
    return script


def timeline() -> Timeline:
    return build_timeline(three_collectives().snapshot())


def test_the_end_on_a_device_is_not_known() -> None:
    rows = timeline().collectives

    assert [(row.operator, row.device, row.done_ns and row.done_ns - WALL) for row in rows if not row.is_wait] == [
        *(("all_reduce", "", 50), ("all_reduce", "cuda", None), ("barrier", "", 220)),
    ]
    assert [(row.counter, row.device) for row in rows if row.is_wait] == [(0, ""), (1, "cuda")]
    assert rows.on_device.tolist() == [False, False, True, True, False]


def test_a_wait_for_a_device_is_not_a_wait_for_other_ranks() -> None:
    points = sync_points(timeline().collectives)
    table = collective_table(timeline(), 7)

    assert points.counter.tolist() == [0, 1, 2]
    assert points.released_ns.tolist() == [WALL + 50, -1, WALL + 220]
    # Ranks are compared by callers and times; the wait belongs to no collective that ranks share.
    assert table.counter.tolist() == [0, 0, 1, -1, 2]
    assert np.where(table.done_ns >= 0, table.done_ns - WALL, -1).tolist() == [50, -1, -1, -1, 220]


def test_where_does_not_use_the_end_of_a_wait_for_a_device() -> None:
    script = three_collectives()
    for text, counter in ((ON_GPU, 3), (ON_CPU, 4)):
        script.collective(300 + counter, Kind.COLLECTIVE_ENTER, text, counter)
        script.collective(310 + counter, Kind.COLLECTIVE_EXIT, text, 64)
        script.collective(320 + counter, Kind.WAIT_ENTER, text, counter)
        script.collective(330 + counter, Kind.WAIT_EXIT, text, counter)

    (group,) = read_rank_progress(RingAnalysis(script.snapshot())).groups

    assert group.last == 4
    assert group.blocked is not None
    assert (group.blocked.operator, group.blocked.counter) == ("all_reduce", 3)


def with_device_times(read: int = 9) -> EventScript:
    """A module calls a collective that its stream runs; another is waited for twice, later; a third never is.

    The device runs 1 ms behind the host; its clock is 10 ms ahead of the host's. Its first `read` events are read.
    """
    script = EventScript(capacity=256)
    script.event(5, Kind.DEVICE_STREAM, 0, 7)
    script.device_clock(100, 0, 100 + 10_000_000)
    net = script.name("Net")
    times: list[tuple[int, Any, int | str]] = [
        *((1000, net, "enter"), (1100, Kind.COLLECTIVE_ENTER, 0), (1200, Kind.COLLECTIVE_EXIT, 0), (1300, net, "exit")),
        *((2000, Kind.COLLECTIVE_ENTER, 1), (3000, Kind.COLLECTIVE_ENTER, 2)),
        *((4000, Kind.WAIT_ENTER, 1), (4100, Kind.WAIT_EXIT, 1), (5000, Kind.WAIT_ENTER, 1), (5100, Kind.WAIT_EXIT, 1)),
    ]
    for number, (time, kind, counter_or_action) in enumerate(times):
        if counter_or_action == "enter":
            script.enter(time, net)
        elif counter_or_action == "exit":
            script.exit(time, net)
        else:
            script.collective(time, Kind(kind), ON_GPU, int(counter_or_action))
        script.queued(time + 1, number)
        if time in (2000, 3000):
            script.collective(time + 100, Kind.COLLECTIVE_EXIT, ON_GPU, 64)
    for number, (time, _, _) in enumerate(times[:read]):
        script.reached(20_000_000, number, time + 11_000_000)
    return script


def test_device_times_show_when_a_stream_reached_the_end_of_a_call_or_of_its_first_wait() -> None:
    timeline = build_timeline(with_device_times(read=10).snapshot())

    calls = [row for row in timeline.collectives if not row.is_wait]
    assert [row.done_ns and row.done_ns - WALL for row in calls] == [1_001_200, 1_004_100, None]
    # Events of collectives do not belong to the module around them.
    (span,) = [span for span in timeline.spans if span.track.startswith("gpu")]
    assert (span.fqn, span.start_ns - WALL, span.end_ns - WALL) == ("Net", 1_001_000, 1_001_300)
    # These times are of one rank's device; ranks are compared by their threads.
    assert sync_points(timeline.collectives).released_ns.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("read", "collective", "calls"),
    [
        *((1, "", ["Net"]), (2, "all_reduce", ["Net"]), (3, "", ["Net"]), (4, "", [])),
        # A collective that is only waited for runs on another stream.
        *((5, "", []), (6, "", []), (7, "all_reduce", []), (8, "", []), (9, "all_reduce", []), (10, "", [])),
    ],
)
def test_a_stream_is_in_a_collective_that_it_runs_or_waits_for(read: int, collective: str, calls: list[str]) -> None:
    (stream,) = stream_states(RingAnalysis(with_device_times(read).snapshot()), 21_000_000, is_running=True)

    assert (stream.collective, [call.fqn for call in stream.calls]) == (collective, calls)
    assert stream.unread == 10 - read
    assert stream.queued == 0


def test_where_ignores_collectives_whose_end_is_never_reported() -> None:
    script = three_collectives()  # its second collective, also on the GPU, is reported complete
    script.collective(300, Kind.COLLECTIVE_ENTER, ON_GPU, 3)
    script.collective(310, Kind.COLLECTIVE_EXIT, ON_GPU, 64 | 1 << 62)

    (group,) = read_rank_progress(RingAnalysis(script.snapshot())).groups

    assert (group.last, group.blocked) == (3, None)
    assert build_timeline(script.snapshot()).collectives[-1].nbytes == 64


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_saved_trace_marks_collectives_of_devices(suffix: str, tmp_path: Path) -> None:
    saved = timeline()
    saved.save(tmp_path / f"t{suffix}")

    assert list(modtrace.load(tmp_path / f"t{suffix}").collectives) == list(saved.collectives)


def test_a_report_has_only_device_names_of_torch() -> None:
    device_text = ON_GPU.replace("cuda", "acme_npu_v2")
    script = EventScript()
    for counter, text in enumerate((ON_GPU, device_text)):
        script.collective(10 + 20 * counter, Kind.COLLECTIVE_ENTER, text, counter)
        script.collective(20 + 20 * counter, Kind.COLLECTIVE_EXIT, text, 64)

    cleaned = clean_timeline(build_timeline(script.snapshot()), ReportNames(str))

    assert [row.device for row in cleaned.collectives] == ["cuda", "privateuseone"]

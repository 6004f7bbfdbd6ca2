"""Times of calls on a device, from events written by hand; all expected times are worked out on paper."""

from __future__ import annotations

import csv
import html
import json

import numpy as np
import pytest

from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME, SEQUENCE_BITS, STREAM_NUMBER_BITS
from modtrace.timeline.decode.analysis import device_clock
from modtrace.timeline.select import without_gpu
from modtrace.timeline.summary import summarize
from modtrace.timeline.summary.device_summary import DeviceModule, DeviceSummary, device_table
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline

AHEAD = 7_000_000
"""Lead of the device's clock over the host's, in ns."""


def on_device(timeline: Timeline) -> list[tuple[object, ...]]:
    """Track, name, phase, call, depth, start and end of each span on a device; times since `WALL`."""
    return [
        (span.track, span.fqn, span.phase, span.call, span.depth, span.start_ns - WALL, span.end_ns - WALL)
        for span in timeline.spans
        if span.track.startswith("gpu")
    ]


def script_with_clock() -> EventScript:
    """A script whose device's clock is known to ±50 ns."""
    script = EventScript(capacity=256)
    script.device_clock(50, 100, AHEAD)
    return script


def test_a_call_is_on_its_stream_while_the_device_ran_it() -> None:
    script = script_with_clock()
    net, layer = script.name("Net"), script.name("Net.layer")
    script.enter(1000, net)
    script.queued(1001, 0)
    script.enter(1100, layer, sequence=3)
    script.queued(1101, 1)
    script.exit(1200, layer, sequence=5)
    script.queued(1201, 2)
    script.exit(1300, net, sequence=5)
    script.queued(1301, 3)
    for number, host_ns in enumerate([5000, 6000, 8500, 9000]):
        script.reached(10_000 + number, number, AHEAD + host_ns)

    timeline = build_timeline(script.snapshot())

    assert on_device(timeline) == [
        ("gpu 0 · stream 0", "Net", "forward", 0, 0, 5000, 9000),
        ("gpu 0 · stream 0", "Net.layer", "forward", 0, 1, 6000, 8500),
    ]
    # 50 ns for the reading, 500 for an event, and 1,000 ppm of 9,000 ns because the clock was read once.
    assert timeline.metadata["device_clock_bound_ns"] == 559
    assert timeline.metadata["device_events_dropped"] == timeline.metadata["device_events_unread"] == 0
    # The spans on the host are the same as without a device.
    assert [(span.fqn, span.start_ns - WALL, span.end_ns - WALL) for span in timeline.spans][:2] == [
        ("Net", 1000, 1300),
        ("Net.layer", 1100, 1200),
    ]


def test_backward_ends_when_the_device_reaches_the_nodes_of_another_call() -> None:
    script = script_with_clock()
    net, first, second = script.name("Net"), script.name("Net.first"), script.name("Net.second")
    number = iter(range(100))
    script.enter(1000, net, sequence=10)
    script.queued(1001, next(number))
    for index, name in enumerate((first, second)):
        script.enter(1100 + 100 * index, name, sequence=10 + 2 * index)
        script.queued(1101 + 100 * index, next(number))
        script.exit(1150 + 100 * index, name, sequence=12 + 2 * index)
        script.queued(1151 + 100 * index, next(number))
    script.exit(1400, net, sequence=14)
    script.queued(1401, next(number))
    thread = script.add_thread("pt_autograd_0", tid=2)
    script.on_thread(thread)
    begins = [(2000, 15), (2100, 13), (2200, 11)]  # the loss, second, first
    for time, sequence in begins:
        script.event(time, Kind.SEGMENT_BEGIN, 1 << 8, 1 << SEQUENCE_BITS | sequence)
        script.queued(time + 1, next(number))
    script.backward_over(2300, graph_task=1)
    script.queued(2301, next(number))
    forward = [3000, 3000, 3100, 3100, 3300, 3300]
    for index, host_ns in enumerate([*forward, 4000, 4100, 4400, 5000]):
        script.reached(9000 + index, index, AHEAD + host_ns)

    assert on_device(build_timeline(script.snapshot())) == [
        ("gpu 0 · stream 0", "Net", "forward", 0, 0, 3000, 3300),
        ("gpu 0 · stream 0", "Net.first", "forward", 0, 1, 3000, 3100),
        ("gpu 0 · stream 0", "Net.second", "forward", 0, 1, 3100, 3300),
        ("gpu 0 · stream 0", "Net", "backward", 0, 0, 4100, 5000),
        ("gpu 0 · stream 0", "Net.second", "backward", 0, 1, 4100, 4400),
        ("gpu 0 · stream 0", "Net.first", "backward", 0, 1, 4400, 5000),
    ]


def test_streams_and_devices_have_tracks_by_the_ids_of_torch() -> None:
    script = script_with_clock()
    script.device_clock(60, 100, 2 * AHEAD + 10, device=1)
    net = script.name("Net")
    keys = [0, 1, 2 | 1 << STREAM_NUMBER_BITS]
    script.event(990, Kind.DEVICE_STREAM, keys[1], 35)
    for call, key in enumerate(keys):
        script.enter(1000 + 10 * call, net, call)
        script.queued(1001 + 10 * call, 2 * call, key)
        script.exit(1002 + 10 * call, net, call)
        script.queued(1003 + 10 * call, 2 * call + 1, key)
    for number in range(6):
        script.reached(2000 + number, number, (1 + number // 4) * AHEAD + 1500 + 10 * number)

    assert on_device(build_timeline(script.snapshot())) == [
        ("gpu 0 · stream 0", "Net", "forward", 0, 0, 1500, 1510),
        ("gpu 0 · stream 35", "Net", "forward", 1, 0, 1520, 1530),
        ("gpu 1 · stream 2", "Net", "forward", 2, 0, 1540, 1550),
    ]


def test_a_call_whose_events_are_on_two_streams_or_incomplete_has_no_span() -> None:
    script = script_with_clock()
    net = script.name("Net")
    number = 0
    for call, streams in enumerate([(0, 1), (NO_NAME, 0), (0, NO_NAME), (0, 0), (0, 0)]):
        script.enter(1000 + 10 * call, net, call)
        script.queued(1001 + 10 * call, number, streams[0])
        script.exit(1002 + 10 * call, net, call)
        script.queued(1003 + 10 * call, number + 1, streams[1])
        number += 2
    for read in (0, 1, 3, 4, 6, 7, 8):
        script.reached(3000 + read, read, AHEAD + 2000 + read)

    timeline = build_timeline(script.snapshot())

    assert on_device(timeline) == [("gpu 0 · stream 0", "Net", "forward", 3, 0, 2006, 2007)]
    assert (timeline.metadata["device_events_dropped"], timeline.metadata["device_events_unread"]) == (2, 1)


def test_a_number_with_the_same_lower_bits_is_another_event() -> None:
    script = script_with_clock()
    net = script.name("Net")
    for call, first in enumerate([0, 1 << 24]):
        script.enter(1000 + 100 * call, net, call)
        script.queued(1001 + 100 * call, first)
        script.exit(1002 + 100 * call, net, call)
        script.queued(1003 + 100 * call, first + 1)
        script.reached(1050 + 100 * call, first, AHEAD + 1010 + 100 * call)
        script.reached(1051 + 100 * call, first + 1, AHEAD + 1020 + 100 * call)

    assert [row[3:] for row in on_device(build_timeline(script.snapshot()))] == [(0, 0, 1010, 1020), (1, 0, 1110, 1120)]


def test_an_unread_event_does_not_get_the_time_of_another_with_an_overwritten_start() -> None:
    script = script_with_clock()
    net = script.name("Net")
    script.enter(1000, net)
    script.queued(1001, 0)
    script.exit(1002, net)
    script.queued(1003, 2)
    script.reached(1100, 1, AHEAD + 1050)
    script.reached(1101, 2, AHEAD + 1060)

    timeline = build_timeline(script.snapshot())

    assert on_device(timeline) == []
    assert timeline.metadata["device_events_unread"] == 1


def test_calls_of_two_threads_that_take_turns_on_a_stream_nest() -> None:
    script = script_with_clock()
    a, b = script.name("A"), script.name("B")
    other = script.add_thread("other", tid=2)
    script.enter(1000, a)
    script.queued(1001, 0)
    script.on_thread(other)
    script.enter(1010, b)
    script.queued(1011, 1)
    script.on_thread(0)
    script.exit(1020, a)
    script.queued(1021, 2)
    script.on_thread(other)
    script.exit(1030, b)
    script.queued(1031, 3)
    for number, host_ns in enumerate([2000, 2100, 2200, 2300]):
        script.reached(3000 + number, number, AHEAD + host_ns)

    assert on_device(build_timeline(script.snapshot())) == [
        ("gpu 0 · stream 0", "A", "forward", 0, 0, 2000, 2200),
        ("gpu 0 · stream 0", "B", "forward", 0, 1, 2100, 2200),
    ]


def test_without_a_reading_of_its_clock_a_device_has_no_spans() -> None:
    script = EventScript()
    net = script.name("Net")
    script.enter(1000, net)
    script.queued(1001, 0)
    script.exit(1002, net)
    script.queued(1003, 1)
    script.reached(1100, 0, 5)
    script.reached(1101, 1, 6)

    timeline = build_timeline(script.snapshot())

    assert on_device(timeline) == []
    assert "device_clock_bound_ns" not in timeline.metadata


def ns(*times: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(times, np.int64)


def test_a_clock_that_drifts_is_followed_between_its_readings_and_beyond() -> None:
    # The clock gains 50 µs in a second, and then loses 30. The readings are exact to ±100, ±200 and ±40 ns.
    clock = device_clock(ns(0, 1_000_050_000, 2_000_020_000), ns(100, 1_000_000_200, 2_000_000_040), ns(200, 400, 80))

    assert clock.to_other(ns(0, 500_025_000, 1_000_050_000, 1_500_035_000, 2_000_020_000)).tolist() == [
        0,
        500_000_000,
        1_000_000_000,
        1_500_000_000,
        2_000_000_000,
    ]
    # On average the clock gains 10 µs per second: 2,000,020,000 of its ns are 2,000,000,000.
    assert clock.to_other(ns(4_000_040_000, -2_000_020_000)).tolist() == [4_000_000_000, -2_000_000_000]
    assert clock.at(ns(0, 500_025_000, 1_500_035_000, 2_000_020_000)).bound_ns.tolist() == [100, 150, 120, 40]
    # As far outside as the first and last reading are apart, their two bounds are added once more.
    assert clock.at(ns(4_000_040_000, -2_000_020_000)).bound_ns.tolist() == [40 + 140, 100 + 140]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_readings_count_in_the_order_of_the_clock(order: tuple[int, int]) -> None:
    device, host, width = ns(1000, 3000), ns(110, 2110), ns(20, 20)
    rows = list(order)

    clock = device_clock(device[rows], host[rows], width[rows])

    assert clock.to_other(ns(2000)).tolist() == [1100]


def two_calls() -> Timeline:
    """A net and its layer are called twice; latencies: net 1,000 and 5,500 ns, layer 1,400 and 5,900 ns."""
    script = script_with_clock()
    net, layer = script.name("Net", module_class="Net"), script.name("Net.layer", "layer: Linear", "Linear")
    # The device is in the net from 2,000 to 6,000 and from 7,000 to 9,000, and inside these times in the layer.
    for call, (net_begin, layer_begin, layer_end, net_end) in enumerate(
        [(2000, 2500, 5500, 6000), (7000, 7500, 8500, 9000)]
    ):
        host, first = 1000 + 500 * call, 4 * call
        script.enter(host, net, call)
        script.queued(host + 1, first)
        script.enter(host + 100, layer, call)
        script.queued(host + 101, first + 1)
        script.exit(host + 200, layer, call)
        script.queued(host + 201, first + 2)
        script.exit(host + 300, net, call)
        script.queued(host + 301, first + 3)
        for number, host_ns in enumerate([net_begin, layer_begin, layer_end, net_end], first):
            script.reached(20_000 + number, number, AHEAD + host_ns)
    script.queued(30_000, 8, NO_NAME)
    script.queued(30_001, 9)

    return build_timeline(script.snapshot())


@pytest.mark.parametrize(
    ("widths", "bound"),
    [
        # Between a bound of 100 ns at the first reading and 50 at the last, 3 ms before the last.
        ((200, 200, 100), 51),
        # After the second, the errors of both count as drift: 200 ns in 400 ms, so 1 ns in 2 ms.
        ((200, 200, 400), 100 + 1),
    ],
)
def test_the_narrower_of_two_close_readings_at_the_end_counts(widths: tuple[int, int, int], bound: int) -> None:
    # The second reading is the last periodic one, 5 ms before the reading at stop. One of them is 100 ns off.
    late = (0, 100) if widths[1] > widths[2] else (100, 0)
    half = np.array(widths) // 2
    clock = device_clock(
        ns(0, 400_000_000, 405_000_000), ns(0, 400_000_000 + late[1], 405_000_000 + late[0]) + half, ns(*widths)
    )

    enter, exit_ = clock.to_other(ns(401_000_000, 404_000_000)).tolist()

    assert (enter, exit_) == (401_000_000, 404_000_000)
    assert clock.at(ns(402_000_000)).bound_ns.tolist() == [bound]


def test_a_summary_adds_up_the_times_and_latencies_of_streams() -> None:
    device = two_calls().summary().device

    assert device == DeviceSummary(
        rows=(
            DeviceModule("Net", "Net", 2, 6000, 2000, 6000, 0, 0, 3250),
            DeviceModule("Net.layer", "Linear", 2, 4000, 4000, 4000, 0, 0, 3650),
        ),
        streams=1,
        length_ns=7000,
        in_modules_ns=6000,
        gaps=1,
        bound_ns=559,
        dropped=1,
        unread=1,
    )


def test_a_summary_by_class_adds_up_the_times_of_the_device_by_class() -> None:
    summary = two_calls().summary(by="class")

    assert summary.device is not None
    assert summary.device.rows == (
        DeviceModule("", "Net", 2, 6000, 2000, 6000, 0, 0, 3250),
        DeviceModule("", "Linear", 2, 4000, 4000, 4000, 0, 0, 3650),
    )
    assert dict(zip(summary.columns()["module_class"], summary.columns()["device_total_ns"], strict=True)) == {
        "Net": 6000,
        "Linear": 4000,
    }
    heading = "class calls total ms self forward backward latency p50"
    assert " ".join(summary.device_text().splitlines()[1].split()) == heading


def test_a_summary_is_shown_as_a_table_of_modules() -> None:
    device = DeviceSummary(
        (
            DeviceModule("Net", "Net", 2, 6_000_000, 2_000_000, 4_000_000, 2_000_000, 0, 3_250_000),
            DeviceModule("Net.layer", "Linear", 2, 4_000_000, 4_000_000, 4_000_000, 0, 0, 1_000_000),
        ),
        *(1, 7_000_000, 6_000_000, 2, 4_321, 5, 0),
    )

    assert device_table(device).to("text", 1).splitlines() == [
        "1 stream of devices: in modules 85.7 % of 7.000 ms, 2 gaps of 0.500 ms on average; ±4.3 µs on the host's clock"
        "; 5 events dropped, because too many were still unread",
        "module  class  calls  total ms   self  forward  backward  latency p50",
        "Net     Net        2     6.000  2.000    4.000     2.000        3.250",
        "1 more module",
        "times from event to event, with waits of the stream for the host; latency: from the start on a thread until "
        "the stream reached the event, which an idle stream does at once",
    ]
    assert summarize(without_gpu(two_calls())).device_text() == ""


def test_a_summary_as_csv_has_the_device_times_of_each_module() -> None:
    header, *lines = csv.reader(two_calls().summary().to_csv().splitlines())

    assert [field for field in header if field.startswith("device_")] == [
        *("device_calls", "device_total_ns", "device_self_ns", "device_forward_ns", "device_backward_ns"),
        *("device_recompute_ns", "device_latency_p50_ns"),
    ]
    assert [(line[0], *map(int, line[-7:])) for line in lines] == [
        ("Net", 2, 6000, 2000, 6000, 0, 0, 3250),
        ("Net.layer", 2, 4000, 4000, 4000, 0, 0, 3650),
    ]


def test_a_summary_without_device_times_has_no_such_columns() -> None:
    assert not [field for field in summarize(without_gpu(two_calls())).columns() if field.startswith("device_")]


def test_markdown_and_html_of_a_summary_have_the_table_of_devices_after_modules() -> None:
    summary = two_calls().summary()
    totals = (
        "1 stream of devices: in modules 85.7 % of 0.007 ms, 1 gap of 0.001 ms on average; ±0.6 µs on the host's clock"
        "; 1 event dropped, because too many were still unread; 1 event never read"
    )

    assert summary.to_markdown().splitlines()[-8:-2] == [
        totals,
        "",
        "| module | class | calls | total ms | self | forward | backward | latency p50 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| `Net` | `Net` | 2 | 0.006 | 0.002 | 0.006 | 0.000 | 0.003 |",
        "| `Net.layer` | `Linear` | 2 | 0.004 | 0.004 | 0.004 | 0.000 | 0.004 |",
    ]
    assert f"<p>{html.escape(totals)}</p>\n<table>" in summary.to_html()
    assert ">0.006</td>" in summary.to_html().partition("stream of devices")[2]
    # Selected modules are selected in the device's table too.
    layers = summary.only("*.layer")
    assert layers.device is not None
    assert [row.fqn for row in layers.device.rows] == ["Net.layer"]
    assert "`Net.layer`" not in summary.sort_by("total", 1).to_markdown()


def test_a_summary_as_json_has_the_streams_and_the_modules_on_them() -> None:
    values = json.loads(two_calls().summary().to_json())["device"]

    assert values.pop("rows") == [
        DeviceModule("Net", "Net", 2, 6000, 2000, 6000, 0, 0, 3250)._asdict(),
        DeviceModule("Net.layer", "Linear", 2, 4000, 4000, 4000, 0, 0, 3650)._asdict(),
    ]
    assert values == {
        "streams": 1,
        "length_ns": 7000,
        "in_modules_ns": 6000,
        "gaps": 1,
        "bound_ns": 559,
        "dropped": 1,
        "unread": 1,
    }


def test_a_recording_without_device_times_has_no_table_of_devices() -> None:
    script = EventScript()
    net = script.name("Net")
    script.enter(1000, net)
    script.exit(1100, net)

    assert build_timeline(script.snapshot()).summary().device is None

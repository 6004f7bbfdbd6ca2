"""The place of a device's stream, from events written by hand."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from modtrace.live.places import group_ranks, headline
from modtrace.live.streams import StreamState, stream_states
from modtrace.live.where import RankState
from modtrace.live.where_table import render
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME, SEQUENCE_BITS, STREAM_NUMBER_BITS
from modtrace.timeline import OpenCall, RingAnalysis
from tests.support.event_script import EventScript
from tests.support.where_rings import SECOND, state

AHEAD = 7_000_000
"""Lead of the device's clock over the host's in ns."""
PENDING = 100_000_000


def blocks(read: int, *, calls: int = 3) -> EventScript:
    """A net calls `calls` blocks; the device has reached the first `read` of its 2 * calls + 2 events.

    The host begins each block at 1,000 × n ns and leaves it 500 later; the device is there 10 µs later. Read at 20 µs.
    """
    script = EventScript(capacity=256)
    script.event(900, Kind.DEVICE_STREAM, 0, 7)
    script.device_clock(50, 100, AHEAD)
    net = script.name("Net", module_class="Net")
    times = [(500, net, True)]
    for index in range(calls):
        block = script.name(f"Net.{index}", module_class="Block")
        times += [(1000 * (index + 1), block, True), (1000 * (index + 1) + 500, block, False)]
    times.append((1000 * (calls + 1), net, False))
    for number, (time, name, begins) in enumerate(times):
        (script.enter if begins else script.exit)(time, name)
        script.queued(time + 1, number)
    for number, (time, _, _) in enumerate(times[:read]):
        script.reached(20_000, number, AHEAD + time + 10_000)
    return script


def look(script: EventScript, now_ns: int, *, is_running: bool = True) -> StreamState:
    (stream,) = stream_states(RingAnalysis(script.snapshot()), now_ns, is_running=is_running)
    return stream


def test_a_stream_is_in_the_calls_behind_the_last_event_that_was_read() -> None:
    # Net, 0, out of 0, 1: then the exit of 1 is the first that is not read, and Net.2 begins behind it.
    assert look(blocks(read=4), 30_000) == StreamState(
        device=0,
        stream=7,
        calls=(OpenCall("Net", "forward", 10_500, "Net"), OpenCall("Net.1", "forward", 12_000, "Block")),
        queued=1,
        unread=4,
        dropped=0,
        read_ns=20_000,
        is_known=True,
    )


def test_between_two_calls_a_stream_is_in_the_one_around_them() -> None:
    stream = look(blocks(read=3), 30_000)

    assert [call.fqn for call in stream.calls] == ["Net"]
    assert (stream.queued, stream.unread) == (2, 5)


def test_a_stream_that_came_by_all_is_known_for_good() -> None:
    stream = look(blocks(read=8), 3600 * SECOND)

    assert (stream.calls, stream.queued, stream.unread, stream.is_known) == ((), 0, 0, True)


def test_a_hang_is_known_as_long_as_the_device_is_asked() -> None:
    script = blocks(read=4)
    last = 20_000 + PENDING + SECOND
    assert [look(script, now).is_known for now in (last, last + 1)] == [True, False]

    # Asked twice as long afterwards each time, it is due when that has doubled again.
    script.pending(20_000 + PENDING, 4)
    script.pending(20_000 + 40 * PENDING, 4)
    last = 20_000 + 80 * PENDING + SECOND
    streams = [look(script, now) for now in (last, last + 1)]
    assert [(stream.is_known, stream.read_ns) for stream in streams] == [
        (True, 20_000 + 40 * PENDING),
        (False, 20_000 + 40 * PENDING),
    ]


def test_unread_device_events_of_a_dead_process_are_unknown() -> None:
    stream = look(blocks(read=4), 30_000, is_running=False)

    assert ([call.fqn for call in stream.calls], stream.is_known) == (["Net", "Net.1"], False)
    assert look(blocks(read=8), 30_000, is_running=False).is_known


def test_where_nothing_was_read_nothing_is_known() -> None:
    stream = look(blocks(read=0), 10_000)

    assert (stream.calls, stream.queued, stream.unread, stream.read_ns, stream.is_known) == ((), 4, 8, None, False)


def test_events_that_were_dropped_are_not_taken_for_nothing() -> None:
    script = blocks(read=8)
    script.queued(30_000, 8, NO_NAME)

    stream = look(script, 40_000)

    assert (stream.unread, stream.dropped, stream.is_known) == (0, 1, False)


def test_backward_is_told_by_the_chosen_calls_that_its_nodes_belong_to() -> None:
    script = EventScript(capacity=256)
    script.device_clock(50, 100, AHEAD)
    net, layer, inner = script.name("Net"), script.name("Net.layer"), script.name("Net.layer.inner")
    script.enter(1000, net, sequence=10)
    script.queued(1001, 0)
    script.enter(1100, layer, sequence=11)
    script.queued(1101, 1)
    script.enter(1150, inner, sequence=12)  # not chosen
    script.exit(1160, inner, sequence=13)
    script.exit(1200, layer, sequence=14)
    script.queued(1201, 2)
    script.exit(1300, net, sequence=15)
    script.queued(1301, 3)
    script.on_thread(script.add_thread("pt_autograd_0", tid=2))
    for number, (time, sequence) in enumerate([(2000, 14), (2100, 12), (2200, 10)], 4):
        script.event(time, Kind.SEGMENT_BEGIN, 1 << 8, 1 << SEQUENCE_BITS | sequence)
        script.queued(time + 1, number)
    script.backward_over(2300, graph_task=1)
    script.queued(2301, 7)
    for number, host_ns in enumerate([3000, 3100, 3200, 3300, 4000, 4100]):
        script.reached(5000, number, AHEAD + host_ns)

    stream = look(script, 6000)

    assert stream.calls == (OpenCall("Net", "backward", 4100, "M"), OpenCall("Net.layer", "backward", 4100, "M"))
    assert (stream.queued, stream.unread) == (1, 2)
    script.reached(5100, 6, AHEAD + 4200)
    assert look(script, 6000).calls == (OpenCall("Net", "backward", 4200, "M"),)
    script.reached(5200, 7, AHEAD + 4300)
    assert look(script, 6000).calls == ()


def test_streams_of_several_devices_are_told_apart() -> None:
    script = EventScript(capacity=256)
    net = script.name("Net")
    keys = (1 << STREAM_NUMBER_BITS | 1, 0)
    for call, key in enumerate(keys):
        script.enter(1000 + 10 * call, net, call)
        script.queued(1001 + 10 * call, 2 * call, key)
        script.exit(1002 + 10 * call, net, call)
        script.queued(1003 + 10 * call, 2 * call + 1, key)
    script.reached(2000, 0, AHEAD + 1500)

    streams = stream_states(RingAnalysis(script.snapshot()), 3000, is_running=True)

    # Nothing tells the clock, so the device was there when it was read, at the latest.
    assert [(s.device, s.stream, s.calls, s.is_known) for s in streams] == [
        (0, 0, (), False),
        (1, 1, (OpenCall("Net", "forward", 2000, "M"),), True),
    ]


def stream(device: int, *calls: tuple[str, str], queued: int = 0, **fields: Any) -> StreamState:
    known: dict[str, Any] = {"unread": 2 * queued, "dropped": 0, "read_ns": 105 * SECOND, "is_known": True}
    opened = tuple(OpenCall(fqn, phase, 102 * SECOND, "Block") for fqn, phase in calls)
    return StreamState(device=device, stream=7, calls=opened, queued=queued, **(known | fields))


def shown(*states: RankState) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200, markup=False, highlight=False).print(render(group_ranks(states)))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_a_line_per_stream_stands_below_the_threads() -> None:
    net = ("Net", "backward"), ("Net.3", "backward")

    lines = shown(state(0, ("Net", "forward"), streams=(stream(0, *net, queued=12), stream(1))))

    assert lines[1:] == [
        "rank 0 1 running 5 MainThread forward Net 12.0 s",
        "device 0, stream 7 backward Net › 3; 12 calls queued behind it 10.0 s",
        "device 1, stream 7 no module; nothing queued behind it 7.0 s",
    ]


def test_unknown_states_are_reported_as_unknown() -> None:
    net = ("Net", "forward")

    lines = shown(
        state(
            0,
            streams=(
                stream(0, net, queued=1, is_known=False),
                stream(0, queued=3, is_known=False, read_ns=None),
                stream(0, net, is_known=False, dropped=5),
                stream(0, net, queued=2, dropped=5),
            ),
        )
    )

    assert [line.removeprefix("device 0, stream 7 ") for line in lines[2:]] == [
        "unknown; last read: forward Net; 1 call queued and not read 7.0 s",
        "unknown; nothing was read; 3 calls queued and not read 11.0 s",
        "unknown; last read: forward Net; queued calls have no events 7.0 s",
        "forward Net; at least 2 calls queued behind it 10.0 s",
    ]


def test_ranks_whose_devices_are_elsewhere_are_told_apart() -> None:
    here, there = ("Net.4", "forward"), ("Net.3", "forward")
    states = [state(rank, streams=(stream(rank, there if rank == 2 else here, queued=rank),)) for rank in range(4)]

    groups = group_ranks(states)
    lines = shown(*states)

    assert [group.label for group in groups] == ["rank 2", "ranks 0-1, 3"]
    assert headline(groups) == "rank 2 is in Net.3 on the device, the other 3 in Net.4 on the device"
    assert [line for line in lines if line.startswith("device")] == [
        "device 2, stream 7 forward Net.3; 2 calls queued behind it 10.0 s",
        "devices 0-1, 3, stream 7 forward Net.4; 0 to 3 calls queued behind it 10.0 s",
    ]


def test_json_has_the_streams() -> None:
    (told,) = state(0, streams=(stream(1, ("Net", "backward"), queued=2),)).to_dict()["streams"]

    assert told == {
        "device": 1,
        "stream": 7,
        "known": True,
        "last_read_seconds": 7.0,
        "calls_queued": 2,
        "events_unread": 4,
        "events_dropped": 0,
        "stack": [{"fqn": "Net", "class": "Block", "phase": "backward", "seconds": 10.0}],
        "collective": None,
    }

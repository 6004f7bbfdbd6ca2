"""The summary's sentences on the end of a recording whose process died or hung."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import modtrace
from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline

SECOND, MS = 1_000_000_000, 1_000_000
FETCH = range_text("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading")


def hung_loader(began_ns: int = 0) -> EventScript:
    """Three fetches of 4 ms, each before a call of 10 ms, and one that does not end."""
    script = EventScript(clock=lambda ns: began_ns + ns)
    net = script.name("Net", module_class="Net")
    for number in range(4):
        now = number * SECOND
        script.collective(now, Kind.RANGE_BEGIN, FETCH, number)
        if number < 3:
            script.collective(now + 4 * MS, Kind.RANGE_END, FETCH, number)
            script.enter(now + 4 * MS, net)
            script.exit(now + 14 * MS, net)
            script.step(now + 15 * MS, number)
    return script


def lines(timeline: modtrace.Timeline) -> list[str]:
    return str(timeline.summary()).splitlines()


def test_the_summary_of_a_dead_process_names_its_open_calls(tmp_path: Path) -> None:
    timeline = build_timeline(hung_loader().snapshot()._replace(writer="dead"))

    assert "at the end MainThread was in data loading (usually 4.0 ms)" in lines(timeline)
    timeline.save(tmp_path / "t.pftrace")
    document = json.loads(modtrace.load(tmp_path / "t.pftrace").summary().to_json())
    assert document["overview"]["open_at_end"] == {
        "thread": "MainThread",
        "place": "data loading",
        "seconds": 0.0,
        "usual_seconds": 0.004,
    }


def test_a_call_that_is_usually_instant_is_called_short() -> None:
    script = EventScript()
    for number in range(3):
        script.collective(10 * number, Kind.RANGE_BEGIN, FETCH, number)
        if number < 2:
            script.collective(10 * number + 5, Kind.RANGE_END, FETCH, number)
    script.exit(40, script.name("Net"))

    assert "at the end MainThread was in data loading (usually <0.1 ms)" in lines(
        build_timeline(script.snapshot()._replace(writer="dead"))
    )


def test_another_thread_shows_how_long_it_was_there() -> None:
    script = hung_loader()
    script.on_thread(script.add_thread("sampler", tid=2))
    script.mark(34 * SECOND, "still there")
    ring = script.snapshot()

    assert "at the end MainThread was in data loading for 31.0 s (usually 4.0 ms)" in lines(
        build_timeline(ring._replace(writer="dead"))
    )
    # Whether the process is alive is unknown, but the call takes much longer than usual.
    assert "at the end MainThread was in data loading for 31.0 s (usually 4.0 ms)" in lines(build_timeline(ring))


def test_a_module_comes_before_the_range_of_another_thread() -> None:
    script = hung_loader()
    script.on_thread(script.add_thread("worker", tid=2))
    script.enter(5 * SECOND, script.name("Net.h", module_class="Block"))
    ring = script.snapshot()._replace(writer="dead")

    assert "at the end worker was in forward Net.h" in lines(build_timeline(ring))


def test_a_recording_saved_during_a_hang_counts_to_that_moment() -> None:
    script = hung_loader(time.monotonic_ns() - 34 * SECOND)
    is_in = build_timeline(script.snapshot()._replace(writer="running", known_pid=True)).metadata["open_at_end"]

    assert isinstance(is_in, dict)
    assert is_in["seconds"] >= 31


def test_a_clean_end_or_a_call_of_usual_length_is_not_mentioned() -> None:
    ended = hung_loader()
    ended.close()
    ring = hung_loader().snapshot()

    for snapshot in (ended.snapshot()._replace(writer="dead"), ring, ring._replace(writer="dead", missing_bytes=8)):
        assert not [line for line in lines(build_timeline(snapshot)) if line.startswith("at the end")]


def test_a_running_recording_knows_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_MIN_HUNG_NS", "_HUNG_FACTOR"):
        monkeypatch.setattr(f"modtrace.timeline.decode.open_calls.{limit}", 0)
    with modtrace.record(engine="python") as recording:
        for _ in range(2):
            with recording.range("wait"):
                running = recording.snapshot()

    assert [line.split(" for ")[0] for line in lines(running) if line.startswith("at the end")] == [
        "at the end MainThread was in range wait"
    ]
    assert "open_at_end" not in recording.timeline().metadata

"""Findings of calls on several threads, written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modtrace import Timeline
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline
from tests.unit.test_findings import MS

MODULES = ("Net.a", "Net.b", "Net.c", "Net.d")


def calls(took: Callable[[int, int, int], int], begin: Callable[[int, int], int]) -> Timeline:
    """24 calls of `Net` on each of two threads, with the ms of each of its modules and the start of each call in ms.

    Both functions get the thread and the call; `took` also gets the module's index.
    """
    script = EventScript(capacity=1 << 12)
    names = {fqn: script.name(fqn) for fqn in ("Net", *MODULES)}
    threads = [script.add_thread(f"worker {number}", tid=10 + number) for number in (0, 1)]
    events: list[tuple[int, int, int, str, int]] = []
    for thread in (0, 1):
        for call in range(24):
            now, number = begin(thread, call) * MS + 1, 24 * thread + call
            events.append((now, len(events), thread, "enter Net", number))
            for place, fqn in enumerate(MODULES):
                events.append((now, len(events), thread, f"enter {fqn}", number))
                now += took(thread, call, place) * MS
                events.append((now, len(events), thread, f"exit {fqn}", number))
            events.append((now, len(events), thread, "exit Net", number))
    for time, _, thread, event, number in sorted(events):
        script.on_thread(threads[thread])
        how, _, fqn = event.partition(" ")
        (script.enter if how == "enter" else script.exit)(time, names[fqn], number)
    return build_timeline(script.snapshot())


def stopped(thread: int, call: int, place: int) -> int:
    """1 ms, and 16 ms more in one of the four modules, in turn."""
    return 17 if (thread + call) % 4 == place else 1


def test_calls_of_threads_that_stop_each_other_in_one_module_or_another() -> None:
    """A call lasts 20 ms; without stops, its modules would last 4 ms."""
    (finding,) = calls(stopped, lambda _, call: 20 * call).summary().findings

    assert finding[:3] == ("calls of 2 threads wait for each other", None, None)
    assert finding.ns_per_step == 16 * MS
    assert finding.evidence.startswith("2.0 calls run at a time; one takes 20 ms, but only 4 ms if each module")
    assert finding.next == "modtrace summary TRACE --by step"


@pytest.mark.parametrize(
    ("took", "begin"),
    [
        (stopped, lambda thread, call: 20 * (2 * call + thread)),  # one after the other
        (lambda thread, call, _: (1, 9)[(thread + call) % 2], lambda _, call: 36 * call),  # short and long inputs
        (lambda thread, call, place: (1, 17)[(thread + call) % 24 == place], lambda _, call: 20 * call),  # rarely
    ],
)
def test_calls_of_threads_without_waits(took: Callable[[int, int, int], int], begin: Callable[[int, int], int]) -> None:
    assert [finding for finding in calls(took, begin).summary().findings if "threads" in finding.what] == []

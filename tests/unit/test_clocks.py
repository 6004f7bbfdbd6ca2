"""Offsets of clocks: from pings by hand, from simulated networks with known offsets, and over loopback."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time

import numpy as np
import pytest
import torch

from modtrace.ring import NameTable
from modtrace.ring.clocks import (
    ClockMap,
    ClockTree,
    Measurement,
    Reading,
    clock_id,
    clock_in,
    measurement_record,
    measurements_in,
    parent_number,
)
from modtrace.track.job_clocks import JobClocks, Ping, PingClient, PingServer, estimate_offset
from tests.support.interrupts import interrupted_at, positions
from tests.support.test_scale import scaled

WINDOWS = scaled(100, 1_000, 1_000)
HOUR_NS = 3_600 * 10**9
AHEAD_NS = 5_000 * 10**9


def test_the_offset_is_the_median_of_the_best_eighth_within_the_range_of_all_pings() -> None:
    quick = [Ping(1_000 * n, 50_000 + 1_000 * n + 5, 1_000 * n + 10) for n in range(2)]
    slow = [Ping(1_000 * n, 50_000 + 1_000 * n + 80, 1_000 * n + 100) for n in range(2, 16)]
    reading = estimate_offset(quick + slow)
    # The middle of both quick pings is at 5 and 1,005; the other clock is 50,000 ahead. Drift widens a range by at most
    # 0.001 × 505 ns, and rounding up adds one or two.
    assert reading == Reading(505, 50_000, 7, 10)


def test_pings_of_a_clock_that_jumped_are_refused() -> None:
    with pytest.raises(ValueError, match="jumped"):
        estimate_offset([Ping(10, 100, 5)])
    with pytest.raises(ValueError, match="jumped"):
        estimate_offset([Ping(0, 1_000, 10), Ping(20, 10**9, 30)])
    with pytest.raises(ValueError, match="at least one"):
        estimate_offset([])


class Network:
    """Two clocks, one of which drifts, and a network between them with a different delay in each direction."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.ahead_ns = int(self.random.integers(-(10**15), 10**15))
        self.rate = float(self.random.uniform(-100e-6, 100e-6))
        self.wander = float(self.random.uniform(0, 2e-7))
        self.phase = float(self.random.uniform(0, 2 * np.pi))
        self.least = self.random.integers(1_000, 100_000, 2)
        self.jitter = self.random.integers(100, 100_000, 2)

    def offset(self, now_ns: int) -> int:
        """The true offset: a constant, a rate, and a slow swing of the rate by up to `wander`."""
        period = 2 * np.pi * now_ns / HOUR_NS + self.phase
        swing = self.wander * HOUR_NS / (2 * np.pi) * np.sin(period)
        return self.ahead_ns + round(self.rate * now_ns + float(swing))

    def read(self, now_ns: int) -> Reading:
        """A reading from 64 pings, the first of which starts at `now_ns`."""
        pings = []
        for _ in range(64):
            there, back = (self.least + self.random.exponential(self.jitter)).astype(int).tolist()
            arrived = now_ns + there
            pings.append(Ping(now_ns, arrived + self.offset(arrived), arrived + back))
            now_ns = arrived + back + int(self.random.integers(500, 5_000))
        return estimate_offset(pings)


def test_the_bound_holds_in_all_windows_of_an_asymmetric_network() -> None:
    wrong = []
    for seed in range(WINDOWS):
        network = Network(seed)
        reading = network.read(int(network.random.integers(0, HOUR_NS)))
        error = abs(reading.offset_ns - network.offset(reading.time_ns))
        if error > reading.bound_ns:
            wrong.append((seed, error, reading))
    assert wrong == []


def test_the_bound_holds_at_all_times_between_readings_and_after_the_last_one() -> None:
    wrong = []
    for seed in range(WINDOWS):
        network = Network(seed)
        offsets = ClockMap(network.read(minute * 60 * 10**9) for minute in range(5))
        times = network.random.integers(0, 6 * 60 * 10**9, 8)
        estimate = offsets.at(times)
        truth = np.array([network.offset(int(moment)) for moment in times])
        if np.any(np.abs(estimate.offset_ns - truth) > estimate.bound_ns):
            wrong.append(seed)
    assert wrong == []


def test_between_readings_the_offset_is_on_a_line_and_the_bound_grows_to_the_middle() -> None:
    offsets = ClockMap([Reading(10**9, 3_000, 20, 40), Reading(0, 1_000, 10, 20)])
    offset = offsets.at([0, 250_000_000, 500_000_000, 10**9])
    assert offset.offset_ns.tolist() == [1_000, 1_500, 2_000, 3_000]
    # The bound interpolated between the readings, and 1 ppm of the distance to the nearer reading.
    assert offset.bound_ns.tolist() == [10, 263, 515, 20]


def test_after_the_last_reading_the_rate_continues_and_the_bound_grows_by_its_error() -> None:
    offsets = ClockMap([Reading(0, 0, 100, 200), Reading(10**9, 1_000, 100, 200)])
    offset = offsets.at([2 * 10**9, 11 * 10**9])
    assert offset.offset_ns.tolist() == [2_000, 11_000]
    # Two bounds of 100 ns a second apart give the rate to 200 ns per second; it may change by 1,000 ns per second.
    assert offset.bound_ns.tolist() == [100 + 1_200, 100 + 12_000]


def test_the_bound_of_one_reading_grows_by_the_maximum_drift() -> None:
    offset = ClockMap([Reading(0, 500, 10, 20)]).at([0, 10**6])
    assert (offset.offset_ns.tolist(), offset.bound_ns.tolist()) == ([500, 500], [10, 1_010])


def test_offsets_of_days_lose_no_nanosecond() -> None:
    day = 86_400 * 10**9
    offsets = ClockMap([Reading(10**18, 10**18, 1, 2), Reading(10**18 + day, 10**18 + 8_640, 1, 2)])
    assert offsets.at([10**18 + 1, 10**18 + day // 2, 10**18 + day]).offset_ns.tolist() == [
        10**18,
        10**18 + 4_320,
        10**18 + 8_640,
    ]


def test_the_largest_bound_of_a_range_holds_at_all_its_times() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        count = int(random.integers(1, 6))
        readings = [
            Reading(int(time), int(random.integers(-99, 99)), int(bound), 0)
            for time, bound in zip(random.choice(3_000_000, count), random.integers(1, 50, count), strict=True)
        ]
        offsets = ClockMap(readings)
        first, last = np.sort(random.integers(-500_000, 3_500_000, 2)).tolist()
        times = np.sort([r.time_ns for r in readings])
        halfway = (times[1:] + times[:-1]) // 2
        inside = np.unique([first, last, *times, *halfway, *np.linspace(first, last, 2_001, dtype=int)])
        inside = inside[(first <= inside) & (inside <= last)]
        largest = int(offsets.at(inside).bound_ns.max())
        # The bound is linear between the readings, their midpoints and the ends of the range; all these are compared.
        assert largest <= offsets.largest_bound(first, last) <= largest + 1


def test_a_tree_adds_offsets_and_bounds_up_to_the_root() -> None:
    tree = ClockTree(
        [
            Measurement("b", "a", Reading(0, 1_000, 5, 10)),
            Measurement("b", "a", Reading(10**9, 1_000, 5, 10)),
            Measurement("c", "b", Reading(0, -300, 7, 14)),
            Measurement("c", "b", Reading(10**9, -300, 7, 14)),
        ]
    )
    offset = tree.to_root("c", [0])
    # 7 for c; c's time 0 is −300 in b, so b extrapolates by 300 ns, which adds less than 1 to its 5.
    assert (offset.offset_ns.tolist(), offset.bound_ns.tolist()) == ([700], [7 + 6])
    assert tree.to_root("a", [5]).offset_ns.tolist() == [0]
    assert tree.largest_bound("c", 0, 0) == 8 + 7
    # Half a second from all readings: 8 and 6, and 1 ppm of the half second for each.
    assert tree.largest_bound("c", 0, 10**9) == 8 + 6 + 2 * 500
    assert [tree.root_of(clock) for clock in ("c", "elsewhere")] == ["a", "elsewhere"]


def test_the_part_of_a_tree_for_one_clock_does_not_grow_with_the_job() -> None:
    def path_of_b(hosts: int) -> ClockTree:
        siblings = [Measurement(f"host {host}", "a", Reading(host, host, 5, 10)) for host in range(hosts)]
        return ClockTree([Measurement("b", "a", Reading(0, 1_000, 5, 10)), *siblings]).path_of("b")

    assert path_of_b(1_000).to_root("b", [0]).offset_ns.tolist() == [1_000]
    assert len(pickle.dumps(path_of_b(1_000))) == len(pickle.dumps(path_of_b(1)))


def test_clocks_that_are_each_others_parents_do_not_loop() -> None:
    readings = Reading(0, 10, 1, 2)
    tree = ClockTree([Measurement("a", "b", readings), Measurement("b", "a", readings)])
    assert tree.root_of("a") == "b"


@pytest.mark.parametrize(("number", "parent"), [(0, None), (1, 0), (32, 0), (33, 1), (64, 1), (1_056, 32), (1_057, 33)])
def test_each_clock_has_at_most_32_children(number: int, parent: int | None) -> None:
    assert parent_number(number) == parent


def test_measurements_are_read_back_from_their_records() -> None:
    measurement = Measurement("b", "a", Reading(1, -2, 3, 4))
    records = [{"kind": "clock", "clock": "b"}, measurement_record(measurement)]
    assert (clock_in(records), measurements_in(records)) == ("b", [measurement])
    assert clock_in([]) is None


def drifting() -> int:
    """A clock far ahead that gains 37 µs per second."""
    now = time.monotonic_ns()
    return now + AHEAD_NS + now * 37 // 10**6


def test_over_loopback_the_error_is_within_the_bound() -> None:
    server = PingServer("127.0.0.1", drifting)
    client = PingClient(server.address, server.token)
    readings = [client.read() for _ in range(40)]
    client.close()
    server.close()
    errors = [abs(r.offset_ns - AHEAD_NS - r.time_ns * 37 // 10**6) for r in readings]
    assert all(error <= reading.bound_ns for error, reading in zip(errors, readings, strict=True))


def pass_on(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Forward the bytes of one connection to another after a delay."""
    with contextlib.suppress(OSError):
        while received := source.recv(64):
            time.sleep(delay_s)
            target.sendall(received)


def test_over_a_real_way_with_a_slow_return_the_error_is_within_the_bound() -> None:
    delay_ns = 3_000_000
    server = PingServer("127.0.0.1", drifting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = PingClient(listener.getsockname()[:2], server.token)
        near, far = listener.accept()[0], socket.create_connection(server.address)
    for source, target, delay_s in ((near, far, 0), (far, near, delay_ns / 1e9)):
        threading.Thread(target=pass_on, args=(source, target, delay_s), daemon=True).start()
    try:
        readings = [client.read(16) for _ in range(10)]
    finally:
        client.close()
        near.close()
        far.close()
        server.close()
    for reading in readings:
        # The other clock was read half of the delay before the middle of such a ping.
        error = AHEAD_NS + reading.time_ns * 37 // 10**6 - reading.offset_ns
        assert reading.bound_ns >= abs(error)
        assert reading.bound_ns >= delay_ns // 2


def test_after_close_nothing_listens() -> None:
    server = PingServer("127.0.0.1")
    client = PingClient(server.address, server.token)
    client.read(1)
    server.close()
    with pytest.raises(OSError, match=r"stopped|reset|Broken pipe"):
        client.read()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, 1)
    assert "modtrace-clock-server" not in [thread.name for thread in threading.enumerate()]


def test_a_client_without_the_token_gets_no_answer() -> None:
    server = PingServer("127.0.0.1")
    client = PingClient(server.address, "0" * len(server.token))
    with pytest.raises(OSError, match=r"stopped|reset|Broken pipe"):
        client.read()
    client.close()
    server.close()


class Noted(NameTable):
    """A name table that sets `enough` once it has `count` records."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.enough = threading.Event()
        self._count = count

    def note(self, record: object) -> None:
        super().note(record)  # type: ignore[arg-type]
        if len(self.records) == self._count:
            self.enough.set()


def test_the_clocks_of_a_job_find_each_other_through_its_store() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    tables = [Noted(count) for count in (0, 1, 1)]
    clocks = [JobClocks(names, f"clock {number}") for number, names in enumerate(tables)]
    threads = [
        threading.Thread(target=clock.measure, args=(store, "job", number)) for number, clock in enumerate(clocks)
    ]
    for thread in threads:
        thread.start()
    for names in tables[1:]:
        assert names.enough.wait(30)
    # Children stop first: they read a last time.
    for clock, thread in reversed([*zip(clocks, threads, strict=True)]):
        clock.stop()
        thread.join()
    measured = [measurements_in(names.records) for names in tables]
    assert [len(measurements) for measurements in measured] == [0, 2, 2]
    for number, measurements in enumerate(measured[1:], 1):
        for measurement in measurements:
            assert (measurement.clock, measurement.parent) == (f"clock {number}", "clock 0")
            # Both threads read the same clock.
            assert abs(measurement.reading.offset_ns) <= measurement.reading.bound_ns


def test_a_clock_without_children_never_listens() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    clock = JobClocks(NameTable(), "alone")
    clock.stop()
    clock.measure(store, "job", 0)
    assert not store.check(["job/0/address"])


def test_a_stop_that_was_interrupted_can_be_repeated() -> None:
    for number in range(positions("opcode", JobClocks(NameTable(), "alone").stop)):
        clock = JobClocks(NameTable(), "alone")
        interrupted_at("opcode", number, clock.stop)
        clock.stop()


def test_threads_of_a_process_read_one_clock() -> None:
    assert clock_id() == clock_id()
    assert len(clock_id()) == 16

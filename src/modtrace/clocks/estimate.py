"""Pings between two clocks → how far they are apart, and how far at most that is off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["MAX_RATE", "PINGS", "Ping", "Reading", "estimate_offset"]

PINGS = 64
"""How many pings one reading takes."""

_BEST_PART = 8
"""One of so many pings has a round trip that is short enough to count."""

MAX_RATE = 1e-3
"""Two monotonic clocks drift apart by at most this: each is slewed by at most 500 ppm."""


class Ping(NamedTuple):
    """One question to another clock.

    Attributes:
        sent_ns: own monotonic nanoseconds just before it was sent.
        remote_ns: what the other clock showed between its arrival and the answer.
        received_ns: own monotonic nanoseconds just after the answer came.
    """

    sent_ns: int
    remote_ns: int
    received_ns: int


class Reading(NamedTuple):
    """How far another clock was ahead of the own one.

    Attributes:
        time_ns: own monotonic nanoseconds at which it holds.
        offset_ns: the other clock less the own one.
        bound_ns: the true offset is at most so far from that, however asymmetric the way was.
        round_trip_ns: the least one.
    """

    time_ns: int
    offset_ns: int
    bound_ns: int
    round_trip_ns: int


def estimate_offset(pings: Sequence[Ping]) -> Reading:
    """Return the median offset of the eighth with the least round trips.

    The other clock was read between sending and receiving, so each ping is a range that holds the true offset; the
    bound is by the intersection of all. In the time that they took, the clocks drift apart by at most `MAX_RATE`.

    Raises:
        ValueError: there are no pings, or a clock jumped.
    """
    if not pings:
        raise ValueError("an offset needs at least one ping")
    first = pings[0].sent_ns
    # Relative to the first, so that all fits a double.
    sent, remote, received = np.array([(p.sent_ns - first, p.remote_ns, p.received_ns - first) for p in pings]).T
    if np.any(received < sent):
        raise ValueError("a ping was answered before it was sent: the clock jumped")
    base = int(remote[0])
    remote = remote - base
    round_trip = received - sent
    best = np.argsort(round_trip, kind="stable")[: max(1, len(pings) // _BEST_PART)]
    middle = (sent + received) / 2
    time = float(np.median(middle[best]))
    offset = float(np.median((remote - middle)[best]))
    drift = MAX_RATE * np.maximum(np.abs(sent - time), np.abs(received - time))
    low, high = float(np.max(remote - received - drift)), float(np.min(remote - sent + drift))
    if low > high:
        raise ValueError("a clock jumped while it was read")
    offset = min(max(offset, low), high)
    bound = int(np.ceil(max(high - offset, offset - low))) + 1
    return Reading(first + round(time), base - first + round(offset), bound, int(round_trip[best[0]]))

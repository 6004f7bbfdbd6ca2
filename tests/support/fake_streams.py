"""Streams, events and a clock for the device that pretends: `fake_streams.cpp`, compiled and loaded.

When each event was reached is known from the formula of the clock, on the device's and on the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modtrace.track.native.build import _compiler, _flags_of_torch, _torch_folder

__all__ = ["FakeStreams", "TimedEvent", "compile_fake_streams", "compile_for_torch"]


_BUILD = Path(__file__).parents[2] / "build" / "test-libraries"


class TimedEvent(NamedTuple):
    """An event that tells the time, on a stream of the user.

    Attributes:
        stream: torch's id of the stream.
        device_ns: when it is reached, on the device's clock.
        host_ns: the same on the host's monotonic clock.
    """

    stream: int
    device_ns: int
    host_ns: float


def compile_fake_streams(path: Path) -> None:
    """Compile the library for the torch of this process."""
    compile_for_torch(Path(__file__).with_suffix(".cpp"), path, "c10")


def compile_for_torch(source: Path, path: Path, *libraries: str) -> None:
    """Compile a file of C++ into a library, for the torch of this process.

    Args:
        source: what to compile.
        path: where the library goes.
        libraries: which of torch's it needs.

    It is compiled once for all tests and runs, and lies in `build` under a hash of all that it is made of.
    """
    flags = ["-O1", "-shared", "-fPIC", "-w", *_flags_of_torch()]
    linked = [f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in libraries)]
    command = [*_compiler(), *flags, str(source), *linked, "-o"]
    made_of = hashlib.sha256("\0".join([*command, torch.__version__, source.read_text()]).encode()).hexdigest()
    kept = _BUILD / f"{source.stem}-{made_of[:16]}.so"
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            unfinished = kept.with_suffix(".unfinished")
            subprocess.run([*command, str(unfinished)], check=True)
            unfinished.rename(kept)
    shutil.copy(kept, path)


class FakeStreams:
    """The library, in the place of the device that is registered.

    Args:
        path: what `compile_fake_streams` wrote.
        device_origin: what the device's clock shows at first, ns.
        ppm: by how much that clock is faster than the host's.
    """

    def __init__(self, path: str, device_origin: int, ppm: float) -> None:
        self._library: Any = ctypes.CDLL(path)
        for name in ("synchronized", "waiting", "asked", "asked_while_capturing", "events_made", "timed_count"):
            getattr(self._library, f"fake_{name}").restype = ctypes.c_int64
        for name in ("timed_stream", "timed_device_ns"):
            getattr(self._library, f"fake_{name}").restype = ctypes.c_int64
            getattr(self._library, f"fake_{name}").argtypes = [ctypes.c_int64]
        self._library.fake_timed_host_ns.restype = ctypes.c_double
        self._library.fake_timed_host_ns.argtypes = [ctypes.c_int64]
        self._library.fake_launch.argtypes = self._library.fake_use_stream.argtypes = [ctypes.c_int64]
        self._library.fake_end_kernel.argtypes = self._library.fake_delay_pool.argtypes = [ctypes.c_int64]
        self._library.fake_fill.argtypes = [ctypes.c_int64, ctypes.c_int]
        self._library.fake_register.argtypes = [ctypes.c_int64, ctypes.c_double]
        self._library.fake_register(device_origin, 1 + ppm * 1e-6)

    def launch(self, ns: int) -> None:
        """Queue a kernel of so many ns of the device on the current stream of this thread."""
        self._library.fake_launch(ns)

    @contextlib.contextmanager
    def behind_a_kernel(self, ns: int) -> Iterator[None]:
        """Put what is launched meanwhile behind a kernel that ends so many ns of the device after the block.

        So no time on the device depends on how long the host takes to launch. One at a time.
        """
        self._library.fake_begin_kernel()
        try:
            yield
        finally:
            self._library.fake_end_kernel(ns)

    def use_stream(self, stream: int) -> None:
        """Make a stream the current one of this thread."""
        self._library.fake_use_stream(stream)

    def hold(self, held: bool) -> None:
        """Let no event be done, whatever the time is."""
        self._library.fake_hold(held)

    def fill(self, stream: int, full: bool) -> None:
        """Let a stream take no more events: who records one waits."""
        self._library.fake_fill(stream, full)

    def delay_the_clock(self, ns: int) -> None:
        """Let events on the reader's own stream be reached so much later, as beside other processes."""
        self._library.fake_delay_pool(ns)

    def capture(self, capturing: bool) -> None:
        """Let all streams capture a graph."""
        self._library.fake_capture(capturing)

    def make_ambiguous(self, ambiguous: bool) -> None:
        """Let no stream say whether it captures, as the legacy default stream while others do."""
        self._library.fake_make_ambiguous(ambiguous)

    def break_down(self) -> None:
        """From now on, to record an event raises."""
        self._library.fake_break()

    @property
    def synchronized(self) -> int:
        """Number of waits for an event, a stream or the device."""
        return int(self._library.fake_synchronized())

    @property
    def waiting(self) -> int:
        """Number of threads that wait for a full stream."""
        return int(self._library.fake_waiting())

    @property
    def asked(self) -> int:
        """Number of queries of events on streams of the user."""
        return int(self._library.fake_asked())

    @property
    def asked_while_capturing(self) -> int:
        """Number of queries of events while streams captured."""
        return int(self._library.fake_asked_while_capturing())

    @property
    def events_made(self) -> int:
        """Number of events that were made."""
        return int(self._library.fake_events_made())

    @property
    def timed(self) -> list[TimedEvent]:
        """The events that tell the time, in the order in which they were recorded."""
        return [
            TimedEvent(
                self._library.fake_timed_stream(index),
                self._library.fake_timed_device_ns(index),
                self._library.fake_timed_host_ns(index),
            )
            for index in range(self._library.fake_timed_count())
        ]

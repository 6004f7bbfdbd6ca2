"""Steps with device times, written by hand: two streams, checkpointed layers, and a device that lags the host."""

from __future__ import annotations

from modtrace.ring import Kind
from modtrace.ring.slot_format import SEQUENCE_BITS
from tests.support.event_script import EventScript

__all__ = ["AHEAD", "device_steps"]

AHEAD = 7_000_000
"""Offset of the device's clock from the host's."""


class _Steps:
    """Writes events of the host one microsecond apart; the device reaches each three times as slowly, in order."""

    def __init__(self) -> None:
        self.script = EventScript(capacity=1 << 12)
        self.script.device_clock(500, 100, AHEAD + 450)
        self.now = 0
        self.queued: list[int] = []

    def event(self, kind: Kind, name: int, value: int, stream: int | None = 0) -> None:
        self.now += 1_000
        self.script.event(self.now, kind, name, value)
        if stream is not None:
            self.script.queued(self.now + 1, len(self.queued), stream)
            self.queued.append(self.now)

    def call(self, kind: Kind, name: int, index: int, sequence: int, stream: int = 0) -> None:
        self.event(kind, name, index << SEQUENCE_BITS | sequence, stream)


def device_steps(steps: int = 3) -> EventScript:
    """Return a script of some steps.

    In each step, forward of `Net` holds `Net.0` and `Net.1`, and backward runs `Net.1`, then `Net.0` again, with
    `Net.0.mlp` in it, and then its backward. Another module runs on a second stream.
    """
    write = _Steps()
    script = write.script
    net, first, mlp, second = (
        script.name("Net", module_class="Net"),
        script.name("Net.0", "0: Block", "Block"),
        script.name("Net.0.mlp", "mlp: MLP", "MLP"),
        script.name("Net.1", "1: Block", "Block"),
    )
    other = script.name("Loader", module_class="Loader")
    main, backward = script.add_thread("MainThread", 1, 1), script.add_thread("pt_autograd_0", 2, 2)
    for step in range(steps):
        base = 100 * step
        script.on_thread(main)
        write.call(Kind.FORWARD_ENTER, other, step, base, stream=1)
        write.call(Kind.FORWARD_EXIT, other, step, base, stream=1)
        write.call(Kind.FORWARD_ENTER, net, step, base)
        for name, at in ((first, base + 10), (second, base + 20)):
            write.call(Kind.FORWARD_ENTER, name, step, at)
            write.call(Kind.FORWARD_EXIT, name, step, at + 5)
        write.call(Kind.FORWARD_EXIT, net, step, base + 30)
        script.on_thread(backward)

        def segment(sequence: int, number: int = step + 1) -> None:
            write.event(Kind.SEGMENT_BEGIN, 1 << 8, number << SEQUENCE_BITS | sequence)

        segment(base + 22)
        segment(base + 12)
        write.call(Kind.RECOMPUTE_ENTER, first, step, 7)
        write.call(Kind.RECOMPUTE_ENTER, mlp, step, 7)
        write.call(Kind.RECOMPUTE_EXIT, mlp, step, 7)
        write.call(Kind.RECOMPUTE_EXIT, first, step, 7)
        write.event(Kind.BACKWARD_OVER, (1 << 24) - 1, step + 1)
        script.on_thread(main)
        write.event(Kind.STEP, (1 << 24) - 1, step, None)
    for number, host_ns in enumerate(write.queued):
        script.reached(write.now + 1_000_000, number, AHEAD + 2_000 + 3 * host_ns + number % 7)
    return script

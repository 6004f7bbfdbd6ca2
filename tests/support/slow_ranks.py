"""Rings of a few steps with collectives, as templates of jobs whose slow rank is known."""

from __future__ import annotations

from pathlib import Path

from modtrace.ring import Kind
from modtrace.ring.slot_format import COLLECTED_BITS, GENERATION_BITS, SEQUENCE_BITS
from tests.support.event_script import EventScript
from tests.support.made_job import Template, read_template

MS = 1_000_000


ALL_REDUCE, ALL_GATHER = '["all_reduce", "0"]', '["all_gather_into_tensor", "0"]'


def write_steps(script: EventScript, *, sharded: bool, with_ranges: bool = False) -> None:
    """Six steps of a net with two layers, 1 ms each way: as under DDP, or under FSDP, which waits in each."""
    net, first, second = (script.name(f"Net{path}", "Net") for path in ("", ".first", ".second"))
    script.note_group("0", "0-1", "default_pg")
    now = 10**16
    counter = ranges = 0

    def then(after: int, kind: Kind, name: int, value: int) -> None:
        nonlocal now
        now += after
        script.event(now, kind, name, value)

    def collective(text: str, *, wait: bool) -> None:
        nonlocal now, counter
        kinds = [Kind.COLLECTIVE_ENTER, Kind.COLLECTIVE_EXIT, *([Kind.WAIT_ENTER, Kind.WAIT_EXIT] if wait else [])]
        for kind in kinds:
            now += 10_000
            script.collective(now, kind, text, 64 if kind == Kind.COLLECTIVE_EXIT else counter)
        script.collective(now + 50_000, Kind.COLLECTIVE_DONE, text, counter)
        counter += 1

    def in_range(text: str) -> None:
        nonlocal now, ranges
        for after, kind in ((100_000, Kind.RANGE_BEGIN), (50_000, Kind.RANGE_END)):
            now += after
            script.collective(now, kind, text, ranges)
        ranges += 1

    for step in range(6):
        base = 4 * step
        call = step << SEQUENCE_BITS
        if with_ranges:
            in_range('["data loading", "enumerate(DataLoader)#Own.__next__"]')
        then(100_000, Kind.FORWARD_ENTER, net, call | base)
        for layer, (low, high) in ((first, (0, 2)), (second, (2, 4))):
            then(10_000, Kind.FORWARD_ENTER, layer, call | base + low)
            if sharded:
                collective(ALL_GATHER, wait=True)
            then(MS, Kind.FORWARD_EXIT, layer, call | base + high)
        then(10_000, Kind.FORWARD_EXIT, net, call | base + 4)
        then(10_000, Kind.PASS_BEGIN, 0xFFFFFF, step)
        for sequence in (3, 1):
            then(10_000, Kind.SEGMENT_BEGIN, 0x100, step << SEQUENCE_BITS | base + sequence)
            now += MS
            collective(ALL_REDUCE, wait=sharded)
        then(10_000, Kind.BACKWARD_OVER, 0xFFFFFF, step)
        then(200_000, Kind.PASS_END, 0xFFFFFF, step)
        if with_ranges:
            in_range('["user", "augment"]')
            then(150_000, Kind.COLLECTION, 0xFFFFFF, 150_000 << GENERATION_BITS + COLLECTED_BITS)
        then(300_000, Kind.OPTIMIZER_STEP, 0xFFFFFF, step)
        if with_ranges:
            in_range('["saving", "torch.save"]')


def make_template(ring: Path, *, sharded: bool = False, with_ranges: bool = False) -> Template:
    """Write the steps of one rank, see `write_steps`, and read what ranks of a made job repeat."""
    script = EventScript(1024, ring, {"rank": 0, "pid": 1})
    write_steps(script, sharded=sharded, with_ranges=with_ranges)
    script.close()
    return read_template(ring)


def template_with_ranges(tmp_path: Path, *, sharded: bool = False) -> Template:
    return make_template(tmp_path / "ranges.modtrace", sharded=sharded, with_ranges=True)


LATE_IN = [
    ("data loading", "range"),
    ("Net.second", "forward"),
    ("Net.first", "backward"),
    ("garbage collection", "range"),
    ("saving", "range"),
    ("range augment", "range"),
]

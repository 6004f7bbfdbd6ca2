"""Jobs of many ranks, made of one rank's ring: new ids, clocks that are apart and drift, noise, and known culprits.

Each rank repeats the events of that one, each step taking what a step of it took at the median. What a rank waits for
is computed: a collective is complete when the last rank has called it. So who was late, where, and by how much is what
`Culprit` says. Shares no code with what is tested: the bytes of rings are written here as their format says.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Culprit", "MadeJob", "Template", "read_template"]

_HEADER = struct.Struct("<8sIIQQQII")
_SLOTS = 4096
_FORWARD_ENTER, _FORWARD_EXIT, _STEP, _SEGMENT, _OPTIMIZER_STEP = 1, 2, 10, 15, 18
_PASS_END, _CALL, _RETURN, _DONE, _WAIT_ENTER, _WAIT_EXIT = 17, 20, 21, 22, 23, 24
_COLLECTION, _RANGE_BEGIN, _RANGE_END = 31, 40, 41
_COLLECTION_NS_SHIFT = 22
_SEQUENCE = (1 << 38) - 1
RANKS_PER_HOST = 8
BEGIN = 10**16
"""The true time at which jobs begin, ns."""


class Culprit(NamedTuple):
    """The cause of a late rank: a module, a range or a collection that takes longer there, in each `every`th step.

    `phase` is forward or backward; "range" for what `ranks slow` calls a range, as `fqn` says it.
    """

    rank: int
    fqn: str
    phase: str
    extra_ns: int
    every: int = 1
    first: int = 0


class Template(NamedTuple):
    """One step of a real rank, event by event, without the events that say that a collective is complete.

    Attributes:
        kind, thread, name: of each event.
        value: in step 0, and what it grows by from step to step.
        growth: what the value grows by from step to step.
        delta: ns since the event before, the median of the real steps; without waiting.
        has_done: of calls of collectives, whether an event says that they are complete.
        records: the name table.
    """

    kind: Any
    thread: Any
    name: Any
    value: Any
    growth: Any
    delta: Any
    has_done: Any
    records: list[dict[str, Any]]

    def modules(self, phase: str) -> list[str]:
        """The modules that have an own event in a phase, in its order."""
        return list(self.places(phase))

    def places(self, phase: str) -> dict[str, int]:
        """Return, by module, the event before which a culprit in it is."""
        fqns = {record["id"]: record["fqn"] for record in self.records if record["kind"] == "name"}
        index_of: dict[str, int] = {}
        calls: list[tuple[int, int, str]] = []
        open_: list[int] = []
        for index, (kind, name, value) in enumerate(zip(self.kind, self.name, self.value, strict=True)):
            if kind == _FORWARD_ENTER:
                open_.append(int(value) & _SEQUENCE)
            elif kind == _FORWARD_EXIT:
                calls.append((open_.pop(), int(value) & _SEQUENCE, fqns[int(name)]))
                if phase == "forward":
                    index_of.setdefault(calls[-1][2], index)
            elif kind == _RANGE_END and phase == "range":
                text = next(r["text"] for r in self.records if r["kind"] == "text" and r["id"] == int(name))
                category, own = json.loads(text)
                index_of.setdefault(f"range {own}" if category == "user" else category, index)
            elif kind == _COLLECTION and phase == "range":
                index_of.setdefault("garbage collection", index)
            elif kind == _SEGMENT and phase == "backward":
                sequence = int(value) & _SEQUENCE
                around = [call for call in calls if call[0] <= sequence < call[1]]
                if around:
                    innermost = min(around, key=lambda call: call[1] - call[0])
                    index_of.setdefault(innermost[2], index + 1)
        return index_of


def read_template(ring: Path) -> Template:
    """Read a real rank's ring; its steps but for the first are alike, and none is lost."""
    data = ring.read_bytes()
    _, _, _, capacity, _, log, _, _ = _HEADER.unpack_from(data)
    records = []
    while len(data) > log + 8:
        length, _ = struct.unpack_from("<II", data, log)
        if not length:
            break
        records.append(json.loads(data[log + 8 : log + 8 + length]))
        log += 8 + length
    slots = np.frombuffer(data, "<i8", capacity * 4, _SLOTS).reshape(-1, 4)
    slots = slots[slots[:, 3] > 0]
    slots = slots[np.argsort(slots[:, 3])]
    kind = slots[:, 0] >> 40 & 0xFF
    done = {(int(meta) & 0xFFFFFF, int(value)) for meta, value in slots[kind == _DONE][:, [0, 2]]}
    # Threads without calls, such as gloo's, write ranges when they get to it: the order of these says nothing.
    thread = slots[:, 0] >> 24 & 0xFFFF
    is_beside = np.isin(kind, (_RANGE_BEGIN, _RANGE_END)) & ~np.isin(thread, thread[kind == _FORWARD_ENTER])
    is_kept = (kind != _DONE) & ~is_beside
    slots, kind = slots[is_kept], kind[is_kept]
    ends = np.flatnonzero(np.isin(kind, (_STEP, _OPTIMIZER_STEP)))
    steps = [slots[first + 1 : last + 1] for first, last in itertools.pairwise(ends)]
    heads = [tuple((step[:, 0] & (1 << 48) - 1).tolist()) for step in steps]
    same = [step for step, head in zip(steps, heads, strict=True) if head == heads[-1]]
    assert len(same) >= 4, "the real steps are not alike"
    value, growth = same[-1][:, 2], same[-1][:, 2] - same[-2][:, 2]
    kind = same[-1][:, 0] >> 40 & 0xFF
    starts = np.array([slots[ends[number], 1] for number, head in enumerate(heads) if head == heads[-1]])
    times = np.column_stack([starts, np.array([step[:, 1] for step in same])])
    delta = np.median(np.diff(times, axis=1), axis=0)
    delta[np.isin(kind, (_RETURN, _WAIT_EXIT, _PASS_END))] = 2_000
    delta[kind == _OPTIMIZER_STEP] = 500_000
    name = same[-1][:, 0] & 0xFFFFFF
    has_done = np.array([(int(n), int(v)) in done for n, v in zip(name, value, strict=True)]) & (kind == _CALL)
    keep = [record for record in records if record["kind"] in ("name", "text", "thread", "group")]
    steps_before = value[-1] // max(int(growth[-1]), 1)
    zero = value - steps_before * growth
    return Template(kind, same[-1][:, 0] >> 24 & 0xFFFF, name, zero, growth, delta, has_done, keep)


class MadeJob:
    """Makes a job and writes its rings.

    Args:
        template: what each rank does in a step.
        ranks: how many.
        steps: how many.
        culprits: who is late.
        group_size: ranks in each process group, one behind the other; 0: all are one.
        noise: the deviation of the time between two events, as a part of it.
        seed: of the random numbers.
        stretch: by what all times between events are multiplied.
        bound_ns: how far a reading of a clock is off at most.
    """

    def __init__(
        self,
        template: Template,
        ranks: int,
        steps: int,
        culprits: Sequence[Culprit] = (),
        *,
        group_size: int = 0,
        noise: float = 0.05,
        seed: int = 0,
        stretch: float = 1.0,
        bound_ns: int = 10_000,
    ) -> None:
        self.template, self.ranks, self.steps = template, ranks, steps
        self._random = np.random.default_rng(seed)
        self._group = group_size or ranks
        self._noise, self._stretch, self._bound = noise, stretch, bound_ns
        hosts = -(-ranks // RANKS_PER_HOST)
        self._ahead = self._random.integers(-(10**14), 10**14, hosts)
        self._rate = self._random.uniform(-50e-6, 50e-6, hosts)
        self._wall = 1_800_000_000 * 10**9 + self._random.integers(-(10**9), 10**9, hosts)
        self._extra: dict[int, list[Culprit]] = {}
        for culprit in culprits:
            place = template.places(culprit.phase)[culprit.fqn]
            self._extra.setdefault(place, []).append(culprit)
        self.done_ns: list[Any] = []

    def write(self, folder: Path) -> None:
        """Write a ring for each rank; the times of all events take 8 bytes each on the disk beside it."""
        count = len(self.template.kind)
        times = np.memmap(folder / "times.tmp", np.int64, "w+", shape=(self.ranks, self.steps, count))
        done = np.zeros((self.ranks, self.steps, int(self.template.has_done.sum())), np.int64)
        now = np.full(self.ranks, BEGIN, np.int64)
        for step in range(self.steps):
            moments, done[:, step] = self._step(step, now)
            times[:, step] = moments.T
            now = moments[-1]
        last = int(now.max())
        for rank in range(self.ranks):
            self._write_ring(folder / f"{rank:06}.modtrace", rank, times[rank], done[rank], last)
        del times
        (folder / "times.tmp").unlink()

    def clock(self, host: int, true_ns: Any) -> Any:
        """Return the time that a host's clock shows."""
        return true_ns + self._ahead[host] + np.rint((true_ns - BEGIN) * self._rate[host]).astype(np.int64)

    def _step(self, step: int, now: Any) -> tuple[Any, Any]:
        template = self.template
        count = len(template.kind)
        moments = np.empty((count, self.ranks), np.int64)
        noise = self._random.standard_normal((count, self.ranks), np.float32) * self._noise
        base = template.delta * self._stretch
        done: list[Any] = []
        complete: dict[tuple[int, int], Any] = {}
        pending = np.zeros(self.ranks, np.int64)
        for event in range(count):
            now = now + np.maximum(base[event] * (1 + noise[event]), 100).astype(np.int64)
            for culprit in self._extra.get(event, ()):
                if step >= culprit.first and (step - culprit.first) % culprit.every == 0:
                    now[culprit.rank] += culprit.extra_ns
            kind, key = template.kind[event], (int(template.name[event]), int(template.value[event]))
            if kind == _CALL:
                groups = np.arange(self.ranks) // self._group
                last = np.maximum.reduceat(now, np.arange(0, self.ranks, self._group))[groups]
                jitter = self._random.integers(1_000, 20_000, self.ranks)
                complete[key] = last + 50_000 + jitter
                pending = np.maximum(pending, complete[key])
                if template.has_done[event]:
                    done.append(complete[key])
            elif kind == _WAIT_EXIT and key in complete:
                now = np.maximum(now, complete[key] + 3_000)
            elif kind == _PASS_END:
                now = np.maximum(now, pending + 5_000)
            moments[event] = now
        return moments, np.array(done).T if done else np.zeros((self.ranks, 0), np.int64)

    def _write_ring(self, path: Path, rank: int, times: Any, done: Any, last: int) -> None:
        template, host = self.template, rank // RANKS_PER_HOST
        count, dones = len(template.kind), int(template.has_done.sum())
        slots: Any = np.zeros((self.steps, count + dones, 4), np.int64)
        # The slot for a complete collective is after that of the call's return.
        places = np.flatnonzero(template.has_done) + 1
        own = np.arange(count) + np.searchsorted(places, np.arange(count))
        meta = template.kind << 40 | template.thread << 24 | template.name
        growth = np.arange(self.steps)[:, None] * template.growth
        slots[:, own, 0], slots[:, own, 1], slots[:, own, 2] = meta, self.clock(host, times), template.value + growth
        for event in np.flatnonzero(template.kind == _COLLECTION):
            slots[:, own[event], 2] = (times[:, event] - times[:, event - 1]) << _COLLECTION_NS_SHIFT
        calls = np.flatnonzero(template.has_done)
        behind = own[calls + 1] + 1
        slots[:, behind, 0] = _DONE << 40 | template.thread[calls] << 24 | template.name[calls]
        slots[:, behind, 1], slots[:, behind, 2] = self.clock(host, done), (template.value + growth)[:, calls]
        slots = slots.reshape(-1, 4)
        slots[:, 3] = np.arange(1, len(slots) + 1)
        metadata = {"rank": rank, "pid": 100 + rank % RANKS_PER_HOST, "engine": "native", "program": "python"}
        text = json.dumps(metadata).encode()
        log = _SLOTS + len(slots) * 32
        head = _HEADER.pack(b"MODTRACE", 2, 0, len(slots), _SLOTS, log, len(text), zlib.crc32(text)) + text
        with open(path, "wb") as file:
            file.write(head.ljust(_SLOTS, b"\0"))
            file.write(slots.tobytes())
            for record in self._records(rank, host, last):
                line = json.dumps(record).encode()
                file.write(struct.pack("<II", len(line), zlib.crc32(line)) + line)
            file.write(bytes(8))

    def _records(self, rank: int, host: int, last: int) -> list[dict[str, Any]]:
        first = rank // self._group * self._group
        members = f"{first}-{min(first + self._group, self.ranks) - 1}"
        own = [
            {**record, "ranks": members} if record["kind"] == "group" else record for record in self.template.records
        ]
        start = int(self.clock(host, np.array([BEGIN - 1_000_000]))[0])
        records: list[dict[str, Any]] = [
            {"kind": "anchor", "monotonic": start, "wall": int(self._wall[host])},
            {"kind": "clock", "clock": f"host{host}"},
            *own,
        ]
        if host and rank % RANKS_PER_HOST == 0:
            parent = (host - 1) // 32
            for true in np.linspace(BEGIN, last, 2 + (last - BEGIN) // (60 * 10**9)).astype(np.int64):
                ahead = int(self.clock(parent, np.array([true]))[0]) - (
                    time := int(self.clock(host, np.array([true]))[0])
                )
                bound = int(self._random.integers(self._bound // 2, self._bound + 1))
                wrong = int(self._random.integers(-bound, bound + 1))
                offset = {"time": time, "offset": ahead + wrong, "bound": bound + 200, "round_trip": 2 * bound}
                records.append({"kind": "offset", "clock": f"host{host}", "parent": f"host{parent}", **offset})
        return [*records, {"kind": "stop"}]

"""One ring file → where its process is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..ring import STACKS_SIGNAL, RingSnapshot, read_ring
from ..ring.slot_format import CALL_ENTER_KINDS
from ..timeline import OpenCall, ThreadStack
from ..timeline.decode import RingAnalysis, lasts_too_long
from ..timeline.decode.memory import held_memory
from ..timeline.memory import format_bytes
from .streams import StreamState, read_streams
from .waits import ANY_PEER, Blocked, GroupProgress, PeerProgress, RankProgress, read_rank_progress

_FIRST_EVENTS = 1 << 14
_ENOUGH_STEPS = 4


class RankState(NamedTuple):
    """Where one process is, or was.

    Attributes:
        path: its ring file.
        rank: its distributed rank, or None.
        pid: its process id.
        engine: "native" or "python".
        state: "running"; "stopped", the recording ended in good order; "dead", the process is gone and the recording
            had not ended; "unknown", that cannot be known: it runs on another host or in another PID namespace, and its
            lock cannot be seen from here; or its file was cut.
        step: the number of the last step that ended, or None if the ring holds none.
        threads: what each thread is in.
        now_ns: the moment that durations count to, monotonic nanoseconds of the recording's host: now, or its last
            event where it has ended.
        last_unix_ns: its last event, Unix nanoseconds; 0 if the file was cut and does not say it.
        usual_ns: what the innermost open calls usually take, by (fqn, phase), as far as the ring knows.
        progress: how far it is with collectives, sends and receives.
        stacks_signal: the signal on which it writes its Python stacks, or None.
        streams: what the streams of its devices are in, where it records device times.
        missing_bytes: what was cut off the end of its file.
        memory: what it says of memory: an allocation that failed, what grows, or what it held when it died.
        known_pid: whether `pid` names it here too, and not in another PID namespace only.
    """

    path: str
    rank: int | None
    pid: int
    engine: str
    state: str
    step: int | None
    threads: tuple[ThreadStack, ...]
    now_ns: int
    last_unix_ns: int
    usual_ns: Mapping[tuple[str, str], int] = MappingProxyType({})
    progress: RankProgress = RankProgress()
    stacks_signal: int | None = None
    streams: tuple[StreamState, ...] = ()
    missing_bytes: int = 0
    known_pid: bool = False
    memory: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What to call it: its rank, else its file."""
        return os.path.basename(self.path) if self.rank is None else f"rank {self.rank}"

    @property
    def cut_sentence(self) -> str:
        """What to say of a file that was cut."""
        return f"{self.path}: its last {self.missing_bytes:,} bytes were cut off, and what they said is lost"

    @property
    def last_ns(self) -> int:
        """Its last event, in nanoseconds of the same clock as `now_ns`."""
        return max((thread.last_ns for thread in self.threads), default=self.now_ns)

    def seems_hung(self, thread: ThreadStack) -> bool:
        """Return whether a running thread's innermost call takes much longer than it usually does."""
        if self.state != "running" or not thread.calls:
            return False
        call = thread.calls[-1]
        return lasts_too_long(call, self.now_ns - call.since_ns, self.usual_ns.get((call.fqn, call.phase)))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values: durations in seconds, the time of the last event in Unix nanoseconds."""
        return {
            "file": self.path,
            "rank": self.rank,
            "pid": self.pid,
            "engine": self.engine,
            "state": self.state,
            "step": self.step,
            "last_event_ns": self.last_unix_ns,
            "last_event_seconds": (self.now_ns - self.last_ns) / 1e9,
            "memory": list(self.memory),
            "collectives": [self._group_to_json(progress) for progress in self.progress.groups],
            "sends_and_receives": [self._peer_to_json(progress) for progress in self.progress.peers],
            "threads": [
                {
                    "thread": thread.thread,
                    "tid": thread.tid,
                    "last_event_seconds": (self.now_ns - thread.last_ns) / 1e9,
                    "seems_hung": self.seems_hung(thread),
                    "stack": [
                        self._call_to_json(call) | {"usual_seconds": self._usual_seconds(call)} for call in thread.calls
                    ],
                }
                for thread in self.threads
            ],
            "streams": [
                {
                    "device": stream.device,
                    "stream": stream.stream,
                    "known": stream.is_known,
                    "last_read_seconds": None if stream.read_ns is None else (self.now_ns - stream.read_ns) / 1e9,
                    "calls_queued": stream.queued,
                    "events_unread": stream.unread,
                    "events_dropped": stream.dropped,
                    "stack": [self._call_to_json(call) for call in stream.calls],
                    "collective": stream.collective or None,
                }
                for stream in self.streams
            ],
        }

    def _call_to_json(self, call: OpenCall) -> dict[str, Any]:
        place: dict[str, Any] = {"fqn": call.fqn, "class": call.module_class, "phase": call.phase}
        if call.is_range:
            place = {"fqn": "", "class": "", "phase": "range", "category": call.phase, "name": call.fqn}
        return place | {"seconds": (self.now_ns - call.since_ns) / 1e9}

    def _group_to_json(self, progress: GroupProgress) -> dict[str, Any]:
        return {
            "group": progress.group.name,
            "description": progress.group.description,
            "ranks": list(progress.group.ranks),
            "called": progress.last + 1,
            "waits_in": self._wait_to_json(progress.blocked),
        }

    def _peer_to_json(self, progress: PeerProgress) -> dict[str, Any]:
        return {
            "group": progress.group.name,
            "operator": progress.operator,
            "peer": None if progress.peer == ANY_PEER else progress.peer,
            "called": progress.last + 1,
            "waits_in": self._wait_to_json(progress.blocked),
        }

    def _wait_to_json(self, blocked: Blocked | None) -> dict[str, Any] | None:
        if blocked is None:
            return None
        seconds = (self.now_ns - blocked.since_ns) / 1e9
        return {"operator": blocked.operator, "counter": blocked.counter, "seconds": seconds}

    def _usual_seconds(self, call: OpenCall) -> float | None:
        usual_ns = self.usual_ns.get((call.fqn, call.phase))
        return None if usual_ns is None else usual_ns / 1e9


def read_rank_state(path: str | os.PathLike[str]) -> RankState:
    """Read one ring file, and return where its process is.

    Raises:
        RingError: it cannot be read, or is no ring file.
    """
    return rank_state_of(path, _read_last_steps(path))


def rank_state_of(path: str | os.PathLike[str], analysis: RingAnalysis) -> RankState:
    """Return where the process of a ring file is, by what was read of its end."""
    snapshot, events = analysis.snapshot, analysis.all_events
    metadata, threads, steps = snapshot.metadata, tuple(analysis.open_stacks), analysis.step_ends.number
    anchors = [record for record in snapshot.records if record["kind"] == "anchor"]
    state = _state(snapshot, anchors)
    last_ns = int(events.time.max()) if len(events) else (int(anchors[-1]["monotonic"]) if anchors else 0)
    now_ns = last_ns
    if state == "running" and snapshot.known_pid:
        now_ns = time.monotonic_ns()
    elif state in ("running", "unknown") and anchors:
        # The monotonic clock of another host or namespace, as far as the two wall clocks agree.
        now_ns = int(anchors[0]["monotonic"]) + time.time_ns() - int(anchors[0]["wall"])
    return RankState(
        path=os.fspath(path),
        rank=_int_or_none(metadata, "rank"),
        pid=_int_or_none(metadata, "pid") or 0,
        engine=str(metadata.get("engine", "")),
        state=state,
        step=int(np.max(steps)) if len(steps) else None,
        threads=threads,
        now_ns=max(now_ns, last_ns),
        last_unix_ns=int(analysis.clock.to_other(np.array([last_ns]))[0]) if anchors else 0,
        usual_ns=analysis.usual_durations([thread.calls[-1] for thread in threads if thread.calls]),
        progress=read_rank_progress(analysis),
        stacks_signal=_int_or_none(metadata, STACKS_SIGNAL),
        streams=read_streams(analysis, max(now_ns, last_ns), is_running=state in ("running", "unknown")),
        missing_bytes=snapshot.missing_bytes,
        known_pid=snapshot.known_pid,
        memory=_memory(analysis, state),
    )


def _memory(analysis: RingAnalysis, state: str) -> tuple[str, ...]:
    memory = held_memory(analysis)
    if memory is None:
        return ()
    if state != "dead" or memory.refused is not None:
        return tuple(memory.sentences)
    return (
        f"its tensors held {format_bytes(memory.last)} at its last event; before, {memory.holding}",
        *memory.sentences,
    )


def _read_last_steps(path: str | os.PathLike[str]) -> RingAnalysis:
    """Read as much of the end of a ring as shows what is open: some steps, or calls of the outermost module.

    A ring can hold hours, and those of thousands of ranks are looked at together.
    """
    count = _FIRST_EVENTS
    while True:
        analysis = RingAnalysis(read_ring(path, count))
        if len(analysis.all_events) + analysis.snapshot.slots.torn < count or _is_enough(analysis):
            return analysis
        count *= 4


def _is_enough(analysis: RingAnalysis) -> bool:
    events = analysis.all_events
    if len(analysis.step_ends.event) >= _ENOUGH_STEPS:
        return True
    outermost = [number for number, name in enumerate(analysis.lookup.names) if "." not in name.fqn]
    enters = events.name[np.isin(events.kind, CALL_ENTER_KINDS)]
    entered = int(np.count_nonzero(np.isin(enters, outermost)))
    # If the first open module is no outermost one, the enter of that one is further back.
    calls = [thread.calls[0] for thread in analysis.open_stacks if thread.calls and not thread.calls[0].is_range]
    return entered >= _ENOUGH_STEPS and all("." not in call.fqn for call in calls)


def _state(snapshot: RingSnapshot, anchors: list[Mapping[str, Any]]) -> str:
    if any(record["kind"] == "stop" for record in snapshot.records):
        return "stopped"
    # A file that was cut does not say when its events were.
    return snapshot.writer if anchors or snapshot.writer == "dead" else "unknown"


def _int_or_none(metadata: Mapping[str, object], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) else None

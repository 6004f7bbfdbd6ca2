"""One ring file → the open calls of its process, and its progress in collectives, sends and receives."""

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._errors import RingError
from ..ring import STACKS_SIGNAL, Kind, read_ring
from ..ring.event_text import ANY_SOURCE, MESSAGES, CollectiveName, parse_collective
from ..ring.owner import WriterState
from ..ring.slot_format import CALL_ENTER_KINDS, NO_NAME, NOT_AWAITED_BIT
from ..timeline import Group, OpenCall, RingAnalysis, ThreadStack
from ..timeline.contents import process_label, unsaved_sentence
from ..timeline.decode.held_memory import held_memory
from ..timeline.decode.open_calls import HUNG_WITHOUT_HISTORY_NS, lasts_too_long
from ..timeline.decode.range_slices import is_communication
from ..timeline.memory import format_bytes
from .streams import StreamState, stream_states

_FIRST_EVENTS = 1 << 14
_ENOUGH_STEPS = 4
ANY_PEER = -1
"""The peer of a receive from any sender."""
_MAX_OPERATORS = 256
"""Maximum number of a group's last collectives whose operators are stored."""


class Blocked(NamedTuple):
    """A collective, a send or a receive that was called and is not complete."""

    operator: str  # name in `torch.distributed`
    counter: int  # number of the collective in its group, or of the send or receive with its peer
    since_ns: int  # start of the wait or of the call, monotonic ns
    tid: int = 0  # thread id in the operating system; 0 if unknown
    details: tuple[str, ...] = ()  # further facts about the call, as texts


class GroupProgress(NamedTuple):
    """The progress of one process in the collectives of one group."""

    group: Group  # the group
    last: int  # counter of the last called collective; -1 if none was called
    recent: tuple[str, ...]  # operators of the last collectives, in order; empty texts if unknown
    blocked: Blocked | None  # the first incomplete collective, as far as the engine knows
    sizes: tuple[int, ...] = ()  # bytes of the collectives in `recent`; -1 if unknown

    def call(self, counter: int) -> tuple[str, int]:
        """Return the operator and the bytes of the collective with this counter; empty and -1 if unknown."""
        index = len(self.recent) - 1 - (self.last - counter)
        is_known = 0 <= index < len(self.recent)
        return self.recent[index] if is_known else "", self.sizes[index] if is_known and self.sizes else -1


class PeerProgress(NamedTuple):
    """The progress of one process in its sends to, or its receives from, one peer."""

    group: Group  # the group of the calls
    operator: str  # "send" or "recv"
    peer: int  # rank in the group at the other end, or `ANY_PEER`
    last: int  # counter of the last call
    blocked: Blocked | None  # the first incomplete call


class RankProgress(NamedTuple):
    """The progress of one process in all groups and with all peers."""

    groups: tuple[GroupProgress, ...] = ()  # one entry per group that the ring contains
    peers: tuple[PeerProgress, ...] = ()  # one entry per peer, group and direction
    first_ns: int | None = None  # monotonic ns of the oldest event read; None if all of the recording was read


ProcessState: TypeAlias = WriterState | Literal["stopped"]


class RankState(NamedTuple):
    """The state of one process now, or when it ended.

    Attributes:
        path: path of its ring file.
        rank: its distributed rank, or None.
        pid: its process id.
        engine: "native" or "python".
        state: "running"; "stopped" if the recording was ended; "dead" if the process ended without ending the
            recording; "unknown" if it runs on another host, or in another PID namespace where its lock is not visible.
        step: number of the last step that ended, or None if the ring contains none.
        threads: the open calls of each thread.
        now_ns: end of durations, monotonic ns of the recording's host: now, or the last event if the recording ended.
        last_unix_ns: Unix nanoseconds of its last event.
        usual_ns: (fqn, phase) -> median duration of the innermost open calls, as far as the ring has earlier calls.
        progress: its progress in collectives, sends and receives.
        stacks_signal: the signal on which it writes its Python stacks, or None.
        streams: the open calls of its devices' streams, if it records device times.
        memory: sentences on memory: a failed allocation, memory that grows, or memory held when it died.
        known_pid: whether `pid` is valid in this PID namespace.
        unsaved: description of the data lost because it died before it saved; empty if none is lost.
        role: its role in its job; empty if unknown.
    """

    path: str
    rank: int | None
    pid: int = 0
    engine: str = ""
    state: ProcessState = "unknown"
    step: int | None = None
    threads: tuple[ThreadStack, ...] = ()
    now_ns: int = 0
    last_unix_ns: int = 0
    usual_ns: Mapping[tuple[str, str], int] = MappingProxyType({})
    progress: RankProgress = RankProgress()
    stacks_signal: int | None = None
    streams: tuple[StreamState, ...] = ()
    known_pid: bool = False
    memory: tuple[str, ...] = ()
    unsaved: str = ""
    role: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Further sentences on the process: about memory, and about lost data."""
        return (*self.memory, *([unsaved_sentence(self.unsaved)] if self.unsaved else []))

    @property
    def label(self) -> str:
        """Its name in sentences: role and rank, or else the file name."""
        return process_label(self.role, self.rank) or os.path.basename(self.path)

    @property
    def last_ns(self) -> int:
        """The time of the last event, ns of the same clock as `now_ns`."""
        return max((thread.last_ns for thread in self.threads), default=self.now_ns)

    @property
    def hung_threads(self) -> tuple[ThreadStack, ...]:
        """The threads that seem hung."""
        return tuple(filter(self.seems_hung, self.threads))

    def seems_hung(self, thread: ThreadStack) -> bool:
        """Return whether a running thread's innermost call lasts much longer than usual.

        If no thread is in a call, the thread of the last event seems hung after a minute without an event.
        """
        if self.state != "running":
            return False
        if not thread.calls:
            is_last = thread.last_ns == self.last_ns and not any(other_thread.calls for other_thread in self.threads)
            return is_last and self.now_ns - self.last_ns > HUNG_WITHOUT_HISTORY_NS
        call = thread.calls[-1]
        return lasts_too_long(call, self.now_ns - call.since_ns, self.usual_ns.get((call.fqn, call.phase)))

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values: durations in seconds, the time of the last event in Unix nanoseconds."""
        return {
            "file": self.path,
            "rank": self.rank,
            **({"role": self.role} if self.role else {}),
            "pid": self.pid,
            "engine": self.engine,
            "state": self.state,
            "step": self.step,
            "last_event_ns": self.last_unix_ns,
            "last_event_seconds": (self.now_ns - self.last_ns) / 1e9,
            "memory": list(self.memory),
            "unsaved": self.unsaved,
            "collectives": [
                self._progress_to_dict(
                    progress, description=progress.group.description, ranks=list(progress.group.ranks)
                )
                for progress in self.progress.groups
            ],
            "sends_and_receives": [
                self._progress_to_dict(
                    progress, operator=progress.operator, peer=None if progress.peer == ANY_PEER else progress.peer
                )
                for progress in self.progress.peers
            ],
            "threads": [
                {
                    "thread": thread.thread,
                    "tid": thread.tid,
                    "last_event_seconds": (self.now_ns - thread.last_ns) / 1e9,
                    "seems_hung": self.seems_hung(thread),
                    "stack": [
                        self._call_to_dict(call) | {"usual_seconds": self._usual_seconds(call)} for call in thread.calls
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
                    "stack": [self._call_to_dict(call) for call in stream.calls],
                    "collective": stream.collective or None,
                }
                for stream in self.streams
            ],
        }

    def _call_to_dict(self, call: OpenCall) -> dict[str, Any]:
        values: dict[str, Any] = {"fqn": call.fqn, "class": call.module_class, "phase": call.phase}
        if call.compiled_modules:
            values["compiled_modules"] = call.compiled_modules
        if call.compiled_unknown:
            values["compiled_unknown"] = call.compiled_unknown
        if call.is_range:
            values = {"fqn": "", "class": "", "phase": "range", "category": call.phase, "name": call.fqn}
        return values | {"seconds": (self.now_ns - call.since_ns) / 1e9}

    def _progress_to_dict(self, progress: GroupProgress | PeerProgress, **fields: Any) -> dict[str, Any]:
        wait, blocked = None, progress.blocked
        if blocked is not None:
            seconds = (self.now_ns - blocked.since_ns) / 1e9
            wait = {"operator": blocked.operator, "counter": blocked.counter, "seconds": seconds}
        return {"group": progress.group.name, "called": progress.last + 1, "waits_in": wait} | fields

    def _usual_seconds(self, call: OpenCall) -> float | None:
        usual_ns = self.usual_ns.get((call.fqn, call.phase))
        return None if usual_ns is None else usual_ns / 1e9


def read_rank_state(path: str | os.PathLike[str]) -> RankState:
    """Read one ring file, and return the state of its process."""
    now = read_clocks()
    return rank_state_of(path, _read_last_steps(path), now)


def read_clocks() -> tuple[int, int]:
    """Return the current ns of the monotonic clock and of the wall clock."""
    return time.monotonic_ns(), time.time_ns()


def rank_state_of(path: str | os.PathLike[str], analysis: RingAnalysis, now: tuple[int, int]) -> RankState:
    """Return the state of a ring's process, given the events at the ring's end.

    `now` comes from `read_clocks`, called just before the read: later time does not count as time in a call. Raises
    RingError if the end of the file is cut off, which contains the names and the clock.
    """
    snapshot, events = analysis.snapshot, analysis.all_events
    if snapshot.missing_bytes:
        raise RingError(f"{os.fspath(path)}: its last {snapshot.missing_bytes:,} bytes were cut off; copy it again")
    metadata, threads, steps = snapshot.metadata, tuple(analysis.open_stacks), analysis.step_ends.number
    anchors = [record for record in snapshot.records if record["kind"] == "anchor"]
    state: ProcessState = "stopped" if snapshot.has_stopped else snapshot.writer
    last_ns = int(events.time_ns.max()) if len(events) else (int(anchors[-1]["monotonic"]) if anchors else 0)
    now_ns = last_ns
    if state == "running" and snapshot.known_pid:
        now_ns = now[0]
    elif state in ("running", "unknown") and anchors:
        # The monotonic clock of another host or namespace, assuming that the two wall clocks agree.
        now_ns = int(anchors[0]["monotonic"]) + now[1] - int(anchors[0]["wall"])
    return RankState(
        path=os.fspath(path),
        rank=metadata.get("rank"),
        pid=metadata.get("pid", 0),
        engine=str(metadata.get("engine", "")),
        state=state,
        step=int(np.max(steps)) if len(steps) else None,
        threads=threads,
        now_ns=max(now_ns, last_ns),
        last_unix_ns=int(analysis.clock.to_other(np.array([last_ns]))[0]) if anchors else 0,
        usual_ns=analysis.usual_durations([thread.calls[-1] for thread in threads if thread.calls]),
        progress=read_rank_progress(analysis),
        stacks_signal=metadata.get(STACKS_SIGNAL),
        streams=stream_states(analysis, max(now_ns, last_ns), is_running=state in ("running", "unknown")),
        known_pid=snapshot.known_pid,
        memory=_memory(analysis, state),
        unsaved=snapshot.unsaved,
        role=metadata.get("role", ""),
    )


def read_rank_progress(analysis: RingAnalysis) -> RankProgress:
    """Return the progress of a ring's process."""
    slots, lookup = analysis.snapshot.slots, analysis.lookup
    first_ns = int(slots.events.time_ns[0]) if slots.overwritten and len(slots.events) else None
    events, groups = slots.events.take(is_communication(slots.events)), lookup.groups
    names = {
        number: parse_collective(lookup.texts[number])
        for number in np.unique(events.name).tolist()
        if number != NO_NAME
    }
    group_calls = {name: _Calls() for name in groups}
    peer_calls: dict[CollectiveName, _Calls] = {}  # keyed by the name without its device
    columns = (events.kind, events.name, events.value, events.time_ns, events.thread)
    for kind, number, value, time_ns, thread in zip(*(column.tolist() for column in columns), strict=True):
        name = names.get(number)
        if name is None or (name.peer >= 0 and name.operator not in MESSAGES):
            continue
        is_collective = name.peer < 0 and name.operator != ANY_SOURCE
        calls_by_key: dict[Any, _Calls] = group_calls if is_collective else peer_calls
        calls = calls_by_key.setdefault(name.group if is_collective else name._replace(device=""), _Calls())
        calls.add(kind, Blocked(name.operator, value, time_ns, lookup.threads[thread][1]), bool(name.device))

    progress = [
        GroupProgress(groups.get(name) or Group(name), calls.last, calls.recent(), calls.blocked(), calls.sizes())
        for name, calls in group_calls.items()
    ]
    peers = []
    for pair, calls in peer_calls.items():
        operator, peer = ("recv", ANY_PEER) if pair.operator == ANY_SOURCE else (pair.operator, pair.peer)
        group = groups.get(pair.group) or Group(pair.group)
        peers.append(PeerProgress(group, operator, peer, calls.last, calls.blocked()))
    return RankProgress(tuple(progress), tuple(peers), first_ns)


def recent_operators(called: Mapping[int, str]) -> tuple[str, ...]:
    """Return the operators of the last collectives in order of their counters; empty texts if unknown."""
    last = max(called, default=-1)
    first = max(min(called, default=0), last + 1 - _MAX_OPERATORS)
    return tuple(called.get(counter, "") for counter in range(first, last + 1))


class _Calls:
    """The calls of one group, or with one peer, built from their events."""

    def __init__(self) -> None:
        self.called: dict[int, Blocked] = {}
        self._sizes: dict[int, int] = {}
        self._open_calls: dict[int, Blocked] = {}
        self._completed: set[int] = set()
        self._reporting_operators: set[str] = set()
        self._waiting: dict[int, Blocked] = {}

    def add(self, kind: int, call: Blocked, on_device: bool = False) -> None:
        """Add an event, whose value is the counter of `call`. A wait for a device does not complete the collective."""
        value = call.counter
        if kind == Kind.COLLECTIVE_ENTER:
            self.called[value] = self._open_calls[call.tid] = call
        elif kind == Kind.COLLECTIVE_EXIT:
            entered = self._open_calls.pop(call.tid, None)
            if entered is not None:
                self._sizes[entered.counter] = value & (NOT_AWAITED_BIT - 1)
            # No later event reports the completion.
            if entered is not None and value & NOT_AWAITED_BIT:
                self._completed.add(entered.counter)
        elif kind == Kind.COLLECTIVE_DONE:
            self._reporting_operators.add(call.operator)
            self._completed.add(value)
        elif kind == Kind.WAIT_ENTER and value >= 0:
            self._waiting[value] = call
            self.called.setdefault(value, call)
        elif kind == Kind.WAIT_EXIT:
            self._waiting.pop(value, None)
            if not on_device:
                self._completed.add(value)

    @property
    def last(self) -> int:
        return max(self.called, default=-1)

    def recent(self) -> tuple[str, ...]:
        return recent_operators({counter: call.operator for counter, call in self.called.items()})

    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes.get(self.last - back, -1) for back in reversed(range(len(self.recent()))))

    def blocked(self) -> Blocked | None:
        pending = [*self._waiting.values(), *self._open_calls.values()]
        # Calls whose operator reports completion elsewhere, but not for them.
        pending += [
            call
            for counter, call in self.called.items()
            if counter not in self._completed
            and counter not in self._waiting
            and call.operator in self._reporting_operators
        ]
        return min(pending, key=lambda call: call.counter, default=None)


def _memory(analysis: RingAnalysis, state: str) -> tuple[str, ...]:
    memory = held_memory(analysis)
    if memory is None:
        return ()
    if state != "dead" or memory.refused_bytes is not None:
        return tuple(memory.sentences)
    return (
        f"its tensors held {format_bytes(memory.last_bytes)} at its last event; before, {memory.holding}",
        *memory.sentences,
    )


def _read_last_steps(path: str | os.PathLike[str]) -> RingAnalysis:
    """Return the end of a ring with enough events to find all open calls: a few steps, or outermost module calls.

    A ring can contain hours of events, and thousands of rings may be read together.
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
    outermost_names = [number for number, name in enumerate(analysis.lookup.names) if "." not in name.fqn]
    entered_names = events.name[np.isin(events.kind, CALL_ENTER_KINDS)]
    outermost_count = int(np.count_nonzero(np.isin(entered_names, outermost_names)))
    # If the first open module is not an outermost module, the enter of the outermost one is further back.
    calls = [thread.calls[0] for thread in analysis.open_stacks if thread.calls and not thread.calls[0].is_range]
    return outermost_count >= _ENOUGH_STEPS and all("." not in call.fqn for call in calls)

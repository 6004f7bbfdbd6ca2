"""Sentences on ranks that wait in a collective, a send or a receive, and on the ranks that keep them waiting."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._tables import json_values
from ..timeline import Group
from .flight_recorder import FlightRecord
from .places import (
    blocked_calls,
    by_place,
    common_place,
    format_call,
    format_durations,
    format_peer_call,
    global_rank,
    in_place,
    processes_phrase,
)
from .rank_state import ANY_PEER, Blocked, GroupProgress, PeerProgress, RankProgress, RankState

_MIN_WAIT_NS = 1_000_000_000
"""Minimum duration of a hang: rings are not read at the same moment."""
_OTHER_END = {"send": "recv", "recv": "send"}
_EQUAL_SIZE_PREFIXES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor")
"""Prefixes of the names of operators whose tensors have the same size on every rank."""
_DEFAULT_DESCRIPTION = "default_pg"
"""Torch's description of the group of all ranks."""


class Hang(NamedTuple):
    """A collective, a send or a receive that ranks wait in.

    Attributes:
        operator: name in `torch.distributed`.
        group: the group of the call.
        counter: number of the collective in the group, or of the send or receive with its peer, from 0.
        waiting: the waiting ranks, ascending.
        not_called: the running ranks that have not called it, or its other end.
        dead: the ranks that died without calling it.
        called_other: (rank, operator) of the ranks that called another operator instead.
        unknown: the ranks of the group that have no ring.
        wait_ns: duration of the longest wait.
        text: a sentence on the hang.
        details: further facts about the call.
        is_cause: whether it waits for a rank that does not wait in another hang.
    """

    operator: str
    group: Group
    counter: int
    waiting: tuple[int, ...]
    not_called: tuple[int, ...]
    dead: tuple[int, ...]
    called_other: tuple[tuple[int, str], ...]
    unknown: tuple[int, ...]
    wait_ns: int
    text: str
    details: tuple[str, ...] = ()
    is_cause: bool = True

    @property
    def blamed(self) -> set[int]:
        """The ranks that keep the others waiting."""
        return {*self.not_called, *self.dead, *(rank for rank, _ in self.called_other)}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the group's name and the wait in seconds."""
        values: dict[str, Any] = json_values(self) | {"group": self.group.name}
        del values["wait_ns"], values["details"]
        return values | {"wait_seconds": self.wait_ns / 1e9}


def find_hangs(states: Iterable[RankState], *, by_flight_recorder: bool = False) -> list[Hang]:
    """Return one hang for each group, and each pair, with ranks that have waited for at least a second.

    Causes come before the hangs that follow from them, and longer hangs come first.
    """
    ranks = _Ranks(states, by_flight_recorder)
    return _order_hangs([*_collective_hangs(ranks), *_peer_hangs(ranks)])


def hung_sentences(states: Iterable[RankState], hangs: Sequence[Hang]) -> list[str]:
    """Return sentences on other ranks that seem hung, with the place, the time there, and the usual time."""
    named_ranks = {rank for hang in hangs for rank in (*hang.waiting, *hang.blamed)}
    hung_states = [state._replace(threads=state.hung_threads) for state in states if state.rank not in named_ranks]
    sentences = [
        f"{group.label} {'seems' if len(group.ranks) == 1 else 'seem'} hung: {place}"
        for group, place in by_place([state for state in hung_states if len(state.threads) == 1], {})
    ]
    # Several hung threads of a rank, for example in a deadlock, are named separately.
    for state in hung_states:
        places = [by_place([state._replace(threads=(thread,))], {})[0][1] for thread in state.threads]
        if len(places) > 1:
            clauses = [f"{thread.thread} {place}" for thread, place in zip(state.threads, places, strict=True)]
            sentences.append(f"{state.label} seems hung: {', '.join(clauses)}")
    return sentences


def find_all_hangs(states: Sequence[RankState], records: Sequence[FlightRecord] = ()) -> list[Hang]:
    """Return the hangs from rings, with details from dumps of flight recorders, and the hangs that only dumps show.

    Modules come from the rings. Counters come from the ring if it has them, because it also counts sends and receives,
    which gloo's flight recorder does not.
    """
    hangs = find_hangs(states)
    if not records:
        return hangs
    by_rank = {state.rank: state for state in states if state.rank is not None}
    # Gloo's recorder does not have the ranks of groups, and torch may give one name to groups without common ranks.
    groups: dict[str, list[Group]] = {}
    for group in dict.fromkeys(progress.group for state in states for progress in state.progress.groups):
        if group.ranks:
            groups.setdefault(group.name, []).append(group)
    all_ranks = tuple(sorted({*by_rank, *(record.rank for record in records)}))

    def with_ranks(group: Group, rank: int) -> Group:
        if not group.ranks and group.description == _DEFAULT_DESCRIPTION and group.name not in groups:
            return group._replace(ranks=all_ranks)
        ring_groups = [] if group.ranks else groups.get(group.name, [])
        return next((ring_group for ring_group in ring_groups if rank in ring_group.ranks), group)

    joined_states = [_join(record, by_rank.get(record.rank), with_ranks) for record in records]
    by_recorder = {_key(hang): hang for hang in find_hangs(joined_states, by_flight_recorder=True)}
    joined_hangs = []
    for hang in hangs:
        dump_hang = by_recorder.pop(_key(hang), None)
        if dump_hang is not None:
            # The ranks of the dumps are named if they differ from the ranks of the rings.
            differs = set(dump_hang.waiting).isdisjoint(hang.waiting)
            source = f" of {_phrase(by_rank, dump_hang.waiting)}" if differs else ""
            call = ", ".join((f"{dump_hang.operator} #{dump_hang.counter}", *dump_hang.details))
            text = f"{hang.text}; the flight recorder{source} has {call}"
            hang = hang._replace(text=text, details=dump_hang.details)
        joined_hangs.append(hang)
    for hang in by_recorder.values():
        text = "; ".join((hang.text, *hang.details))
        known_places = by_place([by_rank[rank] for rank in hang.unknown if rank in by_rank], {})
        text += "".join(f"; by the ring, {group.label}: {place}" for group, place in known_places)
        joined_hangs.append(hang._replace(text=text))
    return _order_hangs(joined_hangs)


def _join(record: FlightRecord, ring: RankState | None, with_ranks: Callable[[Group, int], Group]) -> RankState:
    """Return the state of a rank with its recorder's progress, whose times are relative to the dump's."""
    if ring is None:
        ring = RankState(record.path, record.rank, now_ns=record.dumped_ns, last_unix_ns=record.dumped_ns)
    shift_ns = record.dumped_ns - ring.now_ns

    def shift(progress: Any) -> Any:
        blocked = progress.blocked and progress.blocked._replace(since_ns=progress.blocked.since_ns - shift_ns)
        return progress._replace(group=with_ranks(progress.group, record.rank), blocked=blocked)

    return ring._replace(progress=RankProgress(tuple(map(shift, record.groups)), tuple(map(shift, record.peers))))


def _key(hang: Hang) -> tuple[Group, str, tuple[int, ...], tuple[int, ...]]:
    """Return the identity of a hang: its group, and for a send or receive the waiting and awaited ranks."""
    group = hang.group._replace(description="")
    if hang.operator not in ("send", "recv"):
        return group, "", (), ()
    return group, hang.operator, hang.waiting, (*hang.not_called, *hang.dead, *hang.unknown)


def _order_hangs(hangs: Sequence[Hang]) -> list[Hang]:
    """Return the hangs with `is_cause` set, causes first."""
    waiting = {rank for hang in hangs for rank in hang.waiting}
    marked = [hang._replace(is_cause=not hang.blamed or not hang.blamed <= waiting) for hang in hangs]
    if not any(hang.is_cause for hang in marked):
        marked = [hang._replace(is_cause=True) for hang in marked]  # ranks that wait for each other
    return sorted(marked, key=lambda h: (not h.is_cause, not h.blamed.isdisjoint(waiting), -h.wait_ns, h.waiting))


class _Ranks:
    """The ranks of a job and their waits; with `by_flight_recorder`, counters are the flight recorder's."""

    def __init__(self, states: Iterable[RankState], by_flight_recorder: bool) -> None:
        # If a rank has two rings, the ring with the later event counts.
        newest_last = sorted(states, key=lambda state: state.last_unix_ns)
        self.by_rank = {state.rank: state for state in newest_last if state.rank is not None}
        self.by_flight_recorder = by_flight_recorder
        self.source = "flight recorder's dump" if by_flight_recorder else "ring"  # source of the states, for sentences
        process_states = {state.state for state in self.by_rank.values()}
        # True if no rank runs, or may run, and at least one died.
        self.none_runs = "dead" in process_states and process_states <= {"dead", "stopped"}
        self.waits: dict[int, str] = {}  # rank -> description of the call in which it has waited for at least a second
        for rank, state in self.by_rank.items():
            calls = blocked_calls(state, by_flight_recorder)
            long_waits = [(call.since_ns, text) for call, text in calls if self.waits_long(rank, call)]
            if long_waits:
                self.waits[rank] = min(long_waits)[1]

    def waits_long(self, rank: int, blocked: Blocked) -> bool:
        """Return whether a running rank has waited in a call for at least a second.

        If no rank runs, each dead rank counts as waiting: the job may have been killed because of the hang.
        """
        state = self.by_rank[rank]
        if self.none_runs:
            return state.state == "dead"
        return state.state not in ("stopped", "dead") and state.now_ns - blocked.since_ns >= _MIN_WAIT_NS

    def phrase(self, ranks: Iterable[int]) -> str:
        """Return ranks as the subject of a sentence, by their roles if known."""
        return _phrase(self.by_rank, ranks)

    def waits_clause(self, blocked: Mapping[int, Blocked], call_text: str) -> str:
        """Return the main clause: the waiting ranks, the call, the duration, and the module."""
        states = [self.by_rank[rank] for rank in blocked]
        place = in_place(common_place(states, [call.tid for call in blocked.values()]))
        if self.none_runs:
            return f"{self.phrase(blocked)} died waiting in {call_text}{place}"
        waited_s = [(state.now_ns - call.since_ns) / 1e9 for state, call in zip(states, blocked.values(), strict=True)]
        verb = "waits" if len(blocked) == 1 else "wait"
        return f"{self.phrase(blocked)} {verb} in {call_text} for {format_durations(waited_s)}{place}"

    def covers(self, state: RankState, wait_ns: int) -> bool:
        """Return whether the events read from a rank's ring cover the wait of the other ranks."""
        return state.progress.first_ns is None or state.now_ns - state.progress.first_ns >= wait_ns


def _find_absent(ranks: _Ranks, absent: Iterable[int], call: str, wait_ns: int) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a `Hang` on ranks that have not called `call` (`it`, `recv`), and a clause on each kind."""
    by_state: dict[str, list[int]] = {}
    for rank in sorted(absent):
        state = ranks.by_rank[rank].state if rank in ranks.by_rank else "absent"
        by_state.setdefault(state if state in ("dead", "stopped", "absent") else "not called", []).append(rank)
    dead, not_called = by_state.get("dead", []), by_state.get("not called", [])
    clauses = []
    if dead:
        last_place = common_place([ranks.by_rank[rank] for rank in dead], [0] * len(dead))
        clauses.append(f"{ranks.phrase(dead)} died before calling {call}" + in_place(last_place))
    for members, place in by_place([ranks.by_rank[rank] for rank in not_called], ranks.waits):
        has = "has" if len(members.ranks) == 1 else "have"
        is_known = all(ranks.covers(state, wait_ns) for state in members.ranks)
        limit = "" if is_known else ", as far as its ring goes back"
        clauses.append(f"{members.label} {has} not called {call}{limit}: {place}")
    if "stopped" in by_state:
        clauses.append(f"the recording of {ranks.phrase(by_state['stopped'])} had been stopped")
    unknown = by_state.get("absent", [])
    if unknown:
        clauses.append(f"there is no {ranks.source} of {ranks.phrase(unknown)}")
    return {"not_called": tuple(not_called), "dead": tuple(dead), "unknown": tuple(unknown)}, clauses


def _phrase(by_rank: Mapping[int, RankState], ranks: Iterable[int]) -> str:
    return processes_phrase((by_rank[rank].role if rank in by_rank else "", rank) for rank in ranks)


def _hang(
    call: Blocked, group: Group, waiting: tuple[int, ...], wait_ns: int, clauses: Sequence[str], **absent: Any
) -> Hang:
    """Return the hang of the waiting ranks in a call; `absent` are the fields on ranks that have not called it."""
    text = "; ".join(clauses)
    return Hang(call.operator, group, call.counter, waiting, wait_ns=wait_ns, text=text, details=call.details, **absent)


def _collective_hangs(ranks: _Ranks) -> Iterator[Hang]:
    """Yield one hang for each group with ranks that have waited for at least a second."""
    for group, members in _groups(ranks):
        waiting = {
            rank: progress.blocked
            for rank, progress in members.items()
            if progress.blocked is not None and ranks.waits_long(rank, progress.blocked)
        }
        if not waiting:
            continue
        first = min(blocked.counter for blocked in waiting.values())
        called = [blocked.operator for blocked in waiting.values() if blocked.counter == first]
        # If ranks called different operators with one counter, the operator that most ranks called counts.
        operator = max(dict.fromkeys(sorted(called)), key=called.count)
        waiting_in_first = {r: b for r, b in sorted(waiting.items()) if b.counter == first and b.operator == operator}
        wait_ns = max(ranks.by_rank[rank].now_ns - blocked.since_ns for rank, blocked in waiting_in_first.items())
        ranks_by_other: dict[str, list[int]] = {}
        for rank, progress in sorted(members.items()):
            if (called_operator := progress.call(first)[0] or operator) != operator:
                ranks_by_other.setdefault(called_operator, []).append(rank)
        has_called = {rank for rank, progress in members.items() if progress.last >= first}
        absent, absent_clauses = _find_absent(ranks, {*(group.ranks or members)} - has_called, "it", wait_ns)
        first_call = next(iter(waiting_in_first.values()))
        sizes = {size for progress in members.values() for name, size in [progress.call(first)] if name == operator}
        sizes = sizes - {-1} if operator.startswith(_EQUAL_SIZE_PREFIXES) else set()
        size_clause = (
            f"its sizes differ between ranks: {min(sizes):,} to {max(sizes):,} bytes" if len(sizes) > 1 else ""
        )
        clauses = [
            ranks.waits_clause(waiting_in_first, format_call(first_call, group, ranks.by_flight_recorder)),
            *([size_clause] if size_clause else []),
            *(f"{ranks.phrase(callers)} called {name} #{first} instead" for name, callers in ranks_by_other.items()),
            *absent_clauses,
        ]
        if len(clauses) == 1:
            clauses.append("all ranks called it, so it does not complete")
        called_other = tuple(sorted((rank, name) for name, callers in ranks_by_other.items() for rank in callers))
        yield _hang(first_call, group, tuple(waiting_in_first), wait_ns, clauses, called_other=called_other, **absent)


def _groups(ranks: _Ranks) -> list[tuple[Group, dict[int, GroupProgress]]]:
    """Return the groups with the progress of their ranks; groups without common ranks may have one name in torch."""
    by_name: dict[str, list[tuple[Group, dict[int, GroupProgress]]]] = {}
    pairs = [(rank, progress) for rank, state in ranks.by_rank.items() for progress in state.progress.groups]
    # A ring that lost the record of a group, and so its ranks, joins a group of that name that includes its rank.
    for rank, progress in sorted(pairs, key=lambda pair: not pair[1].group.ranks):
        group = progress.group
        pairs_of_name = by_name.setdefault(group.name, [])
        matches = (m for g, m in pairs_of_name if g.ranks == group.ranks or (not group.ranks and rank in g.ranks))
        members = next(matches, None)
        if members is None:
            pairs_of_name.append((group, members := {}))
        members[rank] = progress
    return [pair for pairs_of_name in by_name.values() for pair in pairs_of_name]


def _peer_hangs(ranks: _Ranks) -> Iterator[Hang]:
    """Yield one hang for each send and each receive in which a rank has waited for at least a second."""
    for rank, state in ranks.by_rank.items():
        for progress in state.progress.peers:
            blocked = progress.blocked
            if blocked is None or not ranks.waits_long(rank, blocked):
                continue
            wait_ns = state.now_ns - blocked.since_ns
            peer, other_end = global_rank(progress.group, progress.peer), _OTHER_END[progress.operator]
            peers = [] if peer is None else [peer]
            has_called = peer in ranks.by_rank and _has_called(rank, progress, blocked.counter, ranks)
            absent, peer_clauses = _find_absent(ranks, [] if has_called else peers, other_end, wait_ns)
            if has_called:
                peer_clauses = [f"{ranks.phrase(peers)} has called {other_end}, so it does not complete"]
            call_text = format_peer_call(blocked, progress, ranks.by_flight_recorder)
            clauses = [ranks.waits_clause({rank: blocked}, call_text), *peer_clauses]
            yield _hang(blocked, progress.group, (rank,), wait_ns, clauses, called_other=(), **absent)


def _has_called(rank: int, progress: PeerProgress, counter: int, ranks: _Ranks) -> bool:
    """Return whether the other end of a send or receive was called, possibly by a receive from any rank."""
    group = progress.group
    own_rank = group.ranks.index(rank) if rank in group.ranks else rank
    peer = global_rank(group, progress.peer)
    assert peer is not None
    return any(
        end.peer == ANY_PEER or (end.peer == own_rank and end.last >= counter)
        for end in ranks.by_rank[peer].progress.peers
        if end.group.name == group.name and end.operator == _OTHER_END[progress.operator]
    )

"""Texts on the places of ranks: their open modules, the time there, and groups of ranks in the same place.

In a hang, the rank in another place is usually the cause.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._processes import child_processes
from .._tables import duration_text
from ..ring.event_text import CATEGORIES, RangeName, rank_list
from ..timeline import AFTER_BACKWARD, Group, OpenCall, ThreadStack
from .rank_state import ANY_PEER, Blocked, PeerProgress, RankState
from .streams import StreamState


def format_durations(seconds: Sequence[float]) -> str:
    """Return the shortest and the longest duration as text, given seconds."""
    shortest, longest = duration_text(min(seconds)), duration_text(max(seconds))
    return shortest if shortest == longest else f"{shortest} to {longest}"


_OUTSIDE_NODE_TEXT = "backward, in a node outside all modules"
_MAX_NAMED_MODULES = 4
"""Maximum number of modules that the headline names, in addition to the module with the most ranks."""
_MAX_NAMED_FILES = 2
"""Maximum number of files without a rank that the label of a group names."""

StackKey = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""(thread name, (fqn, phase) of each open call, outermost first) of each thread with open calls."""
StreamKey = tuple[int, int, tuple[tuple[str, str], ...], bool, str]
"""(index of the device in the process, stream id, (fqn, phase) of each open call, are they known, collective)."""


class RankGroup(NamedTuple):
    """Ranks that are in the same modules.

    Attributes:
        ranks: states of the ranks, in order.
        stacks: (thread name, (fqn, phase) of each open call, outermost first) of each thread with open calls.
    """

    ranks: tuple[RankState, ...]
    stacks: StackKey

    @property
    def label(self) -> str:
        """The ranks of the group (`ranks 0-2, 5`; `trainer 0-2`), or its first files."""
        ranks = processes_phrase((state.role, state.rank) for state in self.ranks if state.rank is not None)
        labels = [state.label for state in self.ranks if state.rank is None]
        if len(labels) > _MAX_NAMED_FILES + 1:
            labels[_MAX_NAMED_FILES:] = [f"{len(labels) - _MAX_NAMED_FILES} more files"]
        return ", ".join([*([ranks] if ranks else []), *labels])

    @property
    def innermost(self) -> str:
        """The innermost open module of the first thread, or its wait in backward; otherwise of a stream.

        Without a module, it is the range of the first thread, or the pending collective, send or receive, or "".
        """
        calls = min((calls for _, calls in self.stacks), key=lambda calls: calls[-1][1] in CATEGORIES, default=None)
        if calls is None or calls[-1][1] in CATEGORIES:
            on_device = [stream.calls[-1].fqn for stream in self.ranks[0].streams if stream.calls and stream.is_known]
            if on_device or calls is None:
                return f"{on_device[0]} on the device" if on_device else pending_call(self.ranks[0])
            return RangeName(*calls[-1]).place
        fqn, phase = calls[-1]
        return _format_wait(fqn) if phase == AFTER_BACKWARD else fqn or _OUTSIDE_NODE_TEXT


def group_ranks(states: Iterable[RankState]) -> list[RankGroup]:
    """Return groups of ranks with the same state, step and open modules (or pending call), smaller groups first."""
    ranks_by_key: dict[tuple[str, int | None, StackKey | str, tuple[StreamKey, ...]], list[RankState]] = {}
    for state in sorted(states, key=lambda state: (state.rank is None, state.rank or 0, state.path)):
        threads = [thread for thread in state.threads if thread.calls]
        stacks = tuple((thread.thread, tuple((call.fqn, call.phase) for call in thread.calls)) for thread in threads)
        place = stacks or pending_call(state)
        ranks_by_key.setdefault((state.state, state.step, place, _stream_keys(state.streams)), []).append(state)
    groups = [
        RankGroup(tuple(ranks), () if isinstance(place, str) else place)
        for (_, _, place, _), ranks in ranks_by_key.items()
    ]
    return sorted(groups, key=lambda group: len(group.ranks))


def _stream_keys(streams: Sequence[StreamState]) -> tuple[StreamKey, ...]:
    """Return the keys of streams, which do not depend on the device numbers of a rank."""
    devices = sorted({stream.device for stream in streams})
    keys = []
    for stream in streams:
        calls = tuple((call.fqn, call.phase) for call in stream.calls)
        keys.append((devices.index(stream.device), stream.stream, calls, stream.is_known, stream.collective))
    return tuple(keys)


def headline(groups: Sequence[RankGroup]) -> str:
    """Return one line on the modules of all ranks (`rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn`).

    It adds the duration of a range (`rank 3 is in data loading for 31.0 s (usually 4.0 ms), …`), and the last step of
    dead ranks (`rank 3 died in GPT.h.7, after step 12`). For stopped ranks it names the place at their end.
    """
    dead, stopped = ([group for group in groups if group.ranks[0].state == state] for state in ("dead", "stopped"))
    running = [group for group in groups if group.ranks[0].state not in ("dead", "stopped")]
    clauses = []
    if dead:
        steps = sorted({state.step for group in dead for state in group.ranks if state.step is not None})
        steps_text = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else ""
        clauses.append(_places_clause(dead, "died", "died") + (f", after {steps_text}" if steps_text else ""))
    if stopped:
        when = "when it ended" if sum(len(group.ranks) for group in stopped) == 1 else "when they ended"
        clauses.append(f"{_places_clause(stopped, 'was', 'were')} {when}")
    return "; ".join([*clauses, *([_places_clause(running, "is", "are")] if running else [])])


def _places_clause(groups: Sequence[RankGroup], verb_of_one: str, verb_of_several: str) -> str:
    ranks_in: dict[str, list[RankState]] = {}
    for group in groups:
        ranks_in.setdefault(group.innermost, []).extend(group.ranks)
    merged = [(RankGroup(tuple(ranks), ()), module) for module, ranks in ranks_in.items()]
    merged.sort(key=lambda pair: len(pair[0].ranks))
    unnamed = merged[_MAX_NAMED_MODULES:-1] if len(merged) > _MAX_NAMED_MODULES + 2 else []
    if unnamed:
        del merged[_MAX_NAMED_MODULES:-1]
    parts = []
    for index, (group, module) in enumerate(merged):
        count = len(group.ranks)
        if unnamed and index == len(merged) - 1:
            parts.append(f"{sum(len(omitted.ranks) for omitted, _ in unnamed)} in {len(unnamed)} more modules")
            parts.append(f"{count} in {_headline_place(module, group.ranks)}")
            break
        label = group.label
        if index == len(merged) - 1 and index > 0 and count > 1:
            label = f"the other {count}"
        verb = "" if index else f" {verb_of_one if count == 1 else verb_of_several}"
        parts.append(f"{label}{verb} in {_headline_place(module, group.ranks)}")
    return ", ".join(parts)


def _headline_place(innermost: str, states: Sequence[RankState]) -> str:
    thread = _main_thread(states[0])
    last = thread.calls[-1] if thread is not None else None
    is_range = last is not None and innermost == (RangeName(last.fqn, last.phase).place if last.is_range else "")
    if is_range and all(state.state in ("running", "unknown") for state in states):
        return _describe_place(innermost, "", states).removeprefix("in ")
    return innermost or "no module"


def format_stack(calls: Sequence[tuple[str, str]] | Sequence[OpenCall]) -> str:
    """Return a stack as one line, outermost module first (`forward GPT › h.7 › mlp`)."""
    parts = []
    outer_fqn, outer_phase = "", ""
    for fqn, phase, *_ in calls:
        if phase == AFTER_BACKWARD:
            parts.append(f" · {_format_wait(fqn)}")
            continue
        if phase in CATEGORIES:
            parts.append(f" › {RangeName(fqn, phase).place}")
            continue
        if not fqn:
            parts.append(f" · {_OUTSIDE_NODE_TEXT}")
            continue
        name = fqn.removeprefix(f"{outer_fqn}.") if outer_fqn else fqn
        parts.append(f" · {phase} {fqn}" if phase != outer_phase else f" › {name}")
        outer_fqn, outer_phase = str(fqn), str(phase)
    return "".join(parts).removeprefix(" · ").removeprefix(" › ")


def _format_wait(fqn: str) -> str:
    return f"backward, waiting after the last node of {fqn}" if fqn else "backward, before the first node of a module"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, possibly with a stride (`0-2, 5`, `0-24:8`)."""
    return rank_list(numbers).replace(",", ", ")


_DEFAULT_NAME = "0"
_TOWARDS = {"send": "to", "recv": "from"}


def processes_phrase(processes: Iterable[tuple[str, int]]) -> str:
    """Return (role, rank) pairs as the subject of a sentence (`ranks 0-2, 5`, `trainer 0-2, rollout 3`)."""
    ranks_by_role: dict[str, list[int]] = {}
    for role, rank in processes:
        ranks_by_role.setdefault(role, []).append(rank)
    nouns = {role: role or ("rank" if len(ranks) == 1 else "ranks") for role, ranks in ranks_by_role.items()}
    return ", ".join(f"{nouns[role]} {format_ranges(ranks)}" for role, ranks in ranks_by_role.items())


def format_call(call: Blocked, group: Group, by_flight_recorder: bool = False) -> str:
    """Return the description of a collective (`all_reduce #812 of group mesh_tp`)."""
    numbered_by = " (the flight recorder's number)" if by_flight_recorder else ""
    return f"{call.operator} #{call.counter}{numbered_by}{_format_group(group)}"


def pending_call(state: RankState) -> str:
    """Return the first incomplete collective, send or receive of a rank as text; "" if there is none."""
    if state.state == "stopped":
        return ""
    return min(((call.since_ns, text) for call, text in blocked_calls(state)), default=(0, ""))[1]


def blocked_calls(state: RankState, by_flight_recorder: bool = False) -> list[tuple[Blocked, str]]:
    """Return the incomplete calls of a rank, each with its description."""
    calls = [
        (progress.blocked, format_call(progress.blocked, progress.group, by_flight_recorder))
        for progress in state.progress.groups
        if progress.blocked
    ]
    return calls + [
        (progress.blocked, format_peer_call(progress.blocked, progress, by_flight_recorder))
        for progress in state.progress.peers
        if progress.blocked
    ]


def format_peer_call(call: Blocked, progress: PeerProgress, by_flight_recorder: bool = False) -> str:
    """Return the description of a send or receive (`recv #5 from rank 1`)."""
    peer = global_rank(progress.group, progress.peer)
    # A flight recorder has no such counter.
    number = "" if by_flight_recorder else f" #{call.counter}"
    text = f"{progress.operator}{number}{_format_group(progress.group)}"
    return f"{text} {_TOWARDS[progress.operator]} " + ("any rank" if peer is None else f"rank {peer}")


def global_rank(group: Group, rank_in_group: int) -> int | None:
    """Return the global rank of a peer; None for any rank."""
    if rank_in_group == ANY_PEER:
        return None
    return group.ranks[rank_in_group] if rank_in_group < len(group.ranks) else rank_in_group


def _format_group(group: Group) -> str:
    return "" if group.name == _DEFAULT_NAME else f" of group {group.description or group.name}"


def in_place(place: str) -> str:
    """Return `, in PLACE` for the end of a clause; empty for an empty place."""
    if not place:
        return ""
    return f", {place}" if place.startswith("most in ") else f", in {place}"


def common_place(states: Sequence[RankState], tids: Sequence[int]) -> str:
    """Return the modules that more than half of the threads are in; otherwise an empty text.

    Thread id 0 means the first thread in a module, or else in a range.
    """
    stacks = Counter(_stack_of(state, tid) for state, tid in zip(states, tids, strict=True))
    stack, count = stacks.most_common(1)[0]
    if not stack or count == len(states):
        return stack
    return f"most in {stack}" if 2 * count > len(states) else ""


def _stack_of(state: RankState, tid: int) -> str:
    thread = next((thread for thread in state.threads if thread.tid == tid), None) if tid else _main_thread(state)
    return format_stack(thread.calls) if thread is not None else ""


def by_place(states: Sequence[RankState], waits: Mapping[int, str]) -> list[tuple[RankGroup, str]]:
    """Return groups of ranks by place, each with a text on the module, the time there, and the usual time."""
    states_by_place: dict[tuple[str, str], list[RankState]] = {}
    for state in states:
        thread = _main_thread(state)
        wait = waits.get(state.rank, "") if state.rank is not None else ""
        states_by_place.setdefault((format_stack(thread.calls) if thread else "", wait), []).append(state)
    return [
        (RankGroup(tuple(members), ()), _describe_place(stack, wait, members) + _describe_workers(members))
        for (stack, wait), members in states_by_place.items()
    ]


def workers(state: RankState) -> dict[int, str]:
    """Return pid -> place of the child processes of a process that waits for its DataLoader, see `child_processes`."""
    thread = _main_thread(state)
    is_loading = thread is not None and thread.calls[-1].phase == "data loading"
    return child_processes(state.pid) if is_loading and state.state == "running" and state.known_pid else {}


def _describe_workers(states: Sequence[RankState]) -> str:
    place_of = workers(states[0]) if len(states) == 1 else {}
    counts = sorted(Counter(place_of.values()).items(), key=lambda item: item[1])
    pids = {place: f"pid {pid}" for pid, place in place_of.items()}
    clauses = [f"{pids[place] if count == 1 else count} {place}" for place, count in counts]
    return f"; child processes: {', '.join(clauses)}" if clauses else ""


def _describe_place(stack: str, wait: str, states: Sequence[RankState]) -> str:
    if wait:
        verb = "it waits" if len(states) == 1 else "they wait"
        return f"{verb} in {wait}" + (f", in {stack}" if stack else "")
    if not any(state.threads for state in states):
        return "place unknown"
    if not stack:
        return f"in no module for {format_durations([(s.now_ns - s.last_ns) / 1e9 for s in states])}"
    innermost = [(state, thread.calls[-1]) for state in states if (thread := _main_thread(state))]
    text = f"in {stack} for {format_durations([(state.now_ns - call.since_ns) / 1e9 for state, call in innermost])}"
    usual_s = [ns / 1e9 for state, call in innermost if (ns := state.usual_ns.get((call.fqn, call.phase))) is not None]
    return text + (f" (usually {format_durations(usual_s)})" if usual_s else "")


def _main_thread(state: RankState) -> ThreadStack | None:
    """Return the first thread in a module, or else in a range."""
    threads = [thread for thread in state.threads if thread.calls]
    return min(threads, key=lambda thread: thread.calls[-1].phase in CATEGORIES, default=None)

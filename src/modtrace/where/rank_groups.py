"""Ranks with the same open modules, together: in a hang, the one that is elsewhere is what one looks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..timeline import AFTER_BACKWARD, OpenCall
from .rank_state import RankState
from .stream_state import StreamState

__all__ = ["RankGroup", "format_ranges", "format_stack", "group_ranks", "headline"]

_MAX_NAMED_MODULES = 4
"""Modules that the headline names beside that with the most ranks."""
_MAX_NAMED_FILES = 2
"""Files without a rank that the label of a group names; a line must stay readable."""

StackKey = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""For each thread with open calls its name and the (fqn, phase) of these, outermost first."""
StreamKey = tuple[int, int, tuple[tuple[str, str], ...], bool, str]
"""For each stream the index of its device among those of the process, its id, its (fqn, phase), and whether these are
known."""


class RankGroup(NamedTuple):
    """Ranks with the same open modules.

    Attributes:
        ranks: in order of their ranks.
        stacks: for each thread with open calls its name and the (fqn, phase) of these, outermost first.
    """

    ranks: tuple[RankState, ...]
    stacks: StackKey

    @property
    def label(self) -> str:
        """Its ranks (`ranks 0-2, 5`), or its files, of many the first ones."""
        ranks = [state.rank for state in self.ranks if state.rank is not None]
        labels = [state.label for state in self.ranks if state.rank is None]
        if len(labels) > _MAX_NAMED_FILES + 1:
            labels[_MAX_NAMED_FILES:] = [f"{len(labels) - _MAX_NAMED_FILES} more files"]
        if ranks:
            labels.insert(0, f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}")
        return ", ".join(labels)

    @property
    def innermost(self) -> str:
        """The fqn of the innermost open module of its first thread, or what it waits for; else of a stream, or ""."""
        if not self.stacks:
            on_device = [stream.calls[-1].fqn for stream in self.ranks[0].streams if stream.calls and stream.is_known]
            return f"{on_device[0]} on the device" if on_device else ""
        fqn, phase = self.stacks[0][1][-1]
        return _format_wait(fqn) if phase == AFTER_BACKWARD else fqn


def group_ranks(states: Iterable[RankState]) -> list[RankGroup]:
    """Put together the ranks with the same state, step and open modules; smaller groups first."""
    ranks_by_key: dict[tuple[str, int | None, StackKey, tuple[StreamKey, ...]], list[RankState]] = {}
    for state in sorted(states, key=lambda state: (state.rank is None, state.rank or 0, state.path)):
        stacks = tuple(
            (thread.thread, tuple((call.fqn, call.phase) for call in thread.calls))
            for thread in state.threads
            if thread.calls
        )
        ranks_by_key.setdefault((state.state, state.step, stacks, _stream_keys(state.streams)), []).append(state)
    groups = [RankGroup(tuple(ranks), stacks) for (_, _, stacks, _), ranks in ranks_by_key.items()]
    return sorted(groups, key=lambda group: len(group.ranks))


def _stream_keys(streams: Sequence[StreamState]) -> tuple[StreamKey, ...]:
    """Return what tells streams apart, of ranks whose devices have other numbers too."""
    devices = sorted({stream.device for stream in streams})
    return tuple(
        (
            devices.index(stream.device),
            stream.stream,
            tuple((call.fqn, call.phase) for call in stream.calls),
            stream.is_known,
            stream.collective,
        )
        for stream in streams
    )


def headline(groups: Sequence[RankGroup]) -> str:
    """Tell in one line which ranks are in which module (`rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn`)."""
    ranks_in: dict[str, list[RankState]] = {}
    for group in groups:
        ranks_in.setdefault(group.innermost, []).extend(group.ranks)
    merged = [(RankGroup(tuple(ranks), ()), module) for module, ranks in ranks_in.items()]
    merged.sort(key=lambda pair: len(pair[0].ranks))
    left = merged[_MAX_NAMED_MODULES:-1] if len(merged) > _MAX_NAMED_MODULES + 2 else []
    if left:
        del merged[_MAX_NAMED_MODULES:-1]
    parts = []
    for index, (group, module) in enumerate(merged):
        count = len(group.ranks)
        if left and index == len(merged) - 1:
            elsewhere = sum(len(other.ranks) for other, _ in left)
            parts += [f"{elsewhere} in {len(left)} more modules", f"{count} in {module or 'no module'}"]
            break
        label = group.label
        if index == len(merged) - 1 and index > 0 and count > 1:
            label = f"the other {count}"
        verb = "" if index else (" is" if count == 1 else " are")
        parts.append(f"{label}{verb} in {module or 'no module'}")
    return ", ".join(parts)


def format_stack(calls: Sequence[tuple[str, str]] | Sequence[OpenCall]) -> str:
    """Return a stack in one line: each module below the one around it (`forward GPT › h.7 › mlp`)."""
    parts = []
    outer_fqn, outer_phase = "", ""
    for fqn, phase, *_ in calls:
        if phase == AFTER_BACKWARD:
            parts.append(f" · {_format_wait(fqn)}")
            continue
        name = fqn.removeprefix(f"{outer_fqn}.") if outer_fqn else fqn
        parts.append(f" · {phase} {fqn}" if phase != outer_phase else f" › {name}")
        outer_fqn, outer_phase = str(fqn), str(phase)
    return "".join(parts).removeprefix(" · ")


def _format_wait(fqn: str) -> str:
    return f"backward, waiting after the last node of {fqn}" if fqn else "backward, before the first node of a module"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges (`0-2, 5`)."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

"""The table of `modtrace where`: one row per group of ranks in the same place, so that 1,000 ranks fit on a screen."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .._tables import cut_to_width, printable
from .hangs import Hang, hung_sentences
from .places import RankGroup, format_durations, format_ranges, format_stack, headline, pending_call
from .rank_state import RankState
from .streams import StreamState

_MAX_PIDS = 2
_MAX_GROUPS = 24
_MAX_SENTENCES = 8
_MIN_WIDTH = 16
"""Minimum number of characters for the open calls in a narrow terminal."""
_COLORS = {"running": "green", "dead": "red", "stopped": "dim", "unknown": "yellow"}


def render(
    groups: Sequence[RankGroup], errors: Iterable[str] = (), hangs: Sequence[Hang] = (), *, show_all: bool = False
) -> RenderableType:
    """Return the errors, headline, hangs, and a row per group and thread; without `show_all`, only the first ones."""
    states = [rank for group in groups for rank in group.ranks]
    lines: list[RenderableType] = _first([_text(error, "red") for error in errors], "errors", show_all)
    if len(states) > 1 or any(group.ranks[0].state == "dead" for group in groups):
        lines += [_text(text, "bold") for text in [headline(groups)] if text]
    hang_texts = [*(hang.text for hang in hangs if hang.is_cause), *hung_sentences(states, hangs)]
    lines += _first([_text(text, "bold red") for text in hang_texts], "hangs", show_all)
    following = [hang for hang in hangs if not hang.is_cause]
    if show_all:
        lines += [_text(hang.text) for hang in following]
    elif following:
        waiting = {rank for hang in following for rank in hang.waiting}
        summary = f"{len(following):,} more, of {len(waiting):,} ranks (--all)"
        lines.append(_text(f"following from that: {following[0].text if len(following) == 1 else summary}"))
    lines += _first([_text(f"{state.label}: {text}") for state in states for text in state.notes], "lines", show_all)
    if len(lines) > 0 and groups:
        lines.append("")
    if groups:
        blamed = {rank for hang in hangs if hang.is_cause for rank in hang.blamed}
        ordered = sorted(groups, key=lambda group: blamed.isdisjoint(rank.rank for rank in group.ranks))
        visible_groups = ordered if show_all else ordered[:_MAX_GROUPS]
        lines.append(_table(visible_groups))
        if len(visible_groups) < len(groups):
            hidden_groups = ordered[len(visible_groups) :]
            count = sum(len(group.ranks) for group in hidden_groups)
            lines.append(f"… and {count:,} ranks in {len(hidden_groups):,} more places (--all shows them)")
    return Group(*lines)


def _first(lines: list[RenderableType], noun: str, show_all: bool) -> list[RenderableType]:
    if show_all or len(lines) <= _MAX_SENTENCES + 1:
        return lines
    return [*lines[:_MAX_SENTENCES], f"… and {len(lines) - _MAX_SENTENCES:,} more {noun} (--all shows them)"]


def _table(groups: Sequence[RankGroup]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "pid", "state", "step", "thread"):
        table.add_column(column, overflow="fold")
    table.add_column("in")
    for column in ("for", "usually"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        first = group.ranks[0]
        step = "" if first.step is None else str(first.step)
        pids = [str(rank.pid) for rank in group.ranks]
        pid = ", ".join(pids) if len(pids) <= _MAX_PIDS else f"{pids[0]} …"
        state = Text(first.state, style=_COLORS[first.state])
        head: list[RenderableType] = [_text(group.label), pid, state, step]
        for thread_index, (thread, calls) in enumerate(group.stacks):
            threads = [[stack for stack in rank.threads if stack.calls][thread_index] for rank in group.ranks]
            since_ns = [stack.calls[-1].since_ns for stack in threads]
            is_hung = any(rank.seems_hung(stack) for rank, stack in zip(group.ranks, threads, strict=True))
            style = "bold red" if is_hung else ""
            innermost = threads[0].calls[-1]
            kind = innermost.fqn if innermost.is_range else innermost.described_class
            stack_text = format_stack(calls) + (f" ({kind})" if kind and innermost.phase != "user" else "")
            duration = _text(_duration_text(since_ns, group), style)
            usual_s = [rank.usual_ns[calls[-1]] / 1e9 for rank in group.ranks if calls[-1] in rank.usual_ns]
            usually = format_durations(usual_s) if usual_s else ""
            table.add_row(*head, _text(thread), EndOfText(printable(stack_text), style), duration, usually)
            head = ["", "", "", ""]
        if not group.stacks:
            style = "bold red" if any(rank.hung_threads for rank in group.ranks) else ""
            duration_text = _duration_text([rank.last_ns for rank in group.ranks], group)
            table.add_row(
                *head, "", _text(pending_call(group.ranks[0]) or "no module", style), _text(duration_text, style), ""
            )
        for streams in zip(*(rank.streams for rank in group.ranks), strict=True):
            devices = {stream.device for stream in streams}
            label = f"device{'s' if len(devices) > 1 else ''} {format_ranges(devices)}, stream {streams[0].stream}"
            place = EndOfText(printable(_format_streams(streams)), "" if streams[0].is_known else "yellow")
            since_ns = [_since_ns(rank, stream) for rank, stream in zip(group.ranks, streams, strict=True)]
            table.add_row("", "", "", "", label, place, _duration_text(since_ns, group), "")
    return table


def _since_ns(rank: RankState, stream: StreamState) -> int:
    """Return the start of a stream's innermost call; if unknown, the time of its last read."""
    if stream.is_known and stream.calls:
        return stream.calls[-1].since_ns
    return rank.last_ns if stream.read_ns is None else stream.read_ns


def _format_streams(streams: Sequence[StreamState]) -> str:
    """Return the place of one stream of a group's ranks, and the number of calls queued behind it."""
    first = streams[0]
    where = (format_stack(first.calls) or "no module") + (f", in {first.collective}" if first.collective else "")
    if not first.is_known:
        # The device may have passed unread events.
        where = f"unknown; last read: {where}" if first.read_ns is not None else "unknown; nothing was read"
    dropped = any(stream.dropped for stream in streams)
    if not any(stream.unread for stream in streams):
        return f"{where}; " + ("queued calls have no events" if dropped else "nothing queued behind it")
    min_calls, max_calls = (bound(stream.queued for stream in streams) for bound in (min, max))
    count = f"{min_calls:,}" if min_calls == max_calls else f"{min_calls:,} to {max_calls:,}"
    calls = f"{'at least ' if dropped else ''}{count} {'call' if max_calls == 1 else 'calls'}"
    return f"{where}; {calls} queued {'behind it' if first.is_known else 'and not read'}"


class EndOfText:
    """A line of text that is cut at its start if space is short, because its end names the innermost call."""

    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = text, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the part of the text that fits."""
        yield Text(cut_to_width(self._text, options.max_width), style=self._style, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the minimum and maximum width."""
        return Measurement(min(len(self._text), _MIN_WIDTH), len(self._text))


def _text(text: str, style: str = "") -> Text:
    """Return a text of unknown origin without markup, and with terminal control sequences escaped."""
    return Text(printable(text), style=style)


def _duration_text(since_ns: Sequence[int], group: RankGroup) -> str:
    """Return the duration since `since_ns`; if the recording is over, the start instead: the day, or today the time.

    A killed process may have spent a long time in its last call, so its last event is not its end.
    """
    if group.ranks[0].state in ("running", "unknown"):
        durations = [(rank.now_ns - start_ns) / 1e9 for rank, start_ns in zip(group.ranks, since_ns, strict=True)]
        return format_durations(durations)
    first_unix_ns = min(
        rank.last_unix_ns - (rank.now_ns - start_ns) for rank, start_ns in zip(group.ranks, since_ns, strict=True)
    )
    start = datetime.fromtimestamp(first_unix_ns / 1e9)
    return f"since {start:%T}" if start.date() == datetime.now().date() else f"since {start:%F}"

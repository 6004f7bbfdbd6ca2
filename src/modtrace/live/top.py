"""The screen of a job: redrawn while a thread reads the rings, and controlled by keys."""

import contextlib
import importlib.util
import os
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .._tables import counted, is_terminal, printable
from .follow import RATE_SORT_KEYS, RankRates, merge_ranks, sort_modules
from .hangs import find_hangs, hung_sentences
from .places import RankGroup, format_durations, format_stack
from .rank_state import RankState
from .where_table import EndOfText

KEYS_HELP = "q quit  p pause  s sort  - + fold  m modules or ranks  [ ] rank  ↑ ↓ scroll"
_PAGE = 10


@dataclass(slots=True)
class ScreenState:
    """The user's choices: the rows on the screen, and their order."""

    sort: str = "self"  # one of `RATE_SORT_KEYS`
    max_depth: int | None = None  # maximum number of levels of modules; None for all
    by_rank: bool = False  # True for a row per rank, False for a row per module
    rank: int | None = None  # index of the rank whose modules are shown; None for the mean of all ranks
    is_paused: bool = False  # whether the screen is frozen
    first: int = 0  # index of the first visible row
    has_quit: bool = False  # whether the user has quit
    help: str = KEYS_HELP  # the last line, with the keys

    def press(self, key: str, ranks: int, depth: int) -> None:
        """Apply a key; unknown keys do nothing."""
        if key in ("q", "Q"):
            self.has_quit = True
        elif key in ("p", " "):
            self.is_paused = not self.is_paused
        elif key in ("s", "S"):
            step = 1 if key == "s" else -1
            self.sort = RATE_SORT_KEYS[(RATE_SORT_KEYS.index(self.sort) + step) % len(RATE_SORT_KEYS)]
        elif key == "-":
            self.max_depth = max(1, (depth if self.max_depth is None else min(self.max_depth, depth)) - 1)
        elif key in ("+", "="):
            self.max_depth = None if self.max_depth is None or self.max_depth + 1 >= depth else self.max_depth + 1
        elif key == "m":
            self.by_rank, self.first = not self.by_rank, 0
        elif key in ("[", "]") and ranks:
            # The view of all ranks comes before the first rank.
            index = (0 if self.rank is None else min(self.rank, ranks - 1) + 1) + (1 if key == "]" else -1)
            index %= ranks + 1
            self.rank, self.by_rank, self.first = (index - 1 if index else None), False, 0
        else:
            row_offset = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE}.get(key, 0)
            self.first = max(0, self.first + row_offset)


_UNLIMITED = 1 << 16
_MIN_ROWS = 3
_MIN_NAME_WIDTH = 12
_NUMBER_WIDTH = 9
_MAX_RANK_WIDTH = 24
_MIN_SHARE = 0.005
"""Minimum share of a step for a part to be shown."""

_Row = tuple[str, list[RenderableType]]
"""The style and the cells of a row."""


class JobView(NamedTuple):
    """The result of reading all rings of a job once."""

    ranks: Sequence[RankRates]  # rates of each rank, in order
    errors: Sequence[str]  # errors of rings that could not be read, or a line that there are no rings yet
    read_s: float  # duration of the read

    @property
    def depth(self) -> int:
        """The number of levels of modules."""
        return max((row.fqn.count(".") + 1 for rank in self.ranks for row in rank.rows), default=1)


def render_screen(job: JobView, screen: ScreenState, width: int, height: int | None = None) -> RenderableType:
    """Return the screen: a line on the job, its problems, and a table; without a height, all rows and no help.

    If there are fewer rows than before, `screen.first` is moved back, so that scrolling continues from there.
    """
    chosen_ranks = job.ranks if screen.rank is None else job.ranks[screen.rank : screen.rank + 1] or job.ranks[-1:]
    lines: list[RenderableType] = [_line(_headline(job, chosen_ranks, screen), "bold")]
    alarms = [*(printable(error) for error in job.errors), *_alarms(job.ranks)]
    room = max(1, (height or _UNLIMITED) // 3)
    for number, alarm in enumerate(alarms):
        wrapped = wrap(alarm, width) or [""]
        if len(wrapped) > room:
            lines.append(_line(f"… and {len(alarms) - number} more", "red") if number else _line(alarm, "bold red"))
            break
        room -= len(wrapped)
        lines += [_line(part, "bold red") for part in wrapped]
    parts = _parts_line(chosen_ranks)
    if parts:
        lines.append(_line(parts, ""))
    table, rows = _rank_table(job.ranks) if screen.by_rank else _module_table(chosen_ranks, screen)
    if height is None:
        table.expand = False  # a pipe has no width
        return Group(*lines, Text(""), _filled(table, rows))
    room = max(_MIN_ROWS, height - len(lines) - 3)  # without a blank line, the table's head and the keys
    screen.first = min(screen.first, max(0, len(rows) - room))
    visible_rows = rows[screen.first : screen.first + room]
    blank = [Text("") for _ in range(room - len(visible_rows))]
    place = f"{screen.first + 1}–{screen.first + len(visible_rows)} of {len(rows)}  " if len(rows) > room else ""
    return Group(*lines, Text(""), _filled(table, visible_rows), *blank, _line(place + screen.help, "dim"))


def _filled(table: Table, rows: Sequence[_Row]) -> Table:
    for style, cells in rows:
        table.add_row(*cells, style=style)
    return table


def _make_table() -> Table:
    return Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold underline")


def _headline(job: JobView, ranks: Sequence[RankRates], screen: ScreenState) -> str:
    states = [rank.state for rank in ranks]
    parts = []
    if states:
        label = printable(states[0].label) if len(states) == 1 else f"{len(states):,} ranks"
        counts = Counter(map(_state, states))
        parts.append(
            label + " " + ", ".join(f"{n:,} {name}" if len(states) > 1 else name for name, n in counts.items())
        )
        steps = sorted({state.step for state in states if state.step is not None})
        if steps:
            parts.append(f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}")
        quiet_states = [rank.state for rank in ranks if rank.is_quiet and rank.state.state == "running"]
        if quiet_states:
            source = f" from {counted(len(quiet_states), 'rank')}" if len(quiet_states) < len(ranks) else ""
            quiet_s = [(state.now_ns - state.last_ns) / 1e9 for state in quiet_states]
            parts.append(f"no event{source} for {format_durations(quiet_s)}")
        rates = sorted(rank.steps_per_s for rank in ranks if rank.steps_per_s is not None)
        if rates and len(quiet_states) < len(ranks):
            parts.append(f"{_rate(rates[len(rates) // 2])} steps/s")
        measured = [rank for rank in ranks if rank.window_ns]
        if measured:
            waiting = sum(rank.communication_ns / rank.window_ns for rank in measured) / len(measured)
            parts.append(f"communication {waiting:.0%}")
            window = format_durations([max(rank.window_ns for rank in measured) / 1e9])
            parts.append(f"last {window}" if len(quiet_states) < len(ranks) else f"{window} before")
    if screen.is_paused:
        parts.insert(0, "PAUSED")
    if job.read_s > 1:
        parts.append(f"read in {job.read_s:.1f} s")
    return " · ".join(parts) or "no rank yet"


def _parts_line(ranks: Sequence[RankRates]) -> str:
    """Return the mean share of each part of the steps over the ranks (`data loading 6% · forward 28%`)."""
    measured = [rank.parts for rank in ranks if rank.parts]
    if not measured:
        return ""
    names = [name for name in dict.fromkeys(name for parts in measured for name in parts) if name != "other"]
    shares = [(name, sum(parts.get(name, 0.0) for parts in measured) / len(measured)) for name in [*names, "other"]]
    return " · ".join(f"{printable(name)} {share:.0%}" for name, share in shares if share >= _MIN_SHARE)


def _alarms(ranks: Sequence[RankRates]) -> list[str]:
    """Return sentences on ranks that hang, stall or died."""
    states = [rank.state for rank in ranks]
    hangs = find_hangs(states)
    alarms = [*(hang.text for hang in hangs if hang.is_cause), *hung_sentences(states, hangs)]
    dead = tuple(state for state in states if state.state == "dead")
    if dead:
        alarms.append(f"{RankGroup(dead, ()).label} died")
    return [printable(alarm) for alarm in alarms]


def _state(state: RankState) -> str:
    return "hung" if state.hung_threads else state.state


def _module_table(ranks: Sequence[RankRates], screen: ScreenState) -> tuple[Table, list[_Row]]:
    modules = sort_modules(merge_ranks(ranks, screen.max_depth), screen.sort)
    has_busiest_rank = any(module.busiest_rank is not None for module in modules)
    rates = sorted(rank.window_steps_per_s for rank in ranks if rank.window_steps_per_s)
    per_step = rates[len(rates) // 2] if rates else 0.0
    heads = ["self %", "total %", "fwd ms", "bwd ms", "calls/s", *(["most on"] if has_busiest_rank else [])]
    sorted_by = dict(zip(("self", "total", "forward", "backward", "calls"), heads, strict=False)).get(screen.sort)
    name = ("module↓" if screen.sort == "name" else "module") + (" · ms per step" if per_step else " · ms per second")
    if screen.max_depth is not None:
        name += f" · {counted(screen.max_depth, 'level')}"
    open_modules = {
        call.fqn for rank in ranks if rank.is_quiet for thread in rank.state.threads for call in thread.calls[-1:]
    }
    table = _make_table()
    table.add_column(name, ratio=1, no_wrap=True, min_width=_MIN_NAME_WIDTH)
    for head in heads:
        title = f"{head}↓" if head == sorted_by else head
        table.add_column(title, justify="right", no_wrap=True, min_width=_NUMBER_WIDTH)
    scale = 1e3 / per_step if per_step else 1e3
    rows: list[_Row] = []
    for module in modules:
        shares = [f"{100 * share:.1f}" for share in (module.self_share, module.total_share)]
        times = [f"{scale * share:,.2f}" for share in (module.forward_share, module.backward_share)]
        fqn = EndOfText(printable(module.fqn))
        cells: list[RenderableType] = [fqn, *shares, *times, f"{module.calls_per_s:,.1f}"]
        if has_busiest_rank:
            busiest = f"{module.busiest_role} {module.busiest_rank}: {100 * module.busiest_share:.1f}".lstrip()
            cells.append("" if module.busiest_rank is None else busiest)
        rows.append(("bold red" if module.fqn in open_modules else "", cells))
    return table, rows


def _rank_table(ranks: Sequence[RankRates]) -> tuple[Table, list[_Row]]:
    table = _make_table()
    table.add_column("rank", no_wrap=True, max_width=_MAX_RANK_WIDTH)
    for head in ("state", "step", "steps/s", "comm %"):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    table.add_column("in", ratio=1, no_wrap=True)
    rows: list[_Row] = []
    for rank in ranks:
        state = rank.state
        thread = next((thread for thread in state.threads if thread.calls), None)
        place = "no module"
        if thread is not None:
            duration = format_durations([(state.now_ns - thread.calls[-1].since_ns) / 1e9])
            place = f"{format_stack(thread.calls)} {duration}"
        label, where = EndOfText(printable(state.label)), EndOfText(printable(place))
        step = "" if state.step is None else f"{state.step:,}"
        rate = "" if rank.steps_per_s is None else _rate(rank.steps_per_s)
        communication = f"{rank.communication_ns / rank.window_ns:.0%}" if rank.window_ns else ""
        cells: list[RenderableType] = [label, _state(state), step, rate, communication, where]
        rows.append(("bold red" if _state(state) in ("hung", "dead") else "", cells))
    return table, rows


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2f}"


_KEY_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


@contextlib.contextmanager
def keyboard() -> Iterator[int | None]:
    """Yield the descriptor of standard input in a mode without line buffering; restore the terminal afterwards.

    Yields None if standard input is not a terminal, or the system is not POSIX.
    """
    if importlib.util.find_spec("termios") is None or not is_terminal(sys.stdin):
        yield None
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    old_settings = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # Ctrl-C remains a signal
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, old_settings)


def read_keys(descriptor: int | None, timeout_s: float) -> list[str]:
    """Return the pressed keys, after the timeout or as soon as there is one."""
    if descriptor is None:
        time.sleep(timeout_s)
        return []
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return []
    data = os.read(descriptor, 1024)
    if not data:
        return ["q"]  # the terminal was closed
    return [_KEY_NAMES.get(key, key.decode("ascii", "replace")) for key in _KEY.findall(data)]


_POLL_S = 0.1


def show_live(read: Callable[[], JobView], console: Console, refresh_s: float) -> None:
    """Show the job on a terminal until q or KeyboardInterrupt; the terminal is restored."""
    screen, over = ScreenState(), threading.Event()
    latest = deque([JobView((), ("reading …",), 0.0)], maxlen=1)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keyboard() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
        ThreadPoolExecutor(1) as reader,
    ):
        drawn_content: object = None
        if keys is None:
            screen.help = "Ctrl-C quits"
        try:
            reading = reader.submit(_read_on, read, screen, latest, over, refresh_s)
            while not screen.has_quit:
                for key in read_keys(keys, _POLL_S):
                    screen.press(key, len(latest[0].ranks), latest[0].depth)
                if reading.done():
                    reading.result()  # raises the error that ended it
                job = latest[0]
                content = (job, console.size, repr(screen))
                if content != drawn_content:
                    live.update(render_screen(job, screen, console.width, console.height), refresh=True)
                    drawn_content = content
        finally:
            over.set()


def _read_on(
    read: Callable[[], JobView], screen: ScreenState, latest: deque[JobView], over: threading.Event, refresh_s: float
) -> None:
    """Read the job repeatedly; `latest` contains the last result."""
    while not over.is_set():
        start_s = time.monotonic()
        if not screen.is_paused:
            job = read()
            if not screen.is_paused:  # the user may have paused during the read
                latest.append(job)
        # Reading uses at most half of one core, for any number of rings.
        read_s = time.monotonic() - start_s
        over.wait(max(refresh_s - read_s, read_s, 0.05))

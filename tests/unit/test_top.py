"""`modtrace top`: the last seconds of one ring and of several, the screen and its keys."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from modtrace.cli.group import group as commands
from modtrace.live.follow import ModuleRate, RankRates, merge_ranks, read_rank_rates, sort_modules, steps_per_second
from modtrace.live.top import JobView, ScreenState, _read_on, keyboard, read_keys, render_screen, show_live
from modtrace.live.where import RankState
from modtrace.ring import Kind
from modtrace.timeline import OpenCall
from modtrace.timeline.summary import ModuleTimes
from tests.support.rank_states import NOW, called, calls, state
from tests.support.where_rings import Writer

SECOND = 10**9


@pytest.mark.parametrize(
    ("ends_s", "now_s", "rate"),
    [
        ([], 100, None),
        ([99], 100, None),
        ([91, 92, 93, 99.5], 100, 3 / 8.5),
        ([80, 89, 95, 99], 100, 2 / 10),  # from the last one before the window on
        ([10, 40], 60, 1 / 30),  # both before the window
        ([10, 40], 130, 1 / 120),  # the third has taken three times as long
        ([98, 99], 100, 1.0),
        ([50, 50], 50, None),
    ],
)
def test_steps_per_second_are_those_of_the_window_or_the_last_two(
    ends_s: list[float], now_s: float, rate: float | None
) -> None:
    ends = (np.array(ends_s) * SECOND).astype(np.int64)
    measured = steps_per_second(ends, int(now_s * SECOND), 10 * SECOND)
    assert measured == (None if rate is None else pytest.approx(rate))


def test_a_ring_tells_what_ran_in_the_last_seconds(tmp_path: Path) -> None:
    path = tmp_path / "0.modtrace"
    writer = Writer(path, rank=3, pid=1 << 30)
    writer.enter(0, "Net")  # 6 of its 10 s lie in the last 8
    writer.enter(1, "Net.old")
    writer.call(2, Kind.FORWARD_EXIT, "Net.old")
    writer.enter(4, "Net.a")
    writer.call(6, Kind.FORWARD_EXIT, "Net.a")
    writer.call(8, Kind.FORWARD_EXIT, "Net")
    writer.event(10, Kind.STEP, 0, 7)
    rates = read_rank_rates(path, 8, 1000)
    assert (rates.state.state, rates.state.rank, rates.state.step) == ("dead", 3, 7)
    assert (rates.window_ns, rates.steps_per_s, rates.communication_ns) == (8 * SECOND, None, 0)
    assert [(row.fqn, row.calls, row.forward_ns, row.self_ns) for row in rates.rows] == [
        ("Net", 1, 6 * SECOND, 4 * SECOND),
        ("Net.a", 1, 2 * SECOND, 2 * SECOND),
    ]


def test_times_of_modules_per_step_are_from_before_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.modtrace"
    writer = Writer(path, rank=0)
    for number in range(9):  # a step each second, the first half of it in the module; then nothing for a minute
        writer.call(number, Kind.FORWARD_ENTER, "Net", number)
        writer.call(number + 0.5, Kind.FORWARD_EXIT, "Net", number)
        writer.event(number + 1, Kind.STEP, 0, number)
    writer.call(9, Kind.FORWARD_ENTER, "Net", 9)
    now_ns = writer.start + 69 * SECOND
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    rates = read_rank_rates(path, 4, 1000)
    assert (rates.state.state, rates.window_ns, rates.window_steps_per_s) == ("running", 4 * SECOND, 1.0)
    assert rates.steps_per_s == pytest.approx(1 / 61)  # the last two steps, and the minute since
    shown = lines(JobView([rates], (), 0), height=None)
    assert "ms per step" in shown[-2]
    assert shown[-1].split() == ["Net", "50.0", "50.0", "500.00", "0.00", "1.0"]


def test_a_ring_without_events_tells_nothing(tmp_path: Path) -> None:
    Writer(tmp_path / "0.modtrace", pid=1 << 30)
    rates = read_rank_rates(tmp_path / "0.modtrace", 8, 1000)
    assert (rates.window_ns, rates.rows, rates.steps_per_s) == (0, (), None)


def rank_rates(
    number: int, *rows: ModuleTimes, steps_per_s: float | None = 4.0, at: RankState | None = None
) -> RankRates:
    return RankRates(at or state(number), steps_per_s, steps_per_s, 10 * SECOND, rows, SECOND)


def module(fqn: str, calls: int, forward_s: float, own_s: float, backward_s: float = 0) -> ModuleTimes:
    forward_ns, own_ns, backward_ns = (int(seconds * SECOND) for seconds in (forward_s, own_s, backward_s))
    return ModuleTimes(fqn, "M", calls, forward_ns, own_ns, backward_ns, backward_ns)


def test_ranks_are_merged_to_their_mean_with_the_busiest_one() -> None:
    first = rank_rates(0, module("Net", 40, 5, 2.5, 2.5), module("Net.a", 40, 2.5, 2.5))
    second = rank_rates(1, module("Net", 40, 7.5, 2.5, 2.5), module("Net.a", 40, 5, 5))
    silent = rank_rates(2)
    assert merge_ranks([first, second, silent], None) == [
        ModuleRate("Net", 4.0, 0.5, 0.875, 0.625, 0.25, 0.5, 1),
        ModuleRate("Net.a", 4.0, 0.375, 0.375, 0.375, 0.0, 0.5, 1),
    ]
    (folded,) = merge_ranks([first], 1)
    assert (folded.fqn, folded.self_share, folded.total_share, folded.busiest_rank) == ("Net", 0.75, 0.75, None)


def test_modules_are_sorted_by_any_column() -> None:
    a, b = ModuleRate("a", 1, 0.2, 0.5, 0.1, 0.4, 0, None), ModuleRate("b", 2, 0.1, 0.6, 0.5, 0.1, 0, None)
    assert [sort_modules([b, a], key)[0].fqn for key in ("self", "total", "forward", "backward", "calls", "name")] == [
        *("a", "b", "b", "a", "b", "a")
    ]


def test_keys_change_the_view() -> None:
    view = ScreenState()

    def press(*keys: str) -> ScreenState:
        for key in keys:
            view.press(key, ranks=2, depth=3)
        return view

    assert press("s").sort == "total"
    assert press("S", "S").sort == "name"
    assert press("-").max_depth == 2
    assert press("-", "-").max_depth == 1
    assert press("+").max_depth == 2
    assert press("+").max_depth is None
    assert press("p").is_paused
    assert not press(" ").is_paused
    assert press("m").by_rank
    assert (press("]").rank, view.by_rank) == (0, False)
    assert press("]").rank == 1
    assert press("]").rank is None
    assert press("[").rank == 1
    assert press("down", "page down", "up").first == 10
    assert press("page up", "page up").first == 0
    assert not press("x").has_quit
    assert press("q").has_quit


def lines(job: JobView, view: ScreenState | None = None, width: int = 80, height: int | None = 24) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height or 100, markup=False, highlight=False)
    console.print(render_screen(job, view or ScreenState(), width, height))
    return out.getvalue().splitlines()


def test_the_busiest_rank_of_a_module_is_called_by_its_role() -> None:
    rows = [module("Net", 40, 5, 5), module("Net", 40, 5, 2.5)]
    ranks = [rank_rates(n, row, at=state(n)._replace(role="trainer")) for n, row in enumerate(rows)]

    assert any(line.endswith(" trainer 0: 50.0") for line in lines(JobView(ranks, (), 0.1)))


JOB = JobView([rank_rates(0, module("Net", 40, 4, 1, 1), module("Net.a", 40, 3, 3))], (), 0.1)


def test_the_screen_shows_what_modules_take() -> None:
    shown = lines(JOB, width=81)
    assert shown[:6] == [
        "rank 0 running · step 3 · no event for 25.0 s · communication 10% · 10.0 s before",
        "",
        "module · ms per step              self %↓   total %    fwd ms    bwd ms   calls/s",
        "Net.a                                30.0      30.0     75.00      0.00       4.0",
        "Net                                  20.0      50.0    100.00     25.00       4.0",
        "",
    ]
    assert shown[-1] == "q quit  p pause  s sort  - + fold  m modules or ranks  [ ] rank  ↑ ↓ scroll"
    assert len(shown) == 24


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 5)])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    rows = [module(f"Net.blocks.{number}.attention.projection", 4, 1, 1) for number in range(50)]
    job = JobView([rank_rates(number, *rows) for number in range(3)], ["x.modtrace: " + "cannot " * 30] * 6, 2.5)
    for view in (ScreenState(), ScreenState(by_rank=True), ScreenState(rank=1), ScreenState(first=1000)):
        shown = lines(job, view, width, height)
        assert len(shown) <= max(height, 12)
        assert max(map(len, shown)) <= width


def test_scrolling_shows_what_comes_next() -> None:
    rows = [module(f"Net.m{number:02}", 4, 1, 1 - number / 100) for number in range(50)]
    job = JobView([rank_rates(0, *rows)], (), 0.1)
    view = ScreenState(first=30)
    shown = lines(job, view)
    assert shown[3].startswith("Net.m30 ")
    assert shown[-1].startswith("31–50 of 50  q quit")
    view.first = 1000
    lines(job, view)
    assert view.first == 50 - 20


def test_a_hang_a_stall_and_the_dead_are_said() -> None:
    waiting = state(0, called("barrier", waits_s=20, ranks=2))
    late = state(1, stack=calls("Net.slow"))
    shown = " ".join(lines(JobView([rank_rates(0, at=waiting), rank_rates(1, at=late)], (), 0), width=200))
    assert "rank 0 waits in barrier #0 for 20.0 s; rank 1 has not called it: in forward Net.slow for 25.0 s" in shown

    stalled = state(0, stack=(OpenCall("Net.slow", "forward", NOW - 90 * SECOND),))
    told = lines(JobView([rank_rates(0, at=stalled)], (), 0))
    assert told[0].startswith("rank 0 hung · step 3 · ")
    assert told[1] == "rank 0 seems hung: in forward Net.slow for 90.0 s"
    assert lines(JobView([rank_rates(0, at=stalled)], (), 0), ScreenState(by_rank=True))[4].split()[:3] == [
        *("rank", "0", "hung")
    ]

    dead = [rank_rates(number, at=state(number, state="dead")) for number in (0, 1, 3)]
    assert lines(JobView(dead, (), 0))[1] == "ranks 0-1, 3 died"


def test_the_headline_says_which_ranks_are_quiet() -> None:
    busy = rank_rates(0, at=state(0)._replace(now_ns=NOW - 24 * SECOND))
    mine = " · communication 10% · last 10.0 s"

    assert lines(JobView([busy], (), 0))[0] == "rank 0 running · step 3 · 4.0 steps/s" + mine
    quiet = JobView([busy, rank_rates(1), rank_rates(2)], (), 0)
    assert lines(quiet, width=200)[0] == (
        "3 ranks 3 running · step 3 · no event from 2 ranks for 25.0 s · 4.0 steps/s" + mine
    )


def test_a_line_per_rank_says_where_each_is() -> None:
    shown = lines(
        JobView([rank_rates(0, at=state(0, stack=calls("Net", "Net.a"))), rank_rates(1)], (), 0),
        ScreenState(by_rank=True),
    )
    assert shown[2].split() == ["rank", "state", "step", "steps/s", "comm", "%", "in"]
    assert shown[3].split() == [*["rank", "0", "running", "3", "4.0", "10%", "forward", "Net", "›", "a", "25.0", "s"]]
    assert shown[4].split() == [*["rank", "1", "running", "3", "4.0", "10%", "no", "module"]]


def test_names_cannot_steer_the_terminal() -> None:
    job = JobView([rank_rates(0, module("Net\x1b[2J", 1, 1, 1))], ("x\x1b]0;title\x07",), 0)
    assert "\x1b" not in "".join(lines(job))
    file = state(0, state="dead")._replace(rank=None, path="/runs/\x1b[2J.modtrace")
    shown = lines(JobView([rank_rates(0, at=file)], (), 0))
    assert "\x1b" not in "".join(shown)
    assert shown[:2] == [
        r"\x1b[2J.modtrace dead · step 3 · 4.0 steps/s · communication 10% · last 10.0 s",
        r"\x1b[2J.modtrace died",
    ]


def test_the_dead_with_and_without_a_rank_are_all_named() -> None:
    unknown = state(7, state="dead")._replace(rank=None, path="/runs/x.modtrace")
    job = JobView([rank_rates(0, at=state(1, state="dead")), rank_rates(1, at=unknown)], (), 0)
    assert lines(job)[1] == "rank 1, x.modtrace died"


def test_communication_of_threads_at_once_counts_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "0.modtrace", pid=1 << 30)
    first, second = (writer.ring.names.text(f'["barrier", "{group}"]') for group in "05")
    main, worker = writer.thread, writer.ring.names.thread("worker", 8, 2)
    for thread, at, kind, name in [
        (main, 1, Kind.COLLECTIVE_ENTER, first),
        (worker, 2, Kind.COLLECTIVE_ENTER, second),
        (main, 4, Kind.COLLECTIVE_EXIT, first),
        (worker, 5, Kind.COLLECTIVE_EXIT, second),
        (worker, 6, Kind.WAIT_ENTER, second),
        (worker, 8, Kind.WAIT_EXIT, second),
    ]:
        writer.thread = thread
        writer.event(at, kind, name, 0)
    # From 1 to 5 s on one of them or both, and from 6 to 8 s on the second.
    assert read_rank_rates(tmp_path / "0.modtrace", 100, 1000).communication_ns == 6 * SECOND


def test_a_paused_screen_stays_even_during_a_read() -> None:
    view, over = ScreenState(), threading.Event()
    latest = deque([JobView((), (), 0)], maxlen=1)

    def read() -> JobView:
        view.is_paused = True
        over.set()
        return JOB

    _read_on(read, view, latest, over, 0.1)
    assert latest[0].ranks == ()


def test_an_interrupt_of_the_screen_ends_the_read_too() -> None:
    readings: list[int] = []

    def read() -> JobView:
        readings.append(1)
        if len(readings) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return JOB

    others = set(threading.enumerate())
    show_live(read, Console(file=io.StringIO(), width=80, height=24, force_terminal=True), 0.1)
    for reader in set(threading.enumerate()) - others:
        reader.join(20)
        assert not reader.is_alive()


def test_keys_are_read_one_by_one_also_after_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, own = os.openpty()
    stdin = open(own, encoding="utf-8")  # noqa: SIM115 (closed below, after the terminal's settings are put back)
    monkeypatch.setattr(sys, "stdin", stdin)
    with contextlib.closing(stdin), keyboard() as keys:
        for typed, read in [
            (b"q+", ["q", "+"]),
            (b"\x1b[A\x1bOB\x1b[5~", ["up", "down", "page up"]),
            (b"\x1b[6~", ["page down"]),
            (b"\x1b", ["\x1b"]),
        ]:
            os.write(terminal, typed)
            assert read_keys(keys, 10) == read
        assert read_keys(keys, 0) == []
        os.write(terminal, b"q")
        assert read_keys(keys, 10) == ["q"]
    os.close(terminal)


def test_into_a_pipe_the_state_of_now_is_printed_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "0.modtrace", rank=0, pid=1 << 30)
    for second in range(4):
        writer.call(second, Kind.FORWARD_ENTER, "Net", second)
        writer.call(second + 0.5, Kind.FORWARD_EXIT, "Net", second)
        writer.event(second + 0.5, Kind.STEP, 0, second)
    done = CliRunner().invoke(commands, ["top", str(tmp_path)])
    assert done.exit_code == 0
    shown = done.output.splitlines()
    assert shown[0].startswith("rank 0 dead · step 3 · ")
    assert shown[1:3] == ["rank 0 died", "forward 60% · other 40%"]
    assert shown[5].split()[:3] == ["Net", "57.1", "57.1"]

    (rank,) = json.loads(CliRunner().invoke(commands, ["top", "--format", "json", str(tmp_path)]).output)
    assert (rank["rank"], rank["window_ns"]) == (0, int(3.5 * SECOND))
    assert rank["modules"] == [
        {"fqn": "Net", "module_class": "M", "total_ns": 2 * SECOND, "self_ns": 2 * SECOND},
    ]


def test_where_nothing_can_be_read_the_exit_status_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, ["top", str(tmp_path / "none.modtrace")])
    assert done.exit_code == 1
    assert "none.modtrace: cannot be read: No such file or directory" in " ".join(done.output.split())


def test_a_line_says_what_the_steps_were_spent_on(tmp_path: Path) -> None:
    path = tmp_path / "0.modtrace"
    writer = Writer(path, rank=0, pid=1 << 30)
    fetch = writer.ring.names.text('["data loading", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"]')
    for number in range(4):  # a step each second: a quarter of it fetches, half of it is in the module
        writer.event(number, Kind.RANGE_BEGIN, fetch, 2 * number)
        writer.event(number + 0.25, Kind.RANGE_END, fetch, 2 * number)
        writer.call(number + 0.5, Kind.FORWARD_ENTER, "Net", number)
        writer.call(number + 1, Kind.FORWARD_EXIT, "Net", number)
        writer.event(number + 1, Kind.STEP, 0, number)
    rates = read_rank_rates(path, 10, 1000)

    assert lines(JobView([rates], (), 0), height=None)[2] == "data loading 25% · forward 50% · other 25%"
    slower = rates._replace(parts={"data loading": 0.75, "other": 0.25})
    assert lines(JobView([rates, slower], (), 0), height=None)[2] == "data loading 50% · forward 25% · other 25%"
    unknown = rates._replace(parts={})
    assert "other" not in "".join(lines(JobView([unknown], (), 0), height=None))

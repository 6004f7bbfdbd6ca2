"""Many ranks in one time: rings written by hand, whose clocks are apart by what the test says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace import ModtraceError
from modtrace.cli.group import group as commands
from modtrace.ranks import JobTime, find_rank_recordings, parse_rank_list, peak_sentence
from modtrace.ranks.all_ranks import load_rank
from modtrace.ranks.sync_points import readings_of_ranges
from modtrace.ring import Kind
from modtrace.ring.clocks import Measurement, Reading, measurement_record
from tests.support.event_script import EventScript
from tests.support.rank_rings import BEGIN, HOSTS, SECOND, write_ring
from tests.support.trace_processor import TraceProcessor


def placed(folder: Path) -> Iterator[tuple[int, int, int, str]]:
    """Yield for each rank: number, largest error of its spans in the time of rank 0, bound, and method."""
    files = find_rank_recordings(folder)
    job = JobTime(files)
    ranks = [load_rank(file, job[file.rank]) for file in files]
    truth = np.array([BEGIN + step * SECOND // 20 for step in range(20)])
    zero = int(ranks[0].timeline.columns.start[0]) - BEGIN
    for one in ranks:
        error = int(np.abs(one.timeline.columns.start - zero - truth).max())
        yield one.rank, error, one.bound_ns, one.time.method


def test_measured_clocks_place_ranks_within_their_bounds_drift_included(tmp_path: Path) -> None:
    for rank in range(4):
        write_ring(tmp_path, rank, clock=HOSTS[rank], pings=2 if rank in (1, 2) else 0)

    places = list(placed(tmp_path))

    assert [how for *_, how in places] == ["same clock", "pings", "pings", "pings"]
    assert places[0][1:3] == (0, 0)
    # All readings are 300 ns wrong, rounding adds one; halfway between them the bound has grown by 1 ppm of 0.5 s.
    for _, error, bound, _ in places[1:]:
        assert 299 <= error <= 302
        assert 500 <= bound <= 1_010


def test_the_bound_of_a_long_run_is_that_between_any_two_readings(tmp_path: Path) -> None:
    minute, minutes = 60 * SECOND, 512
    for rank in (0, 1):
        script = EventScript(16, tmp_path / f"{rank}.modtrace", {"rank": rank, "pid": 1})
        script.note({"kind": "clock", "clock": HOSTS[rank]})
        for index in range(minutes + 1 if rank else 0):
            reading = Reading(BEGIN + index * minute, 5_000, 500, 1_000)
            script.note(measurement_record(Measurement("b", "a", reading)))
        script.close()

    job = JobTime(find_rank_recordings(tmp_path))

    # 500 of each reading, 1 ppm of the half minute to the next one, and 1 for rounding.
    assert job[1].bound_ns(np.array([BEGIN, BEGIN + minutes * minute])) == 500 + 30_000 + 1
    assert job[1].bound_ns(np.array([BEGIN + 7 * minute])) == 501


def test_a_clock_that_nothing_measured_is_placed_by_collectives_within_the_bound(tmp_path: Path) -> None:
    for rank in range(4):
        write_ring(tmp_path, rank, clock=HOSTS[rank])

    places = {rank: (error, bound, how) for rank, error, bound, how in placed(tmp_path)}

    # Most ranks can be compared on host b, so rank 1's clock is the job's, and rank 0 is placed by collectives.
    assert [places[rank][2] for rank in range(4)] == ["collectives", "same clock", "collectives", "same clock"]
    # All spans begin at one true moment on all ranks; the ranks leave a collective within 30 µs of each other, 1.08 ms
    # after the first of them called it, and the readings cover 0.75 of the second, after which the bound grows.
    starts = {
        file.rank: load_rank(file, JobTime(find_rank_recordings(tmp_path))[file.rank]).timeline.columns.start
        for file in find_rank_recordings(tmp_path)
    }
    # Ranks that were placed each for itself are not compared as if they read one clock.
    assert len({JobTime(find_rank_recordings(tmp_path))[rank].clock for rank in (0, 1, 2)}) == 3
    for rank in (0, 2):
        assert int(np.abs(starts[rank] - starts[1]).max()) <= 40_000
        assert 1_000_000 <= places[rank][1] <= 1_400_000


def test_true_offsets_lie_within_the_bound_of_ranges_whatever_the_drift() -> None:
    random = np.random.default_rng(7)
    for _ in range(300):
        count = int(random.integers(1, 400))
        true = np.sort(random.integers(0, 100 * SECOND, count)).astype(np.int64)
        rate = float(random.uniform(-100e-6, 100e-6))
        offset = int(random.integers(-(10**15), 10**15)) + np.rint(true * rate).astype(np.int64)
        low = offset - random.integers(0, 2_000_000, count)
        high = offset + random.integers(0, 2_000_000, count)
        estimate = random.integers(low, high + 1)
        for reading in readings_of_ranges(true, low, high, estimate):
            wrong = reading.offset_ns - (offset[0] + round((reading.time_ns - int(true[0])) * rate))
            assert abs(wrong) <= reading.bound_ns


def test_without_clocks_and_collectives_the_wall_clock_places_and_its_bound_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_ring(tmp_path, rank, clock=HOSTS[rank], collectives=0)

    job = JobTime(find_rank_recordings(tmp_path))

    assert [job[rank].method for rank in job.ranks] == ["same clock", "wall clock"]
    assert job[1].bound_ns(np.array([BEGIN])) == 100_000_000


def test_saved_traces_are_placed_by_collectives(tmp_path: Path) -> None:
    rings, traces = tmp_path / "rings", tmp_path / "traces"
    rings.mkdir()
    traces.mkdir()
    for rank in range(4):
        write_ring(rings, rank, clock=None)
        modtrace.load(rings / f"{rank}.modtrace").save(traces / f"{rank}.{'json' if rank % 2 else 'pftrace'}")

    files = find_rank_recordings(traces)

    assert [(file.rank, file.path.name) for file in files] == [
        *((0, "0.pftrace"), (1, "1.json"), (2, "2.pftrace"), (3, "3.json"))
    ]
    assert [JobTime(files)[rank].method for rank in range(4)] == ["same clock", *["collectives"] * 3]


def test_ranks_come_from_the_metadata_else_from_the_name_and_two_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name, rank in (("host1-rank7.modtrace", None), ("9.modtrace", 3)):
        EventScript(16, tmp_path / name, {} if rank is None else {"rank": rank}).close()
    assert [file.rank for file in find_rank_recordings(tmp_path)] == [3, 7]

    EventScript(16, tmp_path / "other.modtrace", {"rank": 7}).close()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModtraceError, match=r"host1-rank7\.modtrace and .*other\.modtrace are both of rank 7"):
        find_rank_recordings(tmp_path)
    with pytest.raises(ModtraceError, match="contains no recording"):
        find_rank_recordings(empty)
    with pytest.raises(ModtraceError, match="not a folder"):
        find_rank_recordings(tmp_path / "9.modtrace")


@pytest.mark.parametrize("launcher", ["run-0.modtrace", "run-0.pid9.modtrace"])
def test_the_empty_ring_of_a_launcher_is_none_of_a_rank(launcher: str, tmp_path: Path) -> None:
    EventScript(16, tmp_path / launcher, {}).close()
    script = EventScript(16, tmp_path / "run-0.pid7.modtrace", {"rank": 0})
    script.step(10, 0)
    script.close()

    [found] = find_rank_recordings(tmp_path)

    assert found.path.name == "run-0.pid7.modtrace"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0-2,7", ([0, 1, 2, 7], 0)), ("5", ([5], 0)), ("worst:4", ([], 4)), ("1,worst:2", ([1], 2))],
)
def test_lists_of_ranks(text: str, ranks: tuple[list[int], int]) -> None:
    assert parse_rank_list(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "worst:0", "1,,2"])
def test_lists_of_ranks_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_rank_list(text)


@pytest.mark.parametrize("suffix", ["pftrace", "json"])
def test_a_trace_of_all_ranks_keeps_them_apart_and_joins_their_collectives(
    tmp_path: Path, suffix: str, trace_processor: type[TraceProcessor]
) -> None:
    for rank in range(4):
        write_ring(tmp_path, rank, clock=HOSTS[rank], pings=2 if rank in (1, 2) else 0)
    out = tmp_path / f"all.{suffix}"

    done = CliRunner().invoke(commands, ["ranks", "timeline", str(tmp_path), "-o", str(out), "--steps", "2:5"])

    assert done.exit_code == 0, done.output
    assert "ranks 1-3: placed by pings between their hosts" in done.output
    trace = trace_processor.open(out)
    assert trace.import_problems() == {}
    # All four have process id and thread id alike.
    rows = trace.query(
        "select p.name as process, s.name, count(*) as count, sum(s.dur) as dur from slice s join thread_track t on "
        "s.track_id = t.id join thread using (utid) join process p using (upid) where s.dur > 0 "
        "group by 1, 2 order by 1, 2"
    )
    names = [(row["process"].partition(" ±")[0], row["name"], row["count"], row["dur"] // 1000) for row in rows]
    # 37 ppm of 10 ms are 0.37 µs, which the moved times no longer have.
    assert names == [
        row
        for rank in range(4)
        for row in ((f"rank {rank} · python", "Net", 3, 30_000), (f"rank {rank} · python", "all_reduce", 3, 6))
    ]
    arrows = trace.query(
        "select b.ts - a.ts as apart from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id "
        "where a.name = 'all_reduce' and b.name = 'all_reduce'"
    )
    # From rank 0 to 1 to 2 to 3: 1 µs, 1 µs and 998 µs, each known to 600 ns.
    apart = sorted(row["apart"] for row in arrows)
    assert len(apart) == 9
    assert all(abs(value - 1_000) <= 602 for value in apart[:6])
    assert all(abs(value - 998_000) <= 602 for value in apart[6:])
    timeline = modtrace.load(out)
    assert [entry["rank"] for entry in timeline.metadata["ranks"]] == [0, 1, 2, 3]
    assert [mark.text for mark in timeline.marks] == ["step 2", "step 3", "step 4"]
    # Arrows between ranks are none of the spans'.
    assert set(timeline.columns.link.tolist()) == {-1}


def test_groups_of_one_name_and_other_ranks_stay_apart(tmp_path: Path) -> None:
    for rank in range(4):
        script = EventScript(64, tmp_path / f"{rank}.modtrace", {"rank": rank, "pid": 5})
        script.note({"kind": "clock", "clock": "a"})
        script.note_group("dp", "0-1" if rank < 2 else "2-3", "")
        text = json.dumps(["all_reduce", "dp"])
        now = time.monotonic_ns()
        script.collective(now, Kind.COLLECTIVE_ENTER, text, 0)
        script.collective(now + 10, Kind.COLLECTIVE_EXIT, text, 8)
        script.close()

    whole = modtrace.load_ranks(tmp_path)
    assert type(whole) is modtrace.Timeline

    assert [(group.name, group.ranks) for group in whole.collectives.groups] == [("dp (0)", (0, 1)), ("dp (1)", (2, 3))]
    assert sorted(row.group for row in whole.collectives) == ["dp (0)", "dp (0)", "dp (1)", "dp (1)"]


def test_python_chooses_ranks_and_steps_as_the_command_does(tmp_path: Path) -> None:
    for rank in range(3):
        write_ring(tmp_path, rank, clock="a")

    part = modtrace.load_ranks(tmp_path, ranks=[0, 2], steps=(1, 3))

    assert {span.track for span in part.spans} == {"forward · MainThread"}
    assert [(track.process.rank, track.kind) for track in part.tracks if track.kind == "forward"] == [
        (0, "forward"),
        (2, "forward"),
    ]
    assert sorted(span.step for span in part.spans) == [1, 1, 2, 2]
    assert [entry["method"] for entry in part.metadata["ranks"]] == ["same clock", "same clock"]
    with pytest.raises(ModtraceError, match=r"has none of these ranks; it has 0-2"):
        modtrace.load_ranks(tmp_path, ranks=[7])


def test_unreadable_files_are_left_out_and_reported(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_ring(tmp_path, rank, clock="a")
    begun = (tmp_path / "1.modtrace").read_bytes()[:20]
    (tmp_path / "2.modtrace").write_bytes(begun)
    (tmp_path / "3.modtrace").touch()
    (tmp_path / "notes.txt").write_text("rank 4")

    told: list[ModtraceError] = []
    assert [file.rank for file in find_rank_recordings(tmp_path, told.append)] == [0, 1]
    assert [str(error).partition(":")[0] for error in told] == [
        f"{tmp_path}/2.modtrace",
        f"{tmp_path}/3.modtrace",
    ]
    with pytest.raises(ModtraceError, match=r"2\.modtrace: not a ring file"):
        find_rank_recordings(tmp_path)
    done = CliRunner().invoke(commands, ["ranks", "timeline", str(tmp_path), "-o", str(tmp_path / "all.pftrace")])
    assert done.exit_code == 0
    assert f"modtrace: left out: {tmp_path}/2.modtrace: not a ring file" in done.output
    assert "2 ranks, " in done.output


@pytest.mark.parametrize("left", [4096 + 500 * 32, 4096 + 1024 * 32])
def test_a_ring_without_its_end_is_left_out_for_it_knows_no_clock(left: int, tmp_path: Path) -> None:
    """1024 slots of 32 bytes behind 4096, and then the log."""
    for rank in (0, 1, 2):
        write_ring(tmp_path, rank, clock=None)
    os.truncate(tmp_path / "1.modtrace", left)

    done = CliRunner().invoke(commands, ["ranks", "slow", str(tmp_path)])

    assert (done.exit_code, "1.modtrace: its end was cut off, with all names and clocks" in done.output) == (0, True)
    assert "2 ranks, " in done.output

    os.truncate(tmp_path / "2.modtrace", 4096 + 1024 * 32 + 1)  # so much of the log that its file may be still written
    done = CliRunner().invoke(commands, ["ranks", "slow", str(tmp_path)])
    assert "2.modtrace: the ring has no clock records" in done.output


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    write_ring(tmp_path, 0, clock="a")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(commands, ["ranks", "timeline", str(tmp_path), *arguments])
        assert done.exit_code != 0
        return done.output

    assert "has none of these ranks; it has 0" in run("-o", str(tmp_path / "a.json"), "--ranks", "7")
    assert "'x' is not a list of ranks such as 0-7,worst:4." in run("-o", str(tmp_path / "a.json"), "--ranks", "x")


def test_the_rank_that_holds_most_memory_is_named_with_how_much_more_that_is(tmp_path: Path) -> None:
    peaks = {0: 4 << 20, 1: 5 << 20, 2: 9 << 20, 3: 9 << 19}
    for rank, held in peaks.items():
        write_ring(tmp_path, rank, clock=HOSTS[rank], pings=5, held=held)
    sentence = "rank 2 held most memory: 9.00 MiB at its peak, 4.50 MiB (100.0%) more than the median of 3 others"

    whole: Any = modtrace.load_ranks(tmp_path).metadata["ranks"]
    assert {one["rank"]: one["peak_bytes"] for one in whole} == peaks
    saved = CliRunner().invoke(commands, ["ranks", "timeline", str(tmp_path), "-o", str(tmp_path / "all.pftrace")])
    assert sentence in saved.stderr.splitlines()
    run = modtrace.find_slow_ranks(tmp_path)
    assert run.sentences[-1] == sentence
    assert run.to_dict()["peak_bytes"] == [{"rank": rank, "peak_bytes": held} for rank, held in peaks.items()]
    assert json.loads(run.to_json()) == run.to_dict()


def test_sentences_on_ranks_with_equal_memory_and_on_one_rank() -> None:
    assert peak_sentence({}) == ""
    assert peak_sentence({"rank 5": 2048}) == "rank 5 held 2.00 KiB of memory at its peak"
    assert (
        peak_sentence({"rank 0": 2048, "rank 1": 2048})
        == "no rank holds more memory than the others: 2.00 KiB at the peak"
    )
    assert peak_sentence({"rank 0": 0, "rank 1": 2048}) == (
        "rank 1 held most memory: 2.00 KiB at its peak, 2.00 KiB more than the other"
    )

"""Datasets of ranks: what is packed is what was recorded, laid out so that a bucket is read alone, and can be asked."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from modtrace import ModtraceError
from modtrace.cli.group import group as commands
from modtrace.ranks import JobTime, find_rank_recordings, load_ranks, rank_folder
from modtrace.ranks.all_ranks import load_rank
from modtrace.ranks.rank_folder import load_own_time, load_pieces
from modtrace.ranks.slow import find_slow_ranks
from modtrace.ring import Kind
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.slot_format import SLOT_BYTES
from modtrace.timeline.decode import pieces
from modtrace.timeline.summary import take_steps
from tests.support.cost_timelines import counted, recorded
from tests.support.event_script import EventScript
from tests.support.made_job import Culprit, MadeJob
from tests.support.rank_rings import HOSTS, write_ring
from tests.support.slow_ranks import ALL_REDUCE, LATE_IN, MS, make_template, template_with_ranges, write_steps
from tests.support.small_timelines import as_values

pq = pytest.importorskip("pyarrow.parquet")
duckdb = pytest.importorskip("duckdb")

from modtrace.ranks.dataset_tables import (  # noqa: E402 (it needs pyarrow)
    TABLE_NAMES,
    DatasetTables,
    from_arrow,
    query,
    to_arrow,
)
from modtrace.ranks.rank_tables import SpanTable, span_table  # noqa: E402

STEPS = 25


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a job with 12 ranks of two hosts, of which rank 3 is slow."""
    folder = tmp_path / "run"
    folder.mkdir()
    culprit = Culprit(3, "Net.second", "backward", 2 * MS)
    MadeJob(make_template(tmp_path / "one.modtrace"), 12, STEPS, [culprit]).write(folder)
    return folder


def invoke(*arguments: object, exit_code: int = 0) -> str:
    done = CliRunner().invoke(commands, ["ranks", *map(str, arguments)])
    assert done.exit_code == exit_code, done.output
    return done.output


def pack(run: Path, *options: object) -> Path:
    dataset = run.parent / "dataset"
    invoke("pack", run, "-o", dataset, "--processes", 1, *options)
    return dataset


def test_a_dataset_has_the_recorded_rows_in_the_jobs_time(run: Path) -> None:
    dataset = pack(run)

    files = find_rank_recordings(run)
    job = JobTime(files)
    timeline = load_rank(files[9], job[9]).timeline
    table = pq.read_table(dataset / "spans", filters=[("rank", "=", 9)]).sort_by(
        [("start_ns", "ascending"), ("depth", "ascending")]
    )
    assert table["start_ns"].to_pylist() == timeline.columns.start.tolist()
    assert table["duration_ns"].to_pylist() == (timeline.columns.end - timeline.columns.start).tolist()
    assert table["fqn"].to_pylist() == [span.fqn for span in timeline.spans]
    assert table["phase"].to_pylist() == [span.phase for span in timeline.spans]
    assert table["step"].to_pylist() == timeline.columns.step.tolist()
    # Net in forward is 2 × 1 ms in its layers, and 10 µs beside them twice or so.
    assert sum(table["self_ns"].to_pylist()) == sum(
        int(one) for one in (timeline.columns.end - timeline.columns.start)[timeline.columns.depth == 0]
    )
    rows = pq.read_table(dataset / "collectives", filters=[("rank", "=", 9), ("kind", "=", "call")]).sort_by("start_ns")
    assert rows["start_ns"].to_pylist() == timeline.collectives.start.tolist()
    assert rows["done_ns"].to_pylist() == timeline.collectives.done.tolist()
    assert set(rows["group"].to_pylist()) == {"0 [0-11]"}


def test_files_hold_buckets_of_steps(run: Path) -> None:
    dataset = pack(run, "--steps-per-bucket", 10)

    for table in ("spans", "collectives", "steps"):
        steps = {path.name: set(pq.read_table(path)["step"].to_pylist()) for path in (dataset / table).iterdir()}
        assert steps == {
            "000000-000011.000000.parquet": set(range(10)),
            "000000-000011.000010.parquet": set(range(10, 20)),
            "000000-000011.000020.parquet": set(range(20, 25)),
        }
    (ranges,) = (dataset / "ranges").iterdir()  # the job has none: other engines find its columns
    assert (ranges.name, pq.read_table(ranges).num_rows) == ("000000-000011.000000.parquet", 0)


PLACES = ("parts", "spans", "dataset.new", "parts/000000-000011.new", "spans/000000-000011.new")


@pytest.mark.parametrize("place", PLACES)
def test_a_link_in_a_dataset_is_no_way_out_of_it(run: Path, place: str) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / "victim"
    victim.write_text("precious")
    dataset = pack(run)
    planted = dataset / place
    is_folder = planted.is_dir()
    if is_folder:
        shutil.rmtree(planted)
    planted.symlink_to(elsewhere if is_folder else victim)

    os.utime(run / "000009.modtrace", ns=(1, 1))
    again = ["--steps-per-bucket", 3] if is_folder else []  # all that is in the folders goes
    said = invoke("pack", run, "-o", dataset, "--processes", 1, *again, exit_code=int(is_folder))

    assert said.endswith("it is a link, and others may have made it\n") == is_folder
    assert [path.read_text() for path in elsewhere.iterdir()] == ["precious"]


def test_packing_goes_on_where_it_was_cut_off_and_again_what_changed(run: Path) -> None:
    hidden = run.parent / "hidden"
    hidden.mkdir()
    for path in sorted(run.iterdir())[8:]:
        path.rename(hidden / path.name)
    dataset = pack(run)
    before = {path.name: path.stat().st_mtime_ns for path in (dataset / "spans").iterdir()}
    for path in hidden.iterdir():
        path.rename(run / path.name)
    (dataset / "spans" / "left.new").write_bytes(b"cut off")

    said = invoke("pack", run, "-o", dataset, "--processes", 1)

    assert said.startswith("12 ranks (8 were there) and 1,800 spans")
    after = {path.name: path.stat().st_mtime_ns for path in (dataset / "spans").glob("*.parquet")}
    assert before.items() <= after.items()
    os.utime(run / "000009.modtrace", ns=(1, 1))
    assert invoke("pack", run, "-o", dataset, "--processes", 1).startswith("12 ranks (8 were there)")
    assert invoke("pack", run, "-o", dataset, "--processes", 1).startswith("12 ranks (12 were there)")


def test_a_folder_that_was_moved_is_packed_again_and_not_twice(run: Path) -> None:
    dataset = pack(run)
    moved = run.rename(run.with_name("moved"))

    assert invoke("pack", moved, "-o", dataset, "--processes", 1).startswith("12 ranks and 1,800 spans")
    assert invoke("query", dataset, "select count(distinct rank) as n from steps", "--format", "csv") == "n\n12\n"


def test_two_processes_pack_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modtrace.ranks.pack._MAX_RANKS_PER_PART", 5)
    dataset = run.parent / "two"

    invoke("pack", run, "-o", dataset, "--processes", 2)

    assert sorted(path.name for path in (dataset / "parts").iterdir()) == [
        *("000000-000004.json", "000005-000009.json", "000010-000011.json")
    ]
    one, two = (
        pq.read_table(path / "spans").sort_by(
            [("rank", "ascending"), ("start_ns", "ascending"), ("depth", "ascending")]
        )
        for path in (pack(run), dataset)
    )
    assert one.to_pylist() == two.to_pylist()


def test_a_dataset_says_the_same_of_who_is_late_as_the_recordings(run: Path) -> None:
    of_dataset, expected = find_slow_ranks(pack(run, "--steps-per-bucket", STEPS)), find_slow_ranks(run)

    assert of_dataset.steps == expected.steps
    assert of_dataset.late == expected.late
    in_buckets = find_slow_ranks(pack(run, "--steps-per-bucket", 10))
    assert [(step.step, step.rank, step.modules[0].fqn) for step in in_buckets.steps[1:]] == [
        (step, 3, "Net.second") for step in range(1, STEPS)
    ]
    assert np.array_equal(
        np.concatenate([part.lateness for part in in_buckets.parts], axis=1), expected.parts[0].lateness
    )


def test_queries_of_all_and_of_each_bucket_agree(run: Path) -> None:
    dataset = pack(run)
    counted = "select phase, count(*) as n from spans group by phase order by phase"

    whole = json.loads(invoke("query", dataset, counted, "--format", "json"))
    sums = ["--each-bucket", "--then", "select phase, sum(n)::bigint as n from results group by phase order by phase"]
    assert json.loads(invoke("query", dataset, counted, "--format", "json", *sums)) == whole
    assert whole == [{"phase": "backward", "n": 12 * STEPS * 3}, {"phase": "forward", "n": 12 * STEPS * 3}]
    assert invoke("query", dataset, "select rank, method from ranks where rank in (0, 9)").split() == [
        *("rank", "method", "0", "same", "clock", "9", "pings")
    ]
    assert invoke("query", dataset, "select 1 as a", "--format", "csv") == "a\n1\n"


def test_buckets_of_steps_without_collectives_are_asked_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(2):
        script = EventScript(1024, folder / f"{rank}.modtrace", {"rank": rank, "pid": 1})
        script.note_group("0", "0-1", "")
        model = script.name("Net", "Net", "Net")
        for step in range(30):
            begin = 10**16 + step * 100 * MS
            script.enter(begin, model, step)
            if step < 5 or step >= 25:
                script.collective(begin + MS, Kind.COLLECTIVE_ENTER, ALL_REDUCE, step)
                script.collective(begin + 2 * MS, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
            script.exit(begin + 10 * MS, model, step)
            script.step(begin + 20 * MS, step)
        script.close()
    dataset = pack(folder)

    sums = ["--each-bucket", "--then", "select sum(n) as n from results", "--format", "csv"]
    assert invoke("query", dataset, "select count(*) as n from spans", *sums) == "n\n60\n"
    assert [step.step for step in find_slow_ranks(dataset).steps] == [*range(5), *range(25, 30)]


def test_sums_are_numbers_and_columns_of_one_name_stay_apart(run: Path) -> None:
    dataset = pack(run)
    total = (
        "select rank, sum(depth) as depths, 'nan'::double as ratio from spans where rank < 2 group by rank order by 1"
    )
    joined = "select a.rank, b.rank, a.spans from ranks a join ranks b on b.rank = a.rank + 1 where a.rank = 4"

    # In each phase of a step, two of three spans lie in the third.
    assert json.loads(invoke("query", dataset, total, "--format", "json")) == [
        {"rank": rank, "depths": STEPS * 4, "ratio": None} for rank in (0, 1)
    ]
    assert [line.split() for line in invoke("query", dataset, total, "--format", "markdown").splitlines()[1:2]] == [
        ["|", "---:", "|", "---:", "|", "---:", "|"]
    ]
    assert invoke("query", dataset, joined, "--format", "csv") == "rank,rank_1,spans\n4,5,150\n"
    assert json.loads(invoke("query", dataset, joined, "--format", "json")) == [{"rank": 4, "rank_1": 5, "spans": 150}]


def test_recordings_in_which_nothing_is_make_an_empty_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(2):
        EventScript(16, folder / f"{rank}.modtrace", {"rank": rank}).close()

    dataset = pack(folder)

    counted = "select count(*) as n from spans"
    assert invoke("query", dataset, counted, "--format", "csv") == "n\n0\n"
    assert "the dataset is empty" in invoke("query", dataset, counted, "--each-bucket", exit_code=1)
    assert "no two ranks called the same collective" in invoke("slow", dataset, exit_code=1)


def test_a_dataset_that_was_packed_anew_is_read_anew(run: Path) -> None:
    dataset = pack(run)
    spans = [len(DatasetTables(dataset).read(SpanTable, 0, STEPS, [0]).start_ns)]
    shutil.rmtree(dataset)
    for path in list(run.iterdir()):
        path.unlink()  # else it is kept under another name
        write_steps(script := EventScript(1024, path, {"rank": int(path.stem), "pid": 1}), sharded=False)
        script.close()
    pack(run)
    spans.append(len(DatasetTables(dataset).read(SpanTable, 0, STEPS, [0]).start_ns))

    assert spans == [STEPS * 6, 6 * 6]


@pytest.mark.parametrize("table", ["collectives", "steps"])
def test_damaged_tables_are_named(run: Path, table: str) -> None:
    dataset = pack(run)
    *_, path = sorted((dataset / table).iterdir())

    path.write_bytes(path.read_bytes()[:-10])

    for command in (("slow",), ("query", f"select count(*) from {table}")):
        said = invoke(command[0], dataset, *command[1:], exit_code=1)
        assert said.startswith(f"modtrace: {dataset}: cannot be read: ")
        assert said.endswith("; delete it and pack again\n")


@pytest.mark.parametrize("steps", [{}, {"collectives": [[0, 1 << 40]]}, {"collectives": [["a", "b"]]}, 7])
def test_damaged_steps_of_a_part_are_named(run: Path, steps: object) -> None:
    dataset = pack(run)
    (part,) = (dataset / "parts").iterdir()
    part.write_text(json.dumps(json.loads(part.read_text()) | {"steps": steps}))

    said = invoke("slow", dataset, exit_code=1)
    assert said.startswith(f"modtrace: {dataset}")
    assert said.endswith("; delete it and pack again\n")


@pytest.mark.parametrize("text", ["{", "[]", "[7]", '[{"rank": 0, "spans": 1}]'])
def test_damaged_descriptions_are_named(run: Path, text: str) -> None:
    dataset = pack(run)
    (part,) = (dataset / "parts").iterdir()
    part.write_text(text)

    if text != "[]":
        for command in (("slow", dataset), ("query", dataset, "select 1"), ("pack", run, "-o", dataset)):
            said = invoke(*command, exit_code=1)
            assert said.startswith(f"modtrace: {part}: ")
            assert said.endswith("; delete it and pack again\n")
    (dataset / "dataset.json").write_text(text)
    assert "not a dataset" in invoke("slow", dataset, exit_code=1)


def test_a_folder_of_another_program_is_left_alone(run: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "parts").mkdir(parents=True)
    (theirs / "dataset.json").write_text('{"name": "images"}')
    (theirs / "parts" / "labels.json").write_text("[]")

    assert "contains something other than a dataset" in invoke("pack", run, "-o", theirs, exit_code=1)
    assert [path.name for path in sorted(theirs.rglob("*.json"))] == ["dataset.json", "labels.json"]


@pytest.mark.parametrize(("fqn", "phase"), LATE_IN)
def test_a_dataset_names_the_range_that_made_a_rank_late(fqn: str, phase: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    culprit = Culprit(1, fqn, phase, 60 * MS, 3)
    MadeJob(template_with_ranges(tmp_path), 3, 40, [culprit], noise=0.02).write(folder)
    recordings = find_slow_ranks(folder)

    dataset = pack(folder, "--steps-per-bucket", 40)

    assert (fqn if phase == "range" else f"{fqn} {phase}") in recordings.sentences[1]
    assert find_slow_ranks(dataset).sentences == recordings.sentences
    [row] = query(dataset, "SELECT sum(end_ns - start_ns) / 1e6 AS ms FROM ranges WHERE rank = 1").to_pylist()
    # In each step 50 µs of loading and of augmenting, and a collection of 150 µs; in each third one 60 ms.
    assert row["ms"] == pytest.approx(40 * 0.3 + (14 * 60 if phase == "range" else 0), rel=0.02)


@pytest.mark.parametrize("piece_events", [64, pieces.PIECE_EVENTS])
def test_all_commands_report_the_damage_of_a_ring(
    piece_events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_EVENTS", piece_events)
    folder = tmp_path / "run"
    folder.mkdir()
    MadeJob(template_with_ranges(tmp_path), 2, 40, seed=3).write(folder)
    [_, ring] = sorted(folder.glob("*.modtrace"))
    with ring.open("r+b") as file:
        file.seek(SLOTS_OFFSET + 300 * SLOT_BYTES)
        file.write(bytes(20 * SLOT_BYTES))

    said = [
        invoke("pack", folder, "-o", tmp_path / "dataset"),
        invoke("slow", tmp_path / "dataset"),
        invoke("slow", folder),
        invoke("timeline", folder, "-o", tmp_path / "all.pftrace"),
    ]

    told = "rank 1: 20 events are damaged, and left out"
    assert [text.count(told) for text in said] == [1, 1, 1, 1]
    assert not any("rank 0: " in text for text in said)


def test_pieces_of_a_ring_have_the_ranges_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    MadeJob(template_with_ranges(tmp_path), 1, 40, seed=3).write(folder)
    whole = query(pack(folder), "SELECT * FROM ranges ORDER BY ALL").to_pylist()
    (tmp_path / "dataset").rename(tmp_path / "whole")
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 64)

    assert query(pack(folder), "SELECT * FROM ranges ORDER BY ALL").to_pylist() == whole
    assert len([*load_pieces(find_rank_recordings(folder)[0])]) > 4


def test_the_questions_of_the_readme_are_answered(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    culprits = [Culprit(1, "saving", "range", 60 * MS), Culprit(2, "Net.second", "forward", 9 * MS)]
    MadeJob(template_with_ranges(tmp_path), 3, 40, culprits, noise=0.02).write(folder)
    dataset, readme = pack(folder), Path(rank_folder.__file__).with_name("README.md").read_text()
    queries = [block.partition("```")[0] for block in readme.split("```sql\n")[1:]]

    own, apart, outside = (json.loads(invoke("query", dataset, sql, "--format", "json")) for sql in queries)

    assert [row["rank"] for row in own] == sorted(row["rank"] for row in own)
    assert (apart[0]["fqn"], apart[0]["phase"], apart[0]["rank"]) == ("Net.second", "forward", 2)
    assert apart[0]["more"] == pytest.approx(40 * 9, rel=0.05)
    assert (outside[0]["rank"], outside[0]["range"], outside[0]["times"]) == (1, "saving", 40)
    # Others read the files.
    duck = duckdb.connect()
    for table in ("spans", "ranges"):
        duck.execute(f"CREATE VIEW {table} AS SELECT * FROM '{dataset}/{table}/*.parquet'")
    assert [duck.sql(sql).to_arrow_table().to_pylist()[:4] for sql in queries[1:]] == [apart[:4], outside[:4]]


def test_a_dataset_says_what_each_rank_held_at_its_peak(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    peaks = {0: 4 << 20, 1: 5 << 20, 2: 9 << 20}
    for rank, held in peaks.items():
        write_ring(folder, rank, clock=HOSTS[rank], pings=5, held=held)

    dataset = pack(folder)

    assert find_slow_ranks(dataset).peak_bytes == peaks == find_slow_ranks(folder).peak_bytes
    assert query(dataset, "SELECT rank, peak_bytes FROM ranks ORDER BY rank").to_pylist() == [
        {"rank": rank, "peak_bytes": held} for rank, held in peaks.items()
    ]


def test_a_dataset_has_the_flops_of_each_call() -> None:
    packed = to_arrow(span_table(counted(), 3))

    flops = {(row["step"], row["fqn"], row["phase"]): row["flops"] for row in packed.to_pylist()}
    # The third step has other inputs than the one that was counted.
    assert flops == {
        (step, name, phase): known if step < 2 else -1
        for step in range(3)
        for name, phase, known in (
            ("Net", "forward", 130),
            ("Net.a", "forward", 100),
            ("Net", "backward", 200),
            ("Net.a", "backward", 200),
        )
    }
    assert from_arrow(SpanTable, packed).flops.tolist() == packed["flops"].to_pylist()


def test_a_dataset_has_the_memory_of_each_call() -> None:
    packed = to_arrow(span_table(recorded(), 3))

    rows = [
        (*row.values(),) for row in packed.select(["step", "fqn", "phase", "retained_bytes", "peak_bytes"]).to_pylist()
    ]
    # At begin, at most and at the end: 100, 170, 160; 100, 140, 120; 120, 170, 170; 160, 250, 130; 160, 250, 190; …
    assert rows == [
        (0, "Net", "forward", 60, 70),
        (0, "Net.a", "forward", 20, 40),
        (0, "Net.b", "forward", 50, 50),
        (0, "Net", "backward", -30, 90),
        (0, "Net.b", "backward", 30, 90),
        (1, "Net", "forward", 20, 100),
        (1, "Net.a", "forward", -20, 0),
    ]
    assert from_arrow(SpanTable, packed).peak_bytes.tolist() == packed["peak_bytes"].to_pylist()
    without = to_arrow(span_table(replace(recorded(), counters=[]), 3))
    assert set(without["peak_bytes"].to_pylist()) == {-1}


def test_errors_say_what_to_do(run: Path, tmp_path: Path) -> None:
    dataset = pack(run)
    with pytest.raises(ModtraceError, match="make one with `modtrace ranks pack`"):
        DatasetTables(tmp_path)
    assert "the SQL cannot be run" in invoke("query", dataset, "select nothing from nowhere", exit_code=1)
    assert "needs --each-bucket" in invoke("query", dataset, "select 1", "--then", "select 2", exit_code=2)
    assert "contains something other than a dataset of this version" in invoke("pack", run, "-o", run, exit_code=1)
    (dataset / "dataset.json").write_text('{"format": 99}')
    with pytest.raises(ModtraceError, match="its format is 99"):
        find_slow_ranks(dataset)


@pytest.mark.parametrize("ranks", [1, 12])
def test_large_rings_are_packed_in_pieces(run: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    for path in sorted(run.iterdir())[ranks:]:
        path.unlink()
    whole = pack(run, "--steps-per-bucket", 2)
    whole.rename(run.parent / "whole")
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 64)
    piece_counts = [len([*load_pieces(file)]) for file in find_rank_recordings(run)]
    in_pieces = pack(run, "--steps-per-bucket", 2)

    assert min(piece_counts) >= 4
    for table in TABLE_NAMES:
        one, other = (sorted((folder / table).iterdir()) for folder in (in_pieces, run.parent / "whole"))
        assert [path.name for path in one] == [path.name for path in other]
        assert all(pq.read_table(path).equals(pq.read_table(its)) for path, its in zip(one, other, strict=True))
        assert len(one) == (1 if table == "ranges" else 13)  # the job has none
    assert (in_pieces / "parts" / f"000000-{ranks - 1:06}.json").read_bytes() == (
        run.parent / "whole" / "parts" / f"000000-{ranks - 1:06}.json"
    ).read_bytes()


def test_only_selected_steps_of_large_rings_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {step.step: step for step in find_slow_ranks(run).steps}
    file = find_rank_recordings(run)[3]
    parts = [take_steps(load_own_time(file), *steps) for steps in [(-3, -1), (15, 18)]]
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 64)
    monkeypatch.setattr(rank_folder, "SHOWN_EVENTS", 100)
    some = find_slow_ranks(run, steps=(20, None))

    assert [step.step for step in some.steps] == [20, 21, 22, 23, 24]
    # Of the first one it is not known what its ranks did before.
    assert [step[:4] for step in some.steps[1:]] == [whole[step.step][:4] for step in some.steps[1:]]
    for part, steps in zip(parts, [(-3, -1), (15, 18)], strict=True):
        read = load_own_time(file, steps)
        assert as_values(read)["start"] == as_values(part)["start"]
        assert read.collectives.done.tolist() == part.collectives.done.tolist()
    for ask in (find_slow_ranks, load_ranks):
        with pytest.raises(ModtraceError, match="too many to read all ranks at once; choose steps"):
            ask(run)
    assert invoke("slow", run, "--steps", "20:") == find_slow_ranks(run, steps=(20, None)).to_text(10) + "\n"

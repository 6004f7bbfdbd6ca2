"""Dumps of torch's flight recorder, made by hand as torch 2.13 writes them for NCCL: read, and joined to rings."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modtrace import TraceError
from modtrace.cli.group import group as commands
from modtrace.live.flight_recorder import FlightRecord, rank_of_dump, read_flight_record
from modtrace.live.hangs import find_all_hangs
from modtrace.live.rank_state import Blocked, GroupProgress, PeerProgress
from modtrace.timeline import Group
from tests.support.rank_states import called, calls, state

SECOND = 10**9
DUMPED = 1_700_000_000 * SECOND
WORLD = ("0", "default_pg")
TENSOR_PARALLEL = ("5", "mesh_tp")


def entry(
    name: str,
    number: int,
    age_s: float,
    state: str = "completed",
    group: tuple[str, str] = WORLD,
    **fields: Any,
) -> dict[str, Any]:
    """An entry that was created the given number of seconds before the dump."""
    known = {
        "frames": [
            {"name": "all_reduce", "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "call", "filename": "/opt/modtrace/track/collectives.py", "line": 123},
            {"name": "train", "filename": "/home/someone/train.py", "line": 15},
        ],
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": DUMPED - int(age_s * SECOND),
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "input_sizes": [[8, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8, 4]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140446445955968",
        "thread_name": "python",
    }
    return known | fields


def dump(*entries: dict[str, Any], ranks: str = "[0, 1, 2, 3]") -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": 1, "last_started_collective": 1}},
        "comm_lib_version": "2.26.6",
        "entries": [*entries],
    }


def write(folder: Path, rank: int, *entries: dict[str, Any], **options: Any) -> str:
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(dump(*entries, **options), protocol=2))
    os.utime(path, ns=(DUMPED, DUMPED))
    return str(path)


def test_a_dump_shows_the_progress_of_each_group(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        3,
        entry("all_reduce", 6, 30),
        entry("_all_gather_base", 7, 20, "started"),
        entry("all_reduce", 8, 10, "scheduled"),
        entry("broadcast", 1, 25, group=TENSOR_PARALLEL),
    )
    details = ("Float[8, 4]", "started on the device", "called at train.py:15, train")
    assert read_flight_record(path) == FlightRecord(
        path=path,
        rank=3,
        dumped_ns=DUMPED,
        groups=(
            GroupProgress(
                Group("0", (0, 1, 2, 3), "default_pg"),
                8,
                ("all_reduce", "all_gather_into_tensor", "all_reduce"),
                Blocked("all_gather_into_tensor", 7, DUMPED - 20 * SECOND, 0, details),
            ),
            GroupProgress(Group("5", (), "mesh_tp"), 1, ("broadcast",), None),
        ),
        peers=(),
    )


def test_a_dump_in_json_shows_the_same(tmp_path: Path) -> None:
    entries = (entry("all_reduce", 1, 30), entry("barrier", 2, 5, "scheduled", is_p2p=False))
    pickled = read_flight_record(write(tmp_path, 0, *entries))
    path = tmp_path / "trace_0.json"
    path.write_text(json.dumps(dump(*entries)))
    os.utime(path, ns=(DUMPED, DUMPED))
    assert read_flight_record(str(path)) == pickled._replace(path=str(path))


def test_sends_and_receives_have_the_ranks_that_have_not_completed_them(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        1,
        entry("send 1->2", 1, 30, is_p2p=True),
        entry("recv 1<-0", 1, 12, "scheduled", is_p2p=True),
        entry("recv 1<-0", 1, 11, "scheduled", is_p2p=True),
        entry("coalesced", 1, 11, "scheduled", is_p2p=True),
    )
    record = read_flight_record(path)
    world = Group("0", (0, 1, 2, 3), "default_pg")
    assert record.groups == ()
    assert [(p.group, p.operator, p.peer, p.last) for p in record.peers] == [
        (world, "send", 2, -1),
        (world, "recv", 0, 1),
    ]
    assert record.peers[0].blocked is None
    blocked = record.peers[1].blocked
    assert blocked is not None
    assert (blocked.counter, blocked.since_ns) == (0, DUMPED - 12 * SECOND)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch modtrace-was-here",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pickle.dumps({"entries": [Evil()]}), "it refers to posix.system"),
        (pickle.dumps([1, 2]), "it has no list of entries"),
        (b"", "it is empty or truncated"),
        (pickle.dumps({"entries": []})[:-5], "it is empty or truncated"),
        (b"MODTRACE", "not a flight recorder's dump"),
        (b'{"entries": 3}', "it has no list of entries"),
        (b'{"entries": ', "not a flight recorder's dump"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "it refers to builtins.eval"),
    ],
)
def test_a_file_that_is_not_a_dump_is_an_error_and_runs_nothing(
    tmp_path: Path, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace_0"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=says) as raised:
        read_flight_record(str(path))
    assert raised.value.path == str(path)
    assert not (tmp_path / "modtrace-was-here").exists()


def test_a_pickle_cannot_ask_for_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    # A dictionary stored under memo index 16,777,216 of the pickle, and a bytearray of a gigabyte.
    hollow = {
        "trace_0": b"\x80\x02}r\x00\x00\x00\x01X\x07\x00\x00\x00entries]s.",
        "trace_1": b"\x80\x05}\x8c\x07entries\x96" + (1 << 30).to_bytes(8, "little") + b"s.",
    }
    for name, data in hollow.items():
        (tmp_path / name).write_bytes(data)
    tracemalloc.start()
    try:
        assert read_flight_record(str(tmp_path / "trace_0")).groups == ()
        with pytest.raises(TraceError):
            read_flight_record(str(tmp_path / "trace_1"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_recursive_sizes_and_endless_numbers_are_not_written_out(tmp_path: Path) -> None:
    line = {"name": "train", "filename": "train.py", "line": 10**5000}
    shared: list[Any] = [1]
    for _ in range(20):
        shared = [shared, shared]
    path = write(
        tmp_path,
        0,
        entry("all_reduce", 4, 3, "started", input_sizes=[shared], frames=[]),
        entry("barrier", 10**5000, 3),
        entry("barrier", -1, 3),
        entry("barrier", 6, 3) | {"time_created_ns": 10**5000},
        entry("barrier", 3, 3, "started", TENSOR_PARALLEL, input_sizes=[[10**5000]], frames=[line]),
        entry(f"send 0->{10**50}", 1, 30, is_p2p=True),
    )
    progress, second_group = read_flight_record(path).groups
    assert (progress.last, second_group.blocked and second_group.blocked.details) == (4, ("started on the device",))
    assert progress.blocked == Blocked("all_reduce", 4, DUMPED - 3 * SECOND, 0, ("started on the device",))


def test_entries_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    good = entry("all_reduce", 4, 3)
    broken: list[Any] = [{}, 7, None, good | {"process_group": "0"}, good | {"collective_seq_id": "4"}]
    path = write(tmp_path, 0, *broken, good | {"frames": "none", "input_sizes": 3}, ranks="[0, [1]]")
    (progress,) = read_flight_record(path).groups
    assert (progress.group, progress.last, progress.recent) == (Group("0", (), "default_pg"), 4, ("all_reduce",))


def test_the_rank_is_the_end_of_the_name() -> None:
    assert [rank_of_dump(name) for name in ("/x/nccl_trace_rank_12", "trace_3.json", "7.pickle", "dump")] == [
        12,
        3,
        7,
        None,
    ]


def record(rank: int, tmp_path: Path, *entries: dict[str, Any], **options: Any) -> FlightRecord:
    return read_flight_record(write(tmp_path, rank, *entries, **options))


def test_a_hang_seen_only_by_the_recorder_has_the_modules_of_the_rings(tmp_path: Path) -> None:
    records = [
        record(rank, tmp_path, entry("all_reduce", 812, 40), entry("all_reduce", 813, 24, "started"))
        for rank in range(3)
    ]
    records.append(record(3, tmp_path, entry("all_reduce", 812, 40)))
    rings = [state(rank, stack=calls("GPT.h.7", phase="backward")) for rank in range(3)]
    rings.append(state(3, stack=calls("GPT", "GPT.h.6"), usual_ns={("GPT.h.6", "forward"): 50_000_000}))
    (hang,) = find_all_hangs(rings, records)
    assert (hang.waiting, hang.not_called) == ((0, 1, 2), (3,))
    assert hang.text == (
        "ranks 0-2 wait in all_reduce #813 (the flight recorder's number) for 24.0 s, in backward GPT.h.7; "
        "rank 3 has not called it: in forward GPT › h.6 for 25.0 s (usually 50 ms); "
        "Float[8, 4]; started on the device; called at train.py:15, train"
    )


def test_a_rank_without_a_dump_has_the_place_from_its_ring(tmp_path: Path) -> None:
    records = [record(rank, tmp_path, entry("barrier", 5, 24, "scheduled"), ranks="[0, 1, 2]") for rank in range(2)]
    (hang,) = find_all_hangs([state(2, stack=calls("GPT.h.6"), state="dead")], records)
    assert (hang.waiting, hang.unknown) == ((0, 1), (2,))
    assert "there is no flight recorder's dump of rank 2" in hang.text
    assert hang.text.endswith("; by the ring, rank 2: in forward GPT.h.6 for 25.0 s")


def test_a_hang_seen_by_the_rings_gets_the_recorders_facts(tmp_path: Path) -> None:
    rings = [state(0, called("barrier", "all_reduce", waits_s=9, ranks=2)), state(1, called("barrier", ranks=2))]
    records = [
        record(0, tmp_path, entry("barrier", 41, 20), entry("all_reduce", 42, 9, "started"), ranks="[0, 1]"),
        record(1, tmp_path, entry("barrier", 41, 20), ranks="[0, 1]"),
    ]
    (hang,) = find_all_hangs(rings, records)
    assert hang.text == (
        "rank 0 waits in all_reduce #1 for 9.0 s; rank 1 has not called it: in no module for 25.0 s; "
        "the flight recorder has all_reduce #42, Float[8, 4], started on the device, called at train.py:15, train"
    )


def test_facts_only_in_the_dump_of_another_rank_belong_to_that_rank(tmp_path: Path) -> None:
    rings = [
        state(0, called("barrier", "all_reduce", waits_s=9, ranks=2)),
        state(1, called("barrier", "broadcast", waits_s=8, ranks=2)),
    ]
    records = [record(1, tmp_path, entry("barrier", 41, 20), entry("broadcast", 42, 8, "started"), ranks="[0, 1]")]
    (hang,) = find_all_hangs(rings, records)
    assert hang.text == (
        "rank 0 waits in all_reduce #1 for 9.0 s; rank 1 called broadcast #1 instead; the flight recorder of "
        "rank 1 has broadcast #42, Float[8, 4], started on the device, called at train.py:15, train"
    )


def test_ranks_of_a_group_that_the_dump_lacks_come_from_the_rings(tmp_path: Path) -> None:
    pair = Group("5", (1, 2), "mesh_tp")
    progress = GroupProgress(pair, -1, (), None)
    waiting = record(1, tmp_path, entry("all_gather", 3, 9, "scheduled", TENSOR_PARALLEL))
    late = record(2, tmp_path, entry("all_gather", 2, 90, group=TENSOR_PARALLEL))
    other = record(0, tmp_path, entry("all_gather", 2, 90, group=TENSOR_PARALLEL))
    (hang,) = find_all_hangs([state(1, progress), state(2, progress), state(0)], [waiting, late, other])
    assert (hang.group, hang.waiting, hang.not_called) == (pair, (1,), (2,))


def test_a_receive_without_a_send_in_dumps_names_the_sender(tmp_path: Path) -> None:
    waiting = record(1, tmp_path, entry("recv 1<-0", 1, 12, "scheduled", is_p2p=True))
    silent = record(0, tmp_path, entry("send 0->1", 1, 50, is_p2p=True))
    (hang,) = find_all_hangs([], [waiting, silent])
    assert (hang.waiting, hang.not_called) == ((1,), (0,))
    assert hang.text.startswith("rank 1 waits in recv from rank 0 for 12.0 s; rank 0 has not called send: ")


def test_two_receives_of_one_rank_are_two_hangs(tmp_path: Path) -> None:
    waiting = record(
        2,
        tmp_path,
        entry("recv 2<-0", 1, 12, "scheduled", is_p2p=True),
        entry("recv 2<-1", 1, 11, "scheduled", is_p2p=True),
        ranks="[0, 1, 2]",
    )
    other_ranks = [record(rank, tmp_path, ranks="[0, 1, 2]") for rank in range(2)]
    assert [hang.not_called for hang in find_all_hangs([], [waiting, *other_ranks])] == [(0,), (1,)]


def test_an_unnamed_default_group_has_all_ranks(tmp_path: Path) -> None:
    records = [record(rank, tmp_path, entry("barrier", 2, 9, "scheduled"), ranks="") for rank in range(2)]
    (hang,) = find_all_hangs([state(2)], records)
    assert (hang.group.ranks, hang.waiting, hang.unknown) == ((0, 1, 2), (0, 1), (2,))


def test_complete_or_new_collectives_are_not_a_hang(tmp_path: Path) -> None:
    first = record(0, tmp_path, entry("barrier", 41, 20), entry("all_reduce", 42, 0.5, "started"), ranks="[0, 1]")
    assert find_all_hangs([], [first, record(1, tmp_path, entry("barrier", 41, 20), ranks="[0, 1]")]) == []


def test_peers_of_a_ring_are_not_joined_twice(tmp_path: Path) -> None:
    world = Group("0", (0, 1), "default_pg")
    blocked = Blocked("recv", 7, state(0).now_ns - 12 * SECOND, 7)
    rings = [state(1, PeerProgress(world, "recv", 0, 7, blocked)), state(0)]
    waiting = record(1, tmp_path, entry("recv 1<-0", 1, 12, "scheduled", is_p2p=True), ranks="[0, 1]")
    (hang,) = find_all_hangs(rings, [waiting, record(0, tmp_path, ranks="[0, 1]")])
    assert hang.text.startswith("rank 1 waits in recv #7 from rank 0 for 12.0 s; ")


def test_the_command_accepts_dumps_without_rings(tmp_path: Path) -> None:
    write(tmp_path, 0, entry("all_reduce", 4, 30, "started"), ranks="[0, 1]")
    write(tmp_path, 1, entry("all_reduce", 3, 30), ranks="[0, 1]")
    done = CliRunner().invoke(commands, ["where", "--flight-recorder", str(tmp_path)])
    assert done.exit_code == 0
    assert " ".join(done.output.split()).startswith(
        "rank 0 waits in all_reduce #4 (the flight recorder's number) for 30.0 s; rank 1 has not called it: "
    )

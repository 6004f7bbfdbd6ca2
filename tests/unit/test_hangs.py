"""Sentences about hangs, from states by hand, and the progress of groups from rings by hand."""

from __future__ import annotations

import pytest

from modtrace.live.hangs import find_hangs, hung_sentences
from modtrace.live.places import group_ranks, headline
from modtrace.live.rank_state import (
    ANY_PEER,
    Blocked,
    GroupProgress,
    PeerProgress,
    read_rank_progress,
)
from modtrace.live.where import RankState, WhereResult
from modtrace.ring import Kind
from modtrace.timeline import Group, RingAnalysis, ThreadStack
from tests.support.event_script import EventScript
from tests.support.rank_states import NOW, SECOND, called, calls, progress, state

ALL_REDUCE, BARRIER = '["all_reduce", "0"]', '["barrier", "0"]'


def text(*states: RankState) -> str:
    (hang,) = find_hangs(states)
    return hang.text


def test_a_rank_that_has_not_called_it_is_named_with_its_module() -> None:
    waiting = [
        state(rank, called("all_reduce", "all_reduce", waits_s=24), stack=calls("GPT.h.7", phase="backward"))
        for rank in range(3)
    ]
    late = state(3, called("all_reduce"), stack=calls("GPT", "GPT.h.6"), usual_ns={("GPT.h.6", "forward"): 50_000_000})
    assert text(*waiting, late) == (
        "ranks 0-2 wait in all_reduce #1 for 24.0 s, in backward GPT.h.7; "
        "rank 3 has not called it: in forward GPT › h.6 for 25.0 s (usually 50 ms)"
    )


def test_a_rank_that_waits_for_its_data_is_named_with_its_wait() -> None:
    fetch = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    waiting = [state(rank, called("all_reduce", waits_s=24)) for rank in range(3)]
    late = state(
        3, called(), stack=calls(fetch, phase="data loading", since_s=31), usual_ns={(fetch, "data loading"): 4_000_000}
    )
    assert text(*waiting, late) == (
        "ranks 0-2 wait in all_reduce #0 for 24.0 s; "
        "rank 3 has not called it: in data loading for 31.0 s (usually 4.0 ms)"
    )


def test_a_rank_that_called_another_collective_is_named_with_it() -> None:
    waiting = [state(rank, called("all_reduce", waits_s=5)) for rank in (0, 1, 3)]
    (hang,) = find_hangs([*waiting, state(2, called("barrier", waits_s=5))])
    assert hang.called_other == ((2, "barrier"),)
    assert hang.text == "ranks 0-1, 3 wait in all_reduce #0 for 5.0 s; rank 2 called barrier #0 instead"


def test_a_dead_rank_is_named_with_its_last_module() -> None:
    waiting = [state(rank, called("barrier", "all_reduce", waits_s=9)) for rank in (0, 2, 3)]
    dead = state(1, called("barrier"), stack=calls("GPT"), state="dead")
    assert text(*waiting, dead) == (
        "ranks 0, 2-3 wait in all_reduce #1 for 9.0 s; rank 1 died before calling it, in forward GPT"
    )


def test_ranks_outside_modules_or_without_a_ring_are_named() -> None:
    waiting = [state(rank, called("all_reduce", waits_s=2)) for rank in (0, 1)]
    assert text(*waiting, state(2)) == (
        "ranks 0-1 wait in all_reduce #0 for 2.0 s; rank 2 has not called it: in no module for 25.0 s; "
        "there is no ring of rank 3"
    )


def test_a_collective_that_all_called_does_not_complete() -> None:
    ranks = [state(rank, called("all_reduce", waits_s=rank + 2)) for rank in range(4)]
    assert text(*ranks) == (
        "ranks 0-3 wait in all_reduce #0 for 2.0 s to 5.0 s; all ranks called it, so it does not complete"
    )


@pytest.mark.parametrize(
    ("operator", "sizes", "differ"),
    [
        ("all_reduce", (4, 33_088), "its sizes differ between ranks: 4 to 33,088 bytes"),
        ("broadcast", (2_000, 8), "its sizes differ between ranks: 8 to 2,000 bytes"),
        ("all_reduce", (4, 4), "all ranks called it, so it does not complete"),
        ("all_reduce", (4, -1), "all ranks called it, so it does not complete"),
        ("all_to_all", (4, 8), "all ranks called it, so it does not complete"),
    ],
)
def test_different_sizes_of_a_collective_are_reported(operator: str, sizes: tuple[int, int], differ: str) -> None:
    progress = [called("barrier", operator, waits_s=3, ranks=2)._replace(sizes=(0, size)) for size in sizes]
    assert text(*map(state, range(2), progress)) == f"ranks 0-1 wait in {operator} #1 for 3.0 s; {differ}"


def test_the_place_of_a_ranks_death_is_reported_if_the_others_ended_normally() -> None:
    died = called("barrier", "all_reduce", waits_s=0, ranks=2)._replace(sizes=(0, 4))
    ended = called("barrier", "all_reduce", "barrier", waits_s=0, ranks=2)._replace(sizes=(0, 33_088, 0))
    states = [state(0, died, state="dead"), state(1, ended, state="stopped")]
    waits = "rank 0 died waiting in all_reduce #1; its sizes differ between ranks: 4 to 33,088 bytes"
    assert text(*states) == waits
    result = WhereResult(states, [], [])
    assert result.sentence == f"{waits}; rank 1 was in no module when it ended"
    assert (
        headline(result.groups) == "rank 0 died in all_reduce #1, after step 3; rank 1 was in no module when it ended"
    )


def test_a_rank_outside_modules_is_in_the_call_that_others_have_not_made() -> None:
    receives = PeerProgress(Group("0", (0, 1, 2, 3), ""), "recv", 2, 0, Blocked("recv", 0, NOW - SECOND, 7))
    states = [state(rank, called("all_reduce", waits_s=rank)) for rank in (0, 1)]
    states += [state(2, called()), state(3, receives), state(4, called("barrier", waits_s=1), stack=calls("GPT"))]
    expected = "rank 2 is in no module, rank 3 in recv #0 from rank 2, rank 4 in GPT, the other 2 in all_reduce #0"
    assert headline(group_ranks(states)) == expected


def test_the_sentence_names_the_ranks_that_hangs_do_not() -> None:
    pair = Group("7", (0, 1), "mesh_tp")
    waits = GroupProgress(pair, 0, ("barrier",), Blocked("barrier", 0, NOW - 10 * SECOND, 7))
    states = [state(0, waits), state(1), *(state(rank, stack=calls("GPT.h.6", since_s=1)) for rank in (2, 3))]
    result = WhereResult(states, [], [])
    assert result.sentence == f"{result.hangs[0].text}; ranks 2-3 are in GPT.h.6"


def test_threads_of_a_rank_that_hang_together_are_named_each() -> None:
    threads = tuple(ThreadStack(f"worker {n}", 8 + n, calls("AB"[n], since_s=90), NOW) for n in (0, 1))
    idle = ThreadStack("MainThread", 1, (), NOW)
    both = state(0)._replace(threads=(*threads, idle))
    sentence = "rank 0 seems hung: worker 0 in forward A for 90.0 s, worker 1 in forward B for 90.0 s"
    assert hung_sentences([both], []) == [sentence]
    assert hung_sentences([both._replace(threads=threads[:1])], []) == [
        "rank 0 seems hung: in forward A for 90.0 s",
    ]
    assert WhereResult([both, state(1, stack=calls("A", since_s=1))], [], []).sentence == f"{sentence}; rank 1 is in A"


def test_the_first_collective_with_a_waiting_rank_is_the_one_that_hangs() -> None:
    ahead = state(0, called("all_reduce", "all_reduce", waits_s=3, ranks=2))
    (hang,) = find_hangs([ahead, state(1, called("all_reduce", waits_s=4, ranks=2))])
    assert (hang.counter, hang.waiting, hang.not_called) == (0, (1,), ())


def test_a_wait_of_less_than_a_second_is_not_a_hang() -> None:
    assert find_hangs([state(0, called("all_reduce", waits_s=0.9)), state(1)]) == []


def test_subgroups_are_named_by_their_purpose() -> None:
    progress = called("barrier", waits_s=2, group="3", ranks=2)
    (hang,) = find_hangs([state(0, progress._replace(group=Group("3", (0, 1), "mesh_dp")))])
    assert hang.text.startswith("rank 0 waits in barrier #0 of group mesh_dp for 2.0 s")


def test_a_rank_that_waits_elsewhere_is_not_a_cause_and_is_named_last() -> None:
    pair = Group("7", (1, 2), "mesh_tp")
    behind = [state(rank, called("all_reduce", waits_s=20, ranks=3)) for rank in (0,)]
    waits = GroupProgress(pair, 0, ("all_gather",), Blocked("all_gather", 0, NOW - 10 * SECOND, 7))
    stuck = state(2, stack=calls("GPT.h.6"))
    first, second = find_hangs([*behind, state(1, waits), stuck])
    assert (first.group, first.not_called, first.is_cause) == (pair, (2,), True)
    assert (second.waiting, second.not_called, second.is_cause) == ((0,), (1, 2), True)
    assert second.text == (
        "rank 0 waits in all_reduce #0 for 20.0 s; "
        "rank 1 has not called it: it waits in all_gather #0 of group mesh_tp; "
        "rank 2 has not called it: in forward GPT.h.6 for 25.0 s"
    )


def test_a_hang_caused_by_another_hang_is_reported_as_such() -> None:
    pair = Group("7", (1, 2), "mesh_tp")
    waits = GroupProgress(pair, 0, ("all_gather",), Blocked("all_gather", 0, NOW - 10 * SECOND, 7))
    hangs = find_hangs([state(0, called("barrier", waits_s=20, ranks=2)), state(1, waits), state(2)])
    assert [(hang.operator, hang.is_cause) for hang in hangs] == [("all_gather", True), ("barrier", False)]


def test_groups_of_one_name_without_common_ranks_are_distinguished() -> None:
    def row(*ranks: int, waits: bool) -> GroupProgress:
        blocked = Blocked("barrier", 5, NOW - 3 * SECOND, 7) if waits else None
        return GroupProgress(Group("1", ranks, "mesh_tp"), 5 if waits else 4, ("barrier",), blocked)

    states = [state(rank, row(0, 1, waits=rank == 0)) for rank in (0, 1)]
    states += [state(rank, row(2, 3, waits=True)) for rank in (2, 3)]
    blamed = {hang.waiting: hang.not_called for hang in find_hangs(states)}
    assert blamed == {(0,): (1,), (2, 3): ()}


def test_a_ring_that_does_not_reach_back_far_enough_is_reported() -> None:
    waiting = state(0, called("barrier", waits_s=30, ranks=2))
    assert text(waiting, state(1, first_ns=NOW - 29 * SECOND)).endswith(
        "rank 1 has not called it, as far as its ring goes back: in no module for 25.0 s"
    )
    assert "as far as" not in text(waiting, state(1, first_ns=NOW - 31 * SECOND))


def test_a_recording_that_was_stopped_is_not_blamed() -> None:
    waiting = state(0, called("barrier", waits_s=30, ranks=2))
    assert text(waiting, state(1, state="stopped")) == (
        "rank 0 waits in barrier #0 for 30.0 s; the recording of rank 1 had been stopped"
    )


def test_waits_of_the_ranks_of_a_killed_job_are_reported() -> None:
    waiting = [
        state(rank, called("barrier", waits_s=0, ranks=3), state="dead", stack=calls("GPT.h.7")) for rank in (0, 1)
    ]
    assert text(*waiting, state(2, state="dead", stack=calls("GPT.h.6"))) == (
        "ranks 0-1 died waiting in barrier #0, in forward GPT.h.7; rank 2 died before calling it, in forward GPT.h.6"
    )
    (hang,) = find_hangs([state(1, pair("recv", 0, last=4, waits_s=0), state="dead"), state(0, state="dead")])
    assert hang.text == "rank 1 died waiting in recv #4 from rank 0; rank 0 died before calling send"


def pair(operator: str, peer: int, last: int, waits_s: float | None = None, group: Group | None = None) -> PeerProgress:
    """Progress with one peer after call number `last`, in which the rank has been waiting for `waits_s` seconds."""
    blocked = None if waits_s is None else Blocked(operator, last, NOW - int(waits_s * SECOND), 7)
    return PeerProgress(group or Group("0", tuple(range(4)), "default_pg"), operator, peer, last, blocked)


def test_a_receive_whose_send_was_not_called_names_the_sender_and_its_module() -> None:
    receiver = state(2, pair("recv", 1, last=5, waits_s=12), stack=calls("Stage2"))
    sender = state(1, pair("send", 2, last=4), stack=calls("Stage1", "Stage1.slow"))
    (hang,) = find_hangs([receiver, sender])
    assert (hang.waiting, hang.not_called) == ((2,), (1,))
    assert hang.text == (
        "rank 2 waits in recv #5 from rank 1 for 12.0 s, in forward Stage2; "
        "rank 1 has not called send: in forward Stage1 › slow for 25.0 s"
    )


def test_a_send_whose_receive_was_not_called_names_the_receiver() -> None:
    (hang,) = find_hangs([state(0, pair("send", 3, last=0, waits_s=2)), state(3, state="dead", stack=calls("Stage3"))])
    assert hang.dead == (3,)
    assert hang.text == (
        "rank 0 waits in send #0 to rank 3 for 2.0 s; rank 3 died before calling recv, in forward Stage3"
    )


def test_peers_are_ranks_of_their_group() -> None:
    even = Group("5", (0, 2, 4), "even")
    receiver = state(4, pair("recv", 1, last=0, waits_s=2, group=even))
    assert find_hangs([receiver, state(2)])[0].text == (
        "rank 4 waits in recv #0 of group even from rank 2 for 2.0 s; "
        "rank 2 has not called send: in no module for 25.0 s"
    )
    sent = state(2, pair("send", 2, last=0, group=even))
    assert find_hangs([receiver, sent])[0].text == (
        "rank 4 waits in recv #0 of group even from rank 2 for 2.0 s; rank 2 has called send, so it does not complete"
    )


def test_a_chain_of_receives_starts_with_the_rank_that_does_not_wait() -> None:
    states = [
        state(0, stack=calls("Stage0")),
        state(1, pair("recv", 0, last=3, waits_s=9)),
        state(2, pair("recv", 1, last=3, waits_s=11)),
    ]
    first, second = find_hangs(states)
    assert (first.waiting, first.not_called, first.is_cause) == ((1,), (0,), True)
    assert (second.waiting, second.not_called, second.is_cause) == ((2,), (1,), False)
    assert second.text.endswith("rank 1 has not called send: it waits in recv #3 from rank 0")


def test_ranks_that_wait_for_each_other_are_causes() -> None:
    states = [state(0, pair("recv", 1, last=0, waits_s=3)), state(1, pair("recv", 0, last=0, waits_s=2))]
    assert [(hang.waiting, hang.not_called, hang.is_cause) for hang in find_hangs(states)] == [
        ((0,), (1,), True),
        ((1,), (0,), True),
    ]


def test_a_receive_from_any_rank_may_be_the_other_end() -> None:
    any_receive = pair("recv", ANY_PEER, last=0, waits_s=4)
    hangs = find_hangs([state(0, pair("send", 1, last=0, waits_s=3)), state(1, any_receive)])
    assert [hang.text for hang in hangs] == [
        "rank 1 waits in recv #0 from any rank for 4.0 s",
        "rank 0 waits in send #0 to rank 1 for 3.0 s; rank 1 has called recv, so it does not complete",
    ]


def test_a_wait_that_has_not_ended_blocks() -> None:
    script = EventScript()
    script.note_group("0", "0-1", "default_pg")
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(20, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    script.collective(30, Kind.WAIT_ENTER, ALL_REDUCE, 0)
    group = Group("0", (0, 1), "default_pg")
    assert progress(script) == GroupProgress(group, 0, ("all_reduce",), Blocked("all_reduce", 0, 30, 1), (8,))


def test_a_call_that_has_not_returned_blocks() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, BARRIER, 4)
    assert progress(script).blocked == Blocked("barrier", 4, 10, 1)


def test_a_call_that_has_not_returned_blocks_whatever_another_thread_calls() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, BARRIER, 4)
    script.on_thread(script.add_thread("worker", tid=2))
    script.collective(20, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 5)
    script.collective(30, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    assert progress(script).blocked == Blocked("barrier", 4, 10, 1)


@pytest.mark.parametrize("completes", [True, False])
def test_a_collective_not_seen_complete_blocks_only_if_its_kind_was_seen_complete(completes: bool) -> None:
    script = EventScript()
    for counter in range(2):
        script.collective(10 * counter + 1, Kind.COLLECTIVE_ENTER, ALL_REDUCE, counter)
        script.collective(10 * counter + 2, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
        if completes and counter == 0:
            script.collective(5, Kind.COLLECTIVE_DONE, ALL_REDUCE, 0)
    assert progress(script).blocked == (Blocked("all_reduce", 1, 11, 1) if completes else None)


def test_a_complete_collective_blocks_nothing() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(20, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    script.collective(30, Kind.WAIT_ENTER, ALL_REDUCE, 0)
    script.collective(40, Kind.WAIT_EXIT, ALL_REDUCE, 0)
    assert (progress(script).blocked, progress(script).last) == (None, 0)


@pytest.mark.parametrize("text", ['["scatter", "0", 3]', '["", "", 1]'])
def test_a_forged_message_that_is_not_a_send_or_receive_is_left_out(text: str) -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, text, 0)
    rank_progress = read_rank_progress(RingAnalysis(script.snapshot()))
    assert (rank_progress.peers, [group.last for group in rank_progress.groups if group.last >= 0]) == ((), [])


def test_sends_and_receives_are_grouped_by_peer() -> None:
    script = EventScript()
    script.note_group("0", "0-3", "default_pg")
    script.collective(10, Kind.COLLECTIVE_ENTER, '["send", "0", 3]', 0)
    script.collective(20, Kind.COLLECTIVE_EXIT, '["send", "0", 3]', 8)
    script.collective(30, Kind.WAIT_ENTER, '["send", "0", 3]', 0)
    script.collective(35, Kind.WAIT_EXIT, '["send", "0", 3]', 0)
    script.collective(40, Kind.COLLECTIVE_ENTER, '["recv", "0", 1]', 0)
    script.collective(50, Kind.COLLECTIVE_EXIT, '["recv", "0", 1]', 8)
    script.collective(60, Kind.WAIT_ENTER, '["recv", "0", 1]', 0)
    script.collective(70, Kind.COLLECTIVE_ENTER, '["recv_any_source", "0"]', 0)
    group = Group("0", (0, 1, 2, 3), "default_pg")
    assert read_rank_progress(RingAnalysis(script.snapshot())).peers == (
        PeerProgress(group, "send", 3, 0, None),
        PeerProgress(group, "recv", 1, 0, Blocked("recv", 0, 60, 1)),
        PeerProgress(group, "recv", ANY_PEER, 0, Blocked("recv_any_source", 0, 70, 1)),
    )

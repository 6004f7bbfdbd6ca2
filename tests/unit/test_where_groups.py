"""Ranks in one place as one group, and the text of a group."""

from __future__ import annotations

import io
import re
import time
from datetime import datetime

import pytest
from rich.console import Console

from modtrace.live.hangs import hung_sentences
from modtrace.live.places import format_durations, format_ranges, format_stack, group_ranks, headline
from modtrace.live.where import Hang, WhereResult
from modtrace.live.where_table import render
from modtrace.timeline import Group
from tests.support.where_rings import SECOND, state


def test_ranks_that_agree_are_one_group_and_a_different_rank_is_first() -> None:
    ahead = (("GPT", "forward"), ("GPT.h.8", "forward"), ("GPT.h.8.attn", "forward"))
    behind = (("GPT", "forward"), ("GPT.h.7", "forward"), ("GPT.h.7.mlp", "forward"))

    groups = group_ranks(state(rank, *(behind if rank == 3 else ahead)) for rank in reversed(range(64)))

    assert [group.label for group in groups] == ["rank 3", "ranks 0-2, 4-63"]
    assert headline(groups) == "rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn"


def test_ranks_differ_by_step_state_and_phase() -> None:
    groups = group_ranks(
        [
            state(0, ("GPT", "forward")),
            state(1, ("GPT", "backward")),
            state(2, ("GPT", "forward"), step=6),
            state(3, ("GPT", "forward"), state="dead"),
            state(4, ("GPT", "forward")),
        ]
    )

    assert [group.label for group in groups] == ["rank 1", "rank 2", "rank 3", "ranks 0, 4"]
    assert headline(groups) == "rank 3 died in GPT, after step 5; ranks 0-2, 4 are in GPT"


def test_headline_of_three_groups_names_each_module() -> None:
    groups = group_ranks(
        [state(0, ("A", "forward")), *[state(rank, ("B", "forward")) for rank in (1, 2)]]
        + [state(rank) for rank in (3, 4, 5)]
    )

    assert headline(groups) == "rank 0 is in A, ranks 1-2 in B, the other 3 in no module"


def test_files_without_a_rank_are_called_by_their_name() -> None:
    groups = group_ranks(
        [state(None, ("A", "forward"), path="/runs/a.modtrace"), state(None, ("A", "forward"), path="b")]
    )

    assert [group.label for group in groups] == ["a.modtrace, b"]


def test_the_first_of_many_files_without_a_rank_are_named() -> None:
    groups = group_ranks(state(None, ("A", "forward"), path=f"{number}.modtrace") for number in range(9))

    assert [group.label for group in groups] == ["0.modtrace, 1.modtrace, 7 more files"]
    assert [group.label for group in group_ranks(groups[0].ranks[:3])] == ["0.modtrace, 1.modtrace, 2.modtrace"]


def test_format_stack_shortens_inner_names_and_names_each_phase() -> None:
    assert format_stack([]) == ""
    assert (
        format_stack([("GPT", "forward"), ("GPT.h.7", "forward"), ("GPT.h.7.mlp", "forward")])
        == "forward GPT › h.7 › mlp"
    )
    assert format_stack(
        [("GPT", "backward"), ("GPT.h.7", "backward"), ("GPT.h.7", "recompute"), ("Other", "recompute")]
    ) == ("backward GPT › h.7 · recompute GPT.h.7 › Other")


def test_the_headline_names_ranks_in_their_order() -> None:
    groups = group_ranks([state(10, ("A", "forward")), state(2, ("B", "forward")), state(11), state(12)])

    assert headline(groups) == "rank 2 is in B, rank 10 in A, the other 2 in no module"


@pytest.mark.parametrize(
    ("usual_s", "lasts_s", "state_name", "hung"),
    [
        (1, 10.1, "running", True),
        (1, 9.9, "running", False),
        (0.01, 5.1, "running", True),
        (0.01, 4.9, "running", False),
        (None, 60.1, "running", True),
        (None, 59.9, "running", False),
        (1, 1000, "dead", False),
    ],
)
def test_a_call_that_takes_ten_times_as_long_seems_hung(
    usual_s: float | None, lasts_s: float, state_name: str, hung: bool
) -> None:
    usual = {} if usual_s is None else {("Net", "forward"): int(usual_s * SECOND)}
    now_ns = 100 * SECOND + int(lasts_s * SECOND)
    rank_state = state(0, ("Net", "forward"), usual_ns=usual, now_ns=now_ns, state=state_name)

    assert rank_state.seems_hung(rank_state.threads[0]) is hung
    assert not rank_state.seems_hung(rank_state.threads[1])
    usually = "" if usual_s is None else " (usually 1.0 s)" if usual_s == 1 else " (usually 10 ms)"
    sentence = f"rank 0 seems hung: in forward Net for {lasts_s:.1f} s{usually}"
    assert hung_sentences([rank_state], []) == [sentence] * hung
    result = WhereResult([rank_state], [], [])
    assert result.sentence == (sentence if hung else headline(group_ranks([rank_state])))
    colors = render(result.groups)
    console = Console(force_terminal=True, color_system="standard", width=120, file=io.StringIO())
    console.print(colors)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith(f"\x1b[1;31m{sentence}\x1b[0m\n\n") is hung
    assert ("\x1b[1;31mforward Net" in text) is hung


@pytest.mark.parametrize(
    ("lasts_s", "state_name", "hung"), [(60.1, "running", True), (59.9, "running", False), (1000, "stopped", False)]
)
def test_a_process_seems_hung_in_no_module_after_a_minute_without_an_event(
    lasts_s: float, state_name: str, hung: bool
) -> None:
    rank_state = state(0, now_ns=101 * SECOND + int(lasts_s * SECOND), state=state_name)

    assert [rank_state.seems_hung(thread) for thread in rank_state.threads] == [hung, False]
    assert hung_sentences([rank_state], []) == [f"rank 0 seems hung: in no module for {lasts_s:.1f} s"] * hung


def test_ranks_that_hang_in_one_place_share_a_sentence_without_ranks_named_elsewhere() -> None:
    hung = [state(rank, ("Net", "forward"), now_ns=(161 + rank) * SECOND) for rank in (0, 1, 2)]
    elsewhere = state(None, FETCH, path="a.modtrace", usual_ns={FETCH: SECOND}, now_ns=120 * SECOND)
    hang = Hang("barrier", Group("0"), 0, (2,), (), (), (), (), SECOND, "")

    assert hung_sentences([*hung, elsewhere], [hang]) == [
        "ranks 0-1 seem hung: in forward Net for 61.0 s to 62.0 s",
        "a.modtrace seems hung: in data loading for 20.0 s (usually 1.0 s)",
    ]


def test_format_ranges_and_durations_are_short() -> None:
    assert format_ranges([5, 0, 1, 2, 2, 9, 8]) == "0-2, 5, 8-9"
    assert format_durations([0.0123]) == "12 ms"
    assert format_durations([0.00042]) == "0.4 ms"
    assert format_durations([0.00004]) == "<0.1 ms"
    assert format_durations([0.0]) == "0.0 ms"
    assert format_durations([12.34, 12.3]) == "12.3 s"
    assert format_durations([0.5, 119.0]) == "500 ms to 119.0 s"
    assert format_durations([125.0]) == "2 min 5 s"
    assert format_durations([7200 + 61.0]) == "2 h 1 min"


def test_in_80_columns_the_end_of_a_recording_leaves_room_for_the_modules() -> None:
    place = (("GPT", "forward"), ("GPT.transformer.h.11.attn.c_proj", "forward"))
    long_ago = datetime(2001, 2, 3, 4, 5, 6).timestamp()
    dead = [state(3, *place, state="dead", last_unix_ns=int(at * SECOND)) for at in (long_ago, time.time())]
    shown = []
    for group in dead:
        console = Console(width=80, file=io.StringIO())
        console.print(render(group_ranks([group])))
        sentence, _, _, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert sentence == "rank 3 died in GPT.transformer.h.11.attn.c_proj, after step 5"
        shown += lines

    # One line each: the open modules are shortened from the left.
    assert len(shown) == 2
    assert " ".join(shown[0].split()) == "rank 3 1 dead 5 MainThread …11.attn.c_proj since 2001-02-03"
    assert re.search(r"…h\.11\.attn\.c_proj +since \d\d:\d\d:\d\d +$", shown[1])


FETCH = ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data loading")


def test_the_headline_says_where_ended_runs_were() -> None:
    ended, alone = state(0, ("GPT.h", "forward"), state="stopped"), state(3, ("GPT.wte", "forward"))

    assert headline(group_ranks([ended])) == "rank 0 was in GPT.h when it ended"
    assert headline(group_ranks([ended, ended._replace(rank=1), alone])) == (
        "ranks 0-1 were in GPT.h when they ended; rank 3 is in GPT.wte"
    )


def test_the_headline_says_how_long_a_rank_is_in_a_range() -> None:
    ahead = [state(rank, ("GPT", "forward"), ("GPT.h", "forward")) for rank in range(3)]
    late = state(3, FETCH, usual_ns={FETCH: 4_000_000}, now_ns=131 * SECOND)

    assert headline(group_ranks([*ahead, late])) == (
        "rank 3 is in data loading for 31.0 s (usually 4.0 ms), the other 3 in GPT.h"
    )
    assert headline(group_ranks([late._replace(state="dead")])) == "rank 3 died in data loading, after step 5"
    steps = [state(0, ("mine", "user"), ("Optimizer.step#SGD.step", "optimizer")), state(1, ("mine", "user"))]
    assert headline(group_ranks(steps)) == "rank 0 is in the optimizer for 12.0 s, rank 1 in range mine for 12.0 s"


def test_ranges_are_shown_with_the_ranges_around_them() -> None:
    assert format_stack([("epoch", "user"), FETCH, ("collect", "gc")]) == (
        "range epoch › data loading › garbage collection"
    )
    rank_state = state(3, ("epoch", "user"), FETCH, usual_ns={FETCH: 4_000_000}, now_ns=131 * SECOND)
    console = Console(width=160, file=io.StringIO())
    console.print(render(group_ranks([rank_state])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"range epoch › data loading ({FETCH[0]})" in text
    assert text.split()[-4:] == ["31.0", "s", "4.0", "ms"]


@pytest.mark.parametrize(
    ("category", "usual_s", "hung"),
    [
        ("data loading", 1, True),
        ("data loading", None, True),
        ("user", 1, True),
        ("user", None, False),
        ("compile", 1, False),
        ("evaluation", 1, False),
    ],
)
def test_a_range_seems_hung_if_ranges_of_its_kind_take_about_as_long_each_time(
    category: str, usual_s: int | None, hung: bool
) -> None:
    usual = {} if usual_s is None else {("name", category): usual_s * SECOND}
    rank_state = state(0, ("name", category), usual_ns=usual, now_ns=200 * SECOND)

    assert rank_state.seems_hung(rank_state.threads[0]) is hung

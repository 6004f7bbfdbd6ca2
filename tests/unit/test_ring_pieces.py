"""A large ring in pieces: the timeline, the summary and some steps are those of the ring as a whole."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from modtrace import ModtraceError, Timeline, TraceError, load, read
from modtrace.cli.group import group
from modtrace.read import load_around, load_shown, read_pieces, ring_pieces
from modtrace.reporting import report
from modtrace.ring import Kind, read_ring, ring_serials
from modtrace.ring.event_text import range_text
from modtrace.ring.slot_format import ALLOCATED, NO_NAME, REFUSED
from modtrace.timeline import step_pieces
from modtrace.timeline.contents import BACKWARD_PASSES, OPEN_AT_END, STEPS_END_WITH
from modtrace.timeline.decode import pieces
from modtrace.timeline.slices import BACKWARD
from modtrace.timeline.summary import Summary, summarize, summarize_pieces, take_steps
from modtrace.view.server import ensure_viewable
from modtrace.write import write
from modtrace.write.written_parts import part_counters, parts_to_write
from tests.support.event_script import EventScript
from tests.support.random_run import RandomRun
from tests.support.small_timelines import as_values

STEPS = 60
_SUFFIXES = (".pftrace", ".json")


class Training:
    """Steps of a model with a backward pass of each, in ranges that are around some of them.

    Args:
        path: the ring.
        seed: of what is random.
        capacity: of the ring.
        retains: how often the backward pass of a step comes in the next one.
        inside: steps in which a call is open that is around everything.
        late: steps whose backward pass comes with that of another step.
        ends_with: what ends a step.
        dies_in: what the process is in when it dies: "range", "forward" or "backward"; empty: it ends in good order.
        costs: whether FLOPs and memory are counted, until an allocation fails in step 41.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        capacity: int = 8192,
        retains: float = 0,
        inside: range = range(0),
        late: Mapping[int, int] = MappingProxyType({}),
        ends_with: Kind = Kind.STEP,
        costs: bool = False,
        dies_in: str = "",
    ) -> None:
        begin = time.monotonic_ns() + 10**9
        self.script = EventScript(capacity, path, clock=lambda at: begin + at)
        self.random, self.now, self.sequence, self.calls = random.Random(seed), 0, 0, 0
        self.names = [self.script.name(name) for name in ("Net", "Net.body", "Net.head")]
        self.costs, self.number, self.held = costs, 0, 0
        self.script.note_operator(0, "aten::mm", "float32", 100, 7)
        self.script.note_operator(1, "aten::rnn", "float32", -1)
        left: list[int] = []
        kept: dict[int, list[int]] = {}
        trainer = self.script.name("Trainer")
        for number in range(STEPS):
            self.number = number
            if costs and number < 2:
                self.script.event(self.after(), Kind.COUNTING, NO_NAME, 1 - number)
            if number % 20 == 0 or (dies_in == "range" and number == 55):
                self.range(Kind.RANGE_BEGIN, "epoch", number)
            if number == inside.start < inside.stop:
                self.script.enter(self.after(), trainer, 0, self.sequence)
            self.range(Kind.RANGE_BEGIN, "fetch", 1000 + number)
            self.range(Kind.RANGE_END, "fetch", 1000 + number)
            made = kept.pop(number, []) + self.forward()
            if number in late:
                kept[late[number]], made = made, []
            if self.random.random() >= retains:
                left, made = [], left + made
                self.backward(number, made)
            else:
                left += made
            if number % 7 == 0:
                self.script.mark(self.after(), f"at {number}")
            self.range(Kind.RANGE_BEGIN, "update", 2000 + number)
            name = 0 if ends_with == Kind.GRADIENTS else NO_NAME
            self.script.event(self.after(), ends_with, name, number)
            self.range(Kind.RANGE_END, "update", 2000 + number)
            if number + 1 == inside.stop:
                self.script.exit(self.after(), trainer, 0, self.sequence)
            if number % 20 == 14:
                self.range(Kind.RANGE_END, "epoch", number - 14)
        if dies_in == "forward":
            self.script.enter(self.after(), self.names[1], self.calls, self.sequence)
        if dies_in == "backward":
            made = self.forward()
            self.script.pass_begin(self.after(), STEPS)
            self.script.node_begin(self.after(), made[-1])
        if not dies_in:
            self.script.close()

    def after(self) -> int:
        self.now += self.random.randint(1, 1000)
        return self.now

    def range(self, kind: Kind, name: str, number: int) -> None:
        texts = {"update": range_text(name, "optimizer"), "fetch": range_text(name, "data loading")}
        self.script.collective(self.after(), kind, texts.get(name, range_text(name, "user")), number)

    def cost(self, owner: int) -> None:
        """Run operators in the first step; allocate in each."""
        if not self.costs:
            return
        for operator in (0, 1) if self.number == 0 else ():
            self.script.operator(self.after(), operator)
        self.held += self.random.randint(-100, 1000)
        self.script.collective(self.after(), Kind.COUNTER, ALLOCATED, self.held)
        if self.random.random() < 0.2:
            self.script.event(self.after(), Kind.HELD, owner, self.held << 2)
        if self.number == 41 and owner == self.names[-1]:
            self.script.collective(self.after(), Kind.COUNTER, REFUSED, 1 << 20)

    def forward(self) -> list[int]:
        first, call, (net, *inner) = self.sequence, self.calls, self.names
        self.script.enter(self.after(), net, call, self.sequence)
        if self.costs:
            self.script.event(self.after(), Kind.INPUTS, NO_NAME, self.number % 3 % 2)
        for name in inner * self.random.randint(1, 3):
            self.calls += 1
            self.script.enter(self.after(), name, self.calls, self.sequence)
            self.cost(name)
            self.sequence += 2
            self.script.exit(self.after(), name, self.calls, self.sequence)
        self.script.exit(self.after(), net, call, self.sequence)
        self.calls += 1
        return [*range(first, self.sequence)]

    def backward(self, number: int, made: list[int]) -> None:
        self.script.pass_begin(self.after(), number)
        for sequence in reversed(made):
            self.script.node_begin(self.after(), sequence)
            self.cost(NO_NAME)
            self.script.node_end(self.after(), sequence)
        self.script.pass_end(self.after(), number)


def no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 1 << 30)


def check(ring: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[tuple[int | None, int | None]]) -> Timeline:
    """Compare pieces of a ring, their summary and files, and some steps, with the ring as a whole, and return it."""
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    in_pieces, summary = load(ring), summarize_ring(ring)
    some = [load_around(ring, steps) for steps in chosen]
    for suffix in _SUFFIXES:
        write(read_pieces(ring), ring.with_suffix(f".pieces{suffix}"))
    *_, last = parts_to_write(read_pieces(ring))
    no_pieces(monkeypatch)
    whole = load(ring)

    for suffix in _SUFFIXES:
        whole.save(ring.with_suffix(f".whole{suffix}"))
        written = [load(ring.with_suffix(f".{how}{suffix}")) for how in ("pieces", "whole")]
        assert as_values(written[0]) == as_values(written[1])
    if len(whole.marks):
        in_parts = [last.step_parts or [], part_counters(whole)]
        of_pieces, of_whole = ([(part.name, part.time_ns.tolist(), part.ns.tolist()) for part in c] for c in in_parts)
        assert of_pieces == of_whole
    assert as_values(in_pieces) == as_values(whole)
    of_whole_ring = json.loads(whole.summary().to_json())
    if summary is not None:
        assert json.loads(summary.to_json()) == of_whole_ring
    monkeypatch.setattr(step_pieces, "PIECE_SPANS", 16)
    assert json.loads(whole.summary().to_json()) == of_whole_ring
    cleaned = replace(whole, metadata={})
    cleaned_text = cleaned.summary().to_json()
    monkeypatch.setattr(step_pieces, "PIECE_SPANS", 1 << 30)
    assert json.loads(cleaned_text) == json.loads(cleaned.summary().to_json())
    monkeypatch.setattr(step_pieces, "PIECE_SPANS", 16)
    for steps, part in zip(chosen, some, strict=True):
        assert as_values(take_steps(part, *steps)) == as_values(whole.steps(*steps))
    return whole


def summarize_ring(ring: Path) -> Summary | None:
    in_pieces = ring_pieces(ring)
    return summarize_pieces(in_pieces) if in_pieces is not None and in_pieces.has_step_ends else None


def cuts_of(ring: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    return pieces.RingPieces(lambda serials, without: read_ring(ring, None, serials, without), ring_serials(ring)).cuts


@pytest.mark.parametrize("capacity", [4096, 2000])
def test_pieces_of_a_ring_with_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, capacity, costs=True)
    assert len(cuts_of(ring, monkeypatch)) >= 8
    assert len([*read_pieces(ring)]) >= 8
    part = load_around(ring, (45, 48))
    assert 0 < len(part.slices) < 700
    whole = check(ring, monkeypatch, [(45, 48), (-3, -1)])
    parts = [*step_pieces.step_pieces(whole)]
    assert len(parts) >= 8
    assert sum(len(part.columns) for part in parts) == len(whole.columns)
    summary = whole.summary()

    assert summary.memory is not None
    assert "could not allocate 1.00 MiB in forward Net.head, after step 40" in summary.memory.sentences[0]
    assert summary.flops is not None
    assert (summary.flops.counted_in == [0]) == (capacity == 4096)


@pytest.mark.parametrize(("seed", "capacity", "retains"), [(1, 8192, 0), (2, 1500, 0), (3, 8192, 0.1), (1, 8192, 0.2)])
def test_pieces_say_what_the_whole_ring_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, capacity: int, retains: float
) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, seed, capacity, retains)
    assert len(cuts_of(ring, monkeypatch)) >= 8
    for steps in [(-3, -1), (-2, None), (50, 53), (45, -12)]:
        part = load_around(ring, steps)
        assert 0 < len(part.slices) < 700
    check(ring, monkeypatch, [(-3, -1), (-2, None), (50, 53), (45, -12)])


def test_a_call_that_is_open_for_many_pieces_is_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, inside=range(20, 45))
    whole = check(ring, monkeypatch, [(30, 32), (50, 52)])
    trainer = [*(name.fqn for name in whole.names)].index("Trainer")
    row = whole.slices.name.tolist().index(trainer)

    assert (int(whole.slices.step[row]), bool(whole.slices.complete[row])) == (20, True)
    events = read_ring(ring).slots.events
    enter, leave = events.serial[
        (events.name == trainer) & np.isin(events.kind, (Kind.FORWARD_ENTER, Kind.FORWARD_EXIT))
    ]
    cuts = cuts_of(ring, monkeypatch)
    assert cuts[0] < enter < leave < cuts[-1]
    assert not any(enter < cut <= leave for cut in cuts)


def test_steps_have_the_backward_of_an_old_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, late={40: 51})
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    part = take_steps(load_around(ring, (51, 52)), 51, 52)
    backward = [part.names[name].fqn for name in part.slices.name[part.slices.phase == BACKWARD].tolist()]

    assert backward.count("Net") == 2  # of this step, and of step 40
    check(ring, monkeypatch, [(51, 52), (45, 46)])


def test_all_pieces_know_which_events_end_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, ends_with=Kind.GRADIENTS)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    summary = summarize_ring(ring)

    assert summary is not None
    assert summary.overview is not None
    assert summary.overview.steps_end_with == load_around(ring, (50, 52)).metadata[STEPS_END_WITH] == BACKWARD_PASSES
    check(ring, monkeypatch, [(50, 52)])


@pytest.mark.parametrize("dies_in", ["range", "forward", "backward"])
def test_the_call_in_which_a_process_died_has_one_duration_in_all_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, dies_in=dies_in)
    monkeypatch.setattr(read, "read_ring", lambda *wanted: read_ring(*wanted)._replace(writer="dead"))
    whole = check(ring, monkeypatch, [])

    is_in = whole.metadata[OPEN_AT_END]
    assert isinstance(is_in, dict)
    assert str(is_in["place"]).startswith(dies_in)
    assert is_in["usual_seconds"] > 0


@given(seed=st.integers(0, 1 << 32))
@example(seed=11445961)  # two threads count a call of one module and shape
@example(seed=1922536906)  # a piece in which nothing but the ends of steps is known
@example(seed=1662242090)  # calls of which inputs are not known
@example(seed=4160704878)  # threads that do other things while a step ends that has no call
@example(seed=3522207472)  # the first step in the ring calls nothing
@example(seed=602878526)  # ranges have names that come after the first piece
@example(seed=3101292853)  # passes of two threads whose begins were overwritten
@example(seed=3670120979)  # ranges of earlier pieces have names that the last one lacks
@example(seed=3063761949)  # no step of the last piece is whole
@example(seed=7155796)  # another thread's step ends between a call and the next backward pass
def test_whatever_a_program_does_pieces_say_what_the_whole_ring_says(seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory() as folder:
        ring = Path(folder) / "run.modtrace"
        RandomRun(ring, seed)
        check(ring, monkeypatch, [(-3, -1), (-2, None), (12, 14)])


def test_the_oldest_events_of_a_running_process_are_left_out(tmp_path: Path) -> None:
    path, begin = tmp_path / "run.modtrace", time.monotonic_ns()
    script = EventScript(64, path, clock=lambda at: begin + at)
    for number in range(100):
        script.step(number, number)

    assert ring_serials(path) == range(40, 100)
    script.close()
    assert ring_serials(path) == range(36, 100)


def test_the_last_steps_of_a_ring_with_too_many_events_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1)
    monkeypatch.setattr(read, "SHOWN_EVENTS", 700)
    whole, events = load(ring), read_ring(ring).slots.events
    # The first step of which all events are among the last 700: the one behind the first that ends there.
    first = min(events.value[-700:][events.kind[-700:] == Kind.STEP].tolist()) + 1
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    shown, notes = load_shown(ring, None)
    viewable, view_notes = ensure_viewable(ring, tmp_path)
    (tmp_path / "all").mkdir()
    everything, no_notes = ensure_viewable(ring, tmp_path / "all", (None, None))
    packed, chosen = report(ring), report(ring, steps=(3, 5))

    assert 0 < first < STEPS - 1
    assert as_values(shown) == as_values(whole.steps(first))
    assert notes == view_notes == packed.notes
    assert notes[0].startswith(
        f"This contains the steps from {first} on: the ring has {len(events):,} events, from step 0"
    )
    assert f"- {notes[0]}\n" in packed.files["summary.md"].decode()
    assert f"{STEPS - first} steps" in packed.files["summary.md"].decode()
    assert {*load(viewable).slices.step.tolist()} == {*range(first, STEPS)}
    assert chosen.notes == ["This contains steps 3 to 4, which --steps chose."]
    assert no_notes == []
    assert as_values(load(everything))["start"] == as_values(whole)["start"]
    with pytest.raises(TraceError, match="it has no events in these steps; its last is 59"):
        load_shown(ring, (100, 200))


def test_the_last_step_is_shown_even_if_it_has_too_many_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1)
    monkeypatch.setattr(read, "SHOWN_EVENTS", 2)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    shown, _ = load_shown(ring, None)

    assert {*shown.slices.step.tolist()} == {STEPS - 1}


def test_steps_inside_a_call_around_all_are_read_alone_and_all_of_them_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, 1, inside=range(STEPS))
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    monkeypatch.setattr(read, "SHOWN_EVENTS", 700)
    shown, notes = load_shown(ring, None)

    assert 0 < len(load_around(ring, (50, 53)).slices) < 700
    assert "from step 0 on" in notes[0]
    with pytest.raises(ModtraceError, match=r"events can only be read together, .* choose steps at its end"):
        load_around(ring, None)
    assert len(load_around(ring, (None, None)).slices) > 2 * len(shown.slices)
    check(ring, monkeypatch, [(50, 53), (-3, None)])


def record_calls(ring: Path) -> None:
    begin = time.monotonic_ns() + 10**9
    script = EventScript(8192, ring, clock=lambda at: begin + at)
    net, head = script.name("Net"), script.name("Net.head")
    for call in range(800):
        for depth, name in enumerate((net, head)):
            script.enter(100 * call + depth, name, call)
        for depth, name in enumerate((head, net)):
            script.exit(100 * call + 50 + depth * call % 40, name, call)
    script.close()


def test_a_ring_without_steps_is_cut_once_to_be_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_calls(ring := tmp_path / "run.modtrace")
    looks, init = list[range](), pieces.RingPieces.__init__

    def note(self: pieces.RingPieces, read: pieces.ReadRing, serials: range, *rest: Any, **change: Any) -> None:
        looks.append(serials)
        init(self, read, serials, *rest, **change)

    expected = load(ring).summary().sort_by().to_csv()
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    monkeypatch.setattr(pieces.RingPieces, "__init__", note)
    result = CliRunner().invoke(group, ["summary", str(ring), "--format", "csv"])

    assert result.stdout == expected
    assert looks == [ring_serials(ring)]


def test_only_the_last_calls_of_a_ring_without_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_calls(ring := tmp_path / "run.modtrace")
    whole = load(ring)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    monkeypatch.setattr(read, "SHOWN_EVENTS", 700)
    monkeypatch.setattr(read, "_FIRST_EVENT_COUNT", 50)
    shown, notes = load_shown(ring, None)
    _, view_notes = ensure_viewable(ring, tmp_path)

    assert 300 < len(shown.slices) <= 350
    assert as_values(shown)["end"] == whole.slices.end[-len(shown.slices) :].tolist()
    result = CliRunner().invoke(group, ["summary", str(ring), "--format", "csv"])
    assert result.stdout == summarize(shown).sort_by(None).to_csv()
    assert notes == view_notes == result.stderr.splitlines()
    assert notes[0].startswith("This contains the last 700 of 3,200 events")
    for first, last in [(-3, -1), (-40, None)]:
        part = load_around(ring, (first, last))
        assert len(part.slices) < 400
        tables = [summarize(take_steps(timeline, first, last)) for timeline in (part, whole)]
        assert tables[0].to_csv() == tables[1].to_csv()
        # How many calls are before the part is not read, so its numbers are from its own first call.
        assert [one.step - tables[0].steps[0].step for one in tables[0].steps] == [*range(len(tables[0].steps))]
        assert tables[1].steps[0].step == 800 + first
        part_steps, whole_steps = ([step._replace(step=0) for step in one.steps] for one in tables)
        assert part_steps == whole_steps
        part_in_parts, whole_in_parts = ([step._replace(step=0) for step in one.step_parts] for one in tables)
        assert part_in_parts == whole_in_parts

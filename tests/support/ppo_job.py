"""A small job of reinforcement learning: a driver, two trainers and two rollouts, as the rings that they would leave.

In each step the driver sends prompts, the rollouts decode, the driver rewards, the trainers train and hand on weights.
Who waits for whom follows from the times alone, which are pretended: shares no code with what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from modtrace.ring import Kind
from tests.support.event_script import EventScript

__all__ = ["PpoCulprit", "write_ppo_job"]

MS = 1_000_000
BEGIN = 10**16
STEPS, TOKENS = 24, 6
PROCESSES = (("driver", 0), ("trainer", 0), ("trainer", 1), ("rollout", 0), ("rollout", 1))
DRIVER, TRAINERS, ROLLOUTS = 0, (1, 2), (3, 4)
ALL_REDUCE = '["all_reduce", "1"]'


class PpoCulprit(NamedTuple):
    """The place that takes a process longer, by `ms` a step: a module's forward, its `backward`, a range, none."""

    role: str
    rank: int
    place: str
    ms: float


class _Process:
    """Writes what one process does, from `now` on."""

    def __init__(
        self, path: Path, number: int, culprit: PpoCulprit, noise: Callable[[], float], *, world: bool
    ) -> None:
        role, rank = PROCESSES[number]
        self._extra = {culprit.place: culprit.ms} if (role, rank) == culprit[:2] else {}
        self._noise, self.now = noise, BEGIN
        self.script = EventScript(8192, path, {"pid": 10 + number, "rank": number if world else rank, "role": role})
        self.script.note({"kind": "clock", "clock": "a"})
        self.script.note_group("0", "0-4", "default_pg")
        self.script.note_group("1", "1-2" if world else "0-1", "trainers")
        self._ranges = self._sequence = 0

    def spend(self, place: str, ms: float, times: int = 1) -> None:
        """Let time pass; a culprit's extra is spread over `times` of a step."""
        self.now += round((ms * (1 + self._noise()) + self._extra.get(place, 0) / times) * MS)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        text, number = json.dumps(["user", name]), self._ranges
        self._ranges += 1
        self.script.collective(self.now, Kind.RANGE_BEGIN, text, number)
        yield
        self.script.collective(self.now, Kind.RANGE_END, text, number)

    def module(self, fqn: str, ms: float, step: int, times: int = 1) -> None:
        name = self.script.name(fqn, module_class=fqn.split(".")[-1])
        self.script.enter(self.now, name, step, self._sequence)
        self.spend(fqn, ms, times)
        self._sequence += 1
        self.script.exit(self.now, name, step, self._sequence)

    def backward(self, fqns: tuple[str, ...], ms: float) -> None:
        for place, fqn in enumerate(fqns):
            self.script.node_begin(self.now, self._sequence - 1 - place)
            self.spend(f"{fqn} backward", ms)
            self.script.node_end(self.now, self._sequence - 1 - place)
        self.script.backward_over(self.now)

    def message(self, operator: str, peer: int, counter: int, until: int) -> None:
        """Send or receive, and wait."""
        text = json.dumps([operator, "0", peer])
        for kind, value in ((Kind.COLLECTIVE_ENTER, counter), (Kind.COLLECTIVE_EXIT, 64), (Kind.WAIT_ENTER, counter)):
            self.script.collective(self.now, kind, text, value)
        self.now = max(self.now, until)
        self.script.collective(self.now, Kind.WAIT_EXIT, text, counter)


def write_ppo_job(
    folder: Path,
    culprit: PpoCulprit | None = None,
    *,
    by_messages: bool,
    noise: float = 0.03,
    seed: int = 0,
    warm_up_ms: float = 0,
) -> None:
    """Write the rings.

    Args:
        folder: for them.
        culprit: the process with a delay, None for no delay.
        by_messages: processes send each other messages, in one world; else roles have ranks of their own, and ranges
            say that a process waits.
        noise: the deviation of all times, as a part of them.
        seed: of that.
        warm_up_ms: what the trainers take more in the first step, and with 1 ms to gather the weights after it.
    """
    random = np.random.default_rng(seed)

    def make(number: int) -> _Process:
        path, default = folder / f"{number}.modtrace", PpoCulprit("", 0, "", 0)
        return _Process(path, number, culprit or default, lambda: noise * random.standard_normal(), world=by_messages)

    job = [make(number) for number in range(len(PROCESSES))]

    def hand_on(sender: int, receiver: int, counter: int, what: str) -> None:
        source, target = job[sender], job[receiver]
        arrives = source.now + MS // 10
        if by_messages:
            target.message("recv", sender, counter, arrives)
            source.message("send", receiver, counter, source.now)
            return
        with target.range(f"wait for {what}"):
            target.now = max(target.now, arrives)

    for step in range(STEPS):
        for trainer, rollout in zip(TRAINERS, ROLLOUTS, strict=True):
            if step:
                hand_on(trainer, rollout, step, "weights")
                hand_on(trainer, DRIVER, step, "training")
        with job[DRIVER].range("prompts"):
            job[DRIVER].spend("prompts", 0.5)
        for rollout in ROLLOUTS:
            hand_on(DRIVER, rollout, step, "prompts")
            with job[rollout].range("decode"):
                for token in range(TOKENS):
                    job[rollout].spend("decode", 0.2, TOKENS)
                    job[rollout].module("LM.body", 3, step * TOKENS + token, TOKENS)
                    job[rollout].module("LM.head", 1, step * TOKENS + token, TOKENS)
                    with job[rollout].range("sample"):
                        job[rollout].spend("sample", 0.5, TOKENS)
        for rollout in ROLLOUTS:
            hand_on(rollout, DRIVER, step, "rollouts")
        with job[DRIVER].range("reward"):
            job[DRIVER].spend("reward", 0.5)
        job[DRIVER].spend("", 0)
        for trainer in TRAINERS:
            own = job[trainer]
            hand_on(DRIVER, trainer, step, "rewards")
            own.spend("", 0)
            with own.range("advantages"):
                own.spend("advantages", 2)
                own.now += round(warm_up_ms * MS) * (step == 0)
            own.module("Net.up", 4, step)
            own.module("Net.down", 4, step)
            own.backward(("Net.down", "Net.up"), 5)
            own.script.collective(own.now, Kind.COLLECTIVE_ENTER, ALL_REDUCE, step)
        done = max(job[trainer].now for trainer in TRAINERS) + MS // 10
        for trainer in TRAINERS:
            job[trainer].now = done
            job[trainer].script.collective(done, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 4096)
            job[trainer].script.collective(done, Kind.COLLECTIVE_DONE, ALL_REDUCE, step)
            job[trainer].script.step(done, step)
            if warm_up_ms and step == 0:
                with job[trainer].range("gather"):
                    job[trainer].now += MS
    for process in job:
        process.script.close()

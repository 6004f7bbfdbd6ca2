"""Programs that train nothing: their steps, and how long these take, against a stopwatch in the program."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import Tensor, nn

import modtrace
from modtrace.cli.group import group
from modtrace.record_options import EngineName


def units(*arguments: str) -> list[dict[str, Any]]:
    """Return the units of `modtrace summary`."""
    result = CliRunner().invoke(group, ["summary", *arguments, "--format", "json"])
    assert result.exit_code == 0, result.output
    told: list[dict[str, Any]] = json.loads(result.output)["units"]
    return told


def test_a_decode_loop_in_a_range_is_a_step_if_the_range_is_chosen(engine: EngineName, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    @modtrace.range("request")
    @torch.inference_mode()
    def decode(state: Tensor, tokens: int) -> Tensor:
        for _ in range(tokens):
            state = model(state)
        return state

    with modtrace.record(tmp_path / "t.json", engine=engine):
        for tokens in (3, 1, 5):
            decode(torch.ones(1, 8), tokens)

    assert [(unit["unit"], unit["measured"]) for unit in units(str(tmp_path / "t.json"))] == [("Sequential", 9)]
    whole, first, later = units(str(tmp_path / "t.json"), "--step-by", "range request")
    assert (whole["unit"], whole["measured"], whole["calls"]) == ("request", 3, 9)
    assert (first["stage"], first["measured"]) == ("first call", 3)
    assert (later["stage"], later["measured"]) == ("later calls", 6)
    assert [unit["measured"] for unit in units(str(tmp_path / "t.json"), "--step-by", "Linear")] == [9]
    chosen = ["--steps", "-1:", "--step-by", "range request"]
    last = CliRunner().invoke(group, ["convert", str(tmp_path / "t.json"), str(tmp_path / "last.json"), *chosen])
    assert last.exit_code == 0
    assert [span.fqn for span in modtrace.load(tmp_path / "last.json").spans].count("Sequential") == 5
    wrong = CliRunner().invoke(group, ["summary", str(tmp_path / "t.json"), "--step-by", "range reqest"])
    assert wrong.exit_code == 1
    assert "no range is called 'reqest'; there are request" in wrong.output


class Watched(nn.Linear):
    """Measures how long its forward takes, by thread."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.took: dict[str, list[int]] = {"first": [], "second": []}

    def forward(self, x: Tensor) -> Tensor:
        begin = time.monotonic_ns()
        result = super().forward(x)
        self.took[threading.current_thread().name].append(time.monotonic_ns() - begin)
        return result


def test_calls_of_two_threads_are_steps_with_percentiles_of_their_own(engine: EngineName, tmp_path: Path) -> None:
    model = Watched()
    begun: dict[str, list[int]] = {"first": [], "second": []}
    took: dict[str, list[int]] = {"first": [], "second": []}

    def serve(name: str, calls: int) -> None:
        for _ in range(calls):
            begun[name].append(time.monotonic_ns())
            model(torch.ones(1, 8))
            took[name].append(time.monotonic_ns() - begun[name][-1])

    threads = [threading.Thread(target=serve, args=args, name=args[0]) for args in (("first", 30), ("second", 50))]
    with modtrace.record(tmp_path / "t.pftrace", engine=engine):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    of_thread = {unit["thread"]: unit for unit in units(str(tmp_path / "t.pftrace"))}
    assert {name: unit["measured"] for name, unit in of_thread.items()} == {"": 80, "first": 30, "second": 50}
    for name, watched in took.items():
        unit, around, inside = of_thread[name], sorted(watched), sorted(model.took[name])
        # A call takes at least as long as the forward in it, and at most as long as the stopwatch around it says.
        middle = int(statistics.median(inside)), int(statistics.median(around))
        assert middle[0] <= unit["p50_ns"] <= middle[1]
        for field, rank in (("p95_ns", -(-len(around) * 95 // 100)), ("p99_ns", len(around))):
            assert inside[rank - 1] <= unit[field] <= around[rank - 1]
        lasted = begun[name][-1] + watched[-1] - begun[name][0]
        assert unit["per_second"] >= len(watched) * 1e9 / lasted
        assert unit["per_second"] <= len(watched) * 1e9 / (begun[name][-1] - begun[name][0] - watched[0])

"""A rank of a real job that is late once: `ranks slow` and `watch` name it, and the cause that the program knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

import modtrace
from modtrace.live.windows import KEPT
from modtrace.ranks.slow import find_slow_ranks
from tests.support.forked_python import run_forked
from tests.support.python_process import HANGS_AFTER_S, start_python

TRAIN = """
import gc, io, os, sys, time
import torch, modtrace
from torch import distributed as dist, nn

cause, late, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
LATE_S = 2.0  # many times a step, on a machine that does other things too
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, is_late = dist.get_rank(), False

class Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(LATE_S * (is_late and cause == "backward"))
        return grad

class Block(nn.Linear):
    def forward(self, x):
        time.sleep(LATE_S * (is_late and cause == "forward"))
        if is_late and cause == "gc":
            gc.collect()
        return Delay.apply(super().forward(x))

class Slow(io.BytesIO):
    def write(self, data):
        time.sleep(LATE_S / 4)
        return super().write(data)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(LATE_S * (is_late and cause == "loader"))
        return torch.ones(64)

model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), Block(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
gc.callbacks.append(lambda phase, _: time.sleep(LATE_S * (phase == "stop" and is_late and cause == "gc")))
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=1))
with modtrace.record(ring=os.path.join(folder, f"{rank}.modtrace"), capacity=1 << 16):
    for step in range(30):
        is_late = step == 20 and rank == late
        model(next(batches)).sum().backward()
        if is_late and cause == "range":
            with torch.profiler.record_function("augment"):
                time.sleep(LATE_S)
        optimizer.step()
        optimizer.zero_grad()
        if is_late and cause == "saving":
            torch.save(torch.ones(8), Slow())
        time.sleep(0.03)
    dist.barrier()
dist.destroy_process_group()
"""
CAUSES = {
    "range": "range augment",
    "gc": "garbage collection",
    "saving": "saving",
    "loader": "data loading",
    "forward": "Sequential.1 forward",
    "backward": "Sequential.1 backward",
}


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("cause", [pytest.param(one, marks=[pytest.mark.full] * (one != "gc")) for one in CAUSES])
@pytest.mark.usefixtures("native_engine")
def test_the_late_rank_is_named_with_its_cause(tmp_path: Path, cause: str, late: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run").mkdir()
    with start_python(
        "-m", "modtrace", "watch", tmp_path / "run", "--keep-when", "step > 3x", "--pause", "1ns"
    ) as watcher:
        run_forked("-m", "tests.support.forked_ranks", 0, tmp_path / "train.py", cause, late, tmp_path / "run")
        assert watcher.wait(HANGS_AFTER_S) == 0

    place = re.escape(CAUSES[cause])
    named = [line for line in find_slow_ranks(tmp_path / "run").sentences if re.search(f"mostly in {place};", line)]
    assert [line.partition(" was late in ")[0] for line in named] == [f"rank {late}"]
    windows = [*(tmp_path / "run" / "kept").glob(f"rank{late}-step2[01]-step/rank{1 - late}-*.pftrace")]
    why = [sentence for file in windows for sentence in cast(list[str], modtrace.load(file).metadata[KEPT])]
    assert [
        sentence
        for sentence in why
        if re.fullmatch(rf"rank {late} came late in step 2[01] by .*, in {place}", sentence)
    ]

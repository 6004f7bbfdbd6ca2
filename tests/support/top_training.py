"""Trains a small net into the ring file RING until STOP is there, a step every few milliseconds; prints each step.

Run as `-m tests.support.top_training RING STOP NAME`; the net's class is called NAME.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import modtrace


def main() -> None:
    ring, stop, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    net = type(name, (nn.Sequential,), {})(nn.Linear(4, 4), nn.ReLU())
    with modtrace.record(engine="python", ring=ring, capacity=1 << 12) as recording:
        while not stop.exists():
            net(torch.ones(2, 4)).sum().backward()
            recording.step()
            print("step", flush=True)
            time.sleep(0.005)


if __name__ == "__main__":
    main()

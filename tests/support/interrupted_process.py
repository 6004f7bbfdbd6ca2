"""Run as a script: real signals at random moments of start, stop and training. Prints what was bad, and how many came.

Arguments: the engine, the number of signals, the name of the signal, a seed.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import modtrace

__all__ = ["main"]


class Interrupt(BaseException):
    """An interrupt that is no Exception, like KeyboardInterrupt."""


def _interrupt(*_: object) -> None:
    raise Interrupt


def _train() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None]


def _recorded(engine: Any, path: Path) -> None:
    with modtrace.record(path, engine=engine, capacity=256) as recording:
        _train()
        recording.step()
        _train()


def main(engine: Any, count: int, signal_name: str, seed: int) -> None:
    """Interrupt `count` recordings, each at a random moment of it, the first one while all is cold."""
    torch.set_num_threads(1)
    random.seed(seed)
    gradients, call = _train(), nn.Module.__call__
    # What comes while the collector calls somebody back, Python itself ignores.
    gc.collect()
    gc.disable()
    number = signal.Signals[signal_name]
    signal.signal(signal.SIGALRM, _interrupt if number == signal.SIGALRM else lambda *_: signal.raise_signal(number))
    signal.signal(number, _interrupt)
    came = bad = 0
    length_s = 0.02
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        while came < count:
            begin = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, length_s))
                _recorded(engine, path)
                signal.setitimer(signal.ITIMER_REAL, 0)
                length_s = 0.9 * length_s + 0.1 * (time.perf_counter() - begin)
            except Interrupt:
                came += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            torch.set_grad_enabled(True)  # torch's own `no_grad` can be interrupted at its end
            problems = [] if nn.Module.__call__ is call else ["torch is patched"]
            if _train() != gradients:
                problems.append("the training is harmed")
            try:
                with modtrace.record(engine=engine, capacity=256) as recording:
                    _train()
                spans = recording.timeline().spans
                if (
                    len(spans) != 6
                    or not all(span.complete for span in spans)
                    or max(span.depth for span in spans) != 1
                ):
                    problems.append(f"the next recording has {[(span.fqn, span.phase) for span in spans]}")
            except modtrace.ModtraceError as error:
                problems.append(str(error))
            bad += bool(problems)
            if problems:
                print(came, problems)
    print(f"{came} interrupts, {bad} bad")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

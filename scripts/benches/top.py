"""Whether a training notices `modtrace top`: its steps without, beside one of its ring, and beside one of another ring.

The other ring is a copy, of a recording that is over: what reading the same number of events costs a machine whose
processors and caches are shared. What is more beside the training's own ring is what reading *it* does. The three take
turns, round by round; a round's figure is the median of its steps, and their sum. Both look as often as `top` allows.
"""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import functional as F

import modtrace
from modtrace.demo import GPT
from modtrace.demo.gpt import batches, make_optimizer

SUBJECTS = ("none", "its ring", "another ring")
REFRESH_S = 0.1


@contextmanager
def looking(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `modtrace top` on a terminal that nobody reads but a thread; it is stopped until somebody lets it go on."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "modtrace", "top", str(path), "--refresh", str(REFRESH_S)]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=as_usual,
    )
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    time.sleep(5)  # it starts: Python, and its imports
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def as_usual() -> None:
    """Let a process run as others do, where this one runs before all else."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(max(0, -os.nice(0)))


def drain(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:  # the other end is closed
        return


def used_s(process: subprocess.Popen[bytes]) -> float:
    """Return the seconds of the processor that a process took."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round, for each of the three")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = GPT(layers=6, width=64)
    optimizer, data = make_optimizer(model), batches(1, 8, seed=0)

    def train(seconds: float) -> list[float]:
        """Train for some time; return what each step took, ms."""
        took, end = [], time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            tokens, targets = next(data)
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            took.append((time.perf_counter() - begin) * 1e3)
        return took

    with TemporaryDirectory() as folder:
        own, other = Path(folder, "own.modtrace"), Path(folder, "other.modtrace")
        with modtrace.record(ring=own):
            train(20)  # so long that both rings hold the events of the 10 s that top looks back
        shutil.copy(own, other)
        medians: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
        means: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
        with modtrace.record(ring=own), looking(own) as at_own, looking(other) as at_other:
            train(10)
            processes = {"its ring": at_own, "another ring": at_other}
            before = {subject: used_s(process) for subject, process in processes.items()}
            for turn in range(options.rounds):
                for subject in SUBJECTS[turn % 3 :] + SUBJECTS[: turn % 3]:
                    if subject in processes:
                        processes[subject].send_signal(signal.SIGCONT)
                    took = train(options.seconds)
                    if subject in processes:
                        processes[subject].send_signal(signal.SIGSTOP)
                    medians[subject].append(statistics.median(took))
                    means[subject].append(statistics.fmean(took))
            used = {subject: used_s(process) - before[subject] for subject, process in processes.items()}
    without = statistics.median(medians["none"])
    print(f"6-layer GPT, {options.rounds} rounds of {options.seconds} s: {without:.2f} ms a step")
    for subject in SUBJECTS[1:]:
        ratios, sums = (
            sorted(beside / alone for beside, alone in zip(values[subject], values["none"], strict=True))
            for values in (medians, means)
        )
        low, middle, high = statistics.quantiles(ratios, n=4)
        share = used[subject] / (options.rounds * options.seconds)
        print(
            f"top of {subject}: median step × {middle:.3f} (quartiles {low:.3f} to {high:.3f}), mean step × "
            f"{statistics.median(sums):.3f}; it takes {share:.2f} of a processor"
        )


if __name__ == "__main__":
    main()

"""Whether a training notices what looks on: its steps without, beside `modtrace top` of its ring, and of another ring.

The other ring is a copy, of a recording that is over: what reading the same number of events costs a machine whose
processors and caches are shared. What is more beside the training's own ring is what reading *it* does. The three take
turns, round by round; a round's figure is the median of its steps, and their sum. Both look as often as `top` allows.
With `--triggers` it is `modtrace watch` of its ring alone, with four conditions that no step meets.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import functional as F

import modtrace
from modtrace.demo import GPT, batches, make_optimizer

SUBJECTS = ("none", "its ring", "another ring")
TOP = ("top", "--refresh", "0.1")
WATCH = (
    "watch",
    *(word for condition in ("step > 100x", "gc > 9s", "data > 9s", "hang 60s") for word in ("--keep-when", condition)),
)


@contextmanager
def looking(path: Path, words: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of modtrace on a terminal that only a thread reads; it is stopped until somebody lets it go on."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "modtrace", *words, str(path)]
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
    parser.add_argument("--triggers", action="store_true", help="watch in place of top")
    options = parser.parse_args()
    words, subjects = (WATCH, SUBJECTS[:2]) if options.triggers else (TOP, SUBJECTS)
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
        medians: dict[str, list[float]] = {subject: [] for subject in subjects}
        means: dict[str, list[float]] = {subject: [] for subject in subjects}
        with modtrace.record(ring=own), ExitStack() as stack:
            rings = dict(zip(subjects[1:], (own, other), strict=False))
            processes = {subject: stack.enter_context(looking(ring, words)) for subject, ring in rings.items()}
            train(10)
            before = {subject: used_s(process) for subject, process in processes.items()}
            for turn in range(options.rounds):
                for subject in subjects[turn % len(subjects) :] + subjects[: turn % len(subjects)]:
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
    for subject in subjects[1:]:
        ratios, sums = (
            sorted(beside / alone for beside, alone in zip(values[subject], values["none"], strict=True))
            for values in (medians, means)
        )
        low, middle, high = statistics.quantiles(ratios, n=4)
        share = used[subject] / (options.rounds * options.seconds)
        print(
            f"{words[0]} of {subject}: median step × {middle:.3f} (quartiles {low:.3f} to {high:.3f}), mean step × "
            f"{statistics.median(sums):.3f}; it takes {share:.2f} of a processor"
        )


if __name__ == "__main__":
    main()

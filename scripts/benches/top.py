"""The effect of a watcher on a training: its steps without, with `modtrace top` of its ring, and of another ring.

The other ring is a copy, of a recording that has ended: reading it costs the same on a machine with shared CPUs and
caches. The additional time with the training's own ring is the effect of reading *that* ring. The three variants
alternate; the figures of a round are the median and the mean of its steps. Both rings are read as often as `top`
allows. With `--triggers`, only `modtrace watch` of the own ring runs, with four conditions that no step meets.
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
def stopped_command(path: Path, words: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of modtrace on a terminal that a thread reads, and stop it: SIGCONT lets it run."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "modtrace", *words, str(path)]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=reset_priority,
    )
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    time.sleep(5)  # until Python has started and imported modtrace
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def reset_priority() -> None:
    """Give a child process the default priority, even if this process has a higher one."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(max(0, -os.nice(0)))


def drain(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:  # the process has closed its end
        return


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round, for each variant")
    parser.add_argument("--triggers", action="store_true", help="run watch instead of top")
    options = parser.parse_args()
    words, subjects = (WATCH, SUBJECTS[:2]) if options.triggers else (TOP, SUBJECTS)
    torch.set_num_threads(1)
    model = GPT(layers=6, width=64)
    optimizer, data = make_optimizer(model), batches(1, 8, seed=0)

    def train(seconds: float) -> list[float]:
        """Train for some seconds; return the duration of each step in ms."""
        step_ms, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            tokens, targets = next(data)
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            step_ms.append((time.perf_counter() - start) * 1e3)
        return step_ms

    with TemporaryDirectory() as folder:
        own_ring, other_ring = Path(folder, "own.modtrace"), Path(folder, "other.modtrace")
        with modtrace.record(ring=own_ring):
            train(20)  # until both rings contain the events of the last 10 s, which top reads
        shutil.copy(own_ring, other_ring)
        medians: dict[str, list[float]] = {subject: [] for subject in subjects}
        means: dict[str, list[float]] = {subject: [] for subject in subjects}
        with modtrace.record(ring=own_ring), ExitStack() as stack:
            rings = dict(zip(subjects[1:], (own_ring, other_ring), strict=False))
            processes = {subject: stack.enter_context(stopped_command(ring, words)) for subject, ring in rings.items()}
            train(10)
            start_s = {subject: cpu_seconds(process) for subject, process in processes.items()}
            for turn in range(options.rounds):
                for subject in subjects[turn % len(subjects) :] + subjects[: turn % len(subjects)]:
                    if subject in processes:
                        processes[subject].send_signal(signal.SIGCONT)
                    step_ms = train(options.seconds)
                    if subject in processes:
                        processes[subject].send_signal(signal.SIGSTOP)
                    medians[subject].append(statistics.median(step_ms))
                    means[subject].append(statistics.fmean(step_ms))
            used_s = {subject: cpu_seconds(process) - start_s[subject] for subject, process in processes.items()}
    base_ms = statistics.median(medians["none"])
    print(f"6-layer GPT, {options.rounds} rounds of {options.seconds} s: {base_ms:.2f} ms a step")
    for subject in subjects[1:]:
        ratios, mean_ratios = (
            sorted(watched / without for watched, without in zip(values[subject], values["none"], strict=True))
            for values in (medians, means)
        )
        low, middle, high = statistics.quantiles(ratios, n=4)
        share = used_s[subject] / (options.rounds * options.seconds)
        print(
            f"{words[0]} of {subject}: median step × {middle:.3f} (quartiles {low:.3f} to {high:.3f}), mean step × "
            f"{statistics.median(mean_ratios):.3f}; it uses {share:.2f} of a CPU"
        )


if __name__ == "__main__":
    main()

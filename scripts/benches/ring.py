"""CPU seconds to open a full ring file, to convert it, and to print where its process is."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import modtrace
from modtrace.demo import GPT
from modtrace.live.rank_state import read_rank_state


def fill(path: Path, engine: str, capacity: int) -> None:
    """Record the demo's GPT until the ring has wrapped."""
    torch.set_num_threads(1)
    model = GPT(layers=6, width=16)
    tokens = torch.randint(0, 256, (1, 8))
    with modtrace.record(engine=engine, capacity=capacity, ring=path) as recording:  # type: ignore[arg-type]
        while True:
            for _ in range(100):
                model(tokens).sum().backward()
                recording.step()
            if recording._require_capture().ring.read().slots.overwritten:
                return


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median CPU seconds of `work`."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return sorted(times)[len(times) // 2]


def convert(path: Path, out: Path) -> None:
    modtrace.load(path).save(out)


def peak(code: str, path: Path) -> int:
    """Return the growth of a fresh process, in bytes, while it runs `code`."""
    script = (
        "import re, sys, modtrace, modtrace.read, modtrace.timeline.decode, modtrace.ring\n"
        "usage = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        f"before = usage(); {code}; print(usage() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True, text=True)
    return int(done.stdout) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| engine | spans | open | to .pftrace | to .json | where | memory to open, of the file's size |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with TemporaryDirectory() as name:
        folder = Path(name)
        for engine in ("native", "python"):
            path = folder / f"{engine}.modtrace"
            try:
                fill(path, engine, options.capacity)
            except modtrace.EngineError as error:
                print(f"no native engine: {error}", file=sys.stderr)
                continue
            figures = [
                seconds(partial(modtrace.load, path), options.rounds),
                seconds(partial(convert, path, folder / "trace.pftrace"), options.rounds),
                seconds(partial(convert, path, folder / "trace.json"), options.rounds),
                seconds(partial(read_rank_state, path), options.rounds),
            ]
            grown = peak("modtrace.load(sys.argv[1])", path) / path.stat().st_size
            figure_texts = " | ".join(f"{figure:.2f} s" for figure in figures)
            print(f"| {engine} | {len(modtrace.load(path).columns):,} | {figure_texts} | {grown:.1f} × |", flush=True)
    print(
        f"\n{options.capacity:,} events in the ring; seconds of one core, the median of {options.rounds}; "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()

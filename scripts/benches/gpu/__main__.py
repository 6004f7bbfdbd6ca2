"""Measurements that need a GPU: overhead, device times, attribution of kernels, losses.

Each part prints a table and its bounds; the program exits with 1 if a figure is out of bounds. With `--device cpu` all
parts run at a small size, to test the program: operators that call no other operator serve as kernels, and neither
overhead nor times are judged.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# Read when CUDA starts; without it cuBLAS is not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from scripts.benches.gpu import attribution, losses, overhead, times
from scripts.benches.gpu.subject import Subject

PARTS = {"losses": losses.run, "attribution": attribution.run, "times": times.run, "overhead": overhead.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"], nargs="?", default="all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of overhead, each with all subjects")
    parser.add_argument("--steps", type=int, default=10, help="steps in a timed or profiled group")
    parser.add_argument("--models", nargs="*", help="models of attribution, by part of their names; default: all")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this torch sees no GPU; --device cpu tests the program without one")
    if options.device == "cpu":
        torch.set_num_threads(1)  # several threads may split a sum differently each time, and so give other bits
    subject = Subject.of(options)
    print(subject.describe(), flush=True)
    failed = []
    for name in PARTS if options.part == "all" else [options.part]:
        print(f"\n## {name}\n", flush=True)
        start = time.monotonic()
        faults = PARTS[name](subject)
        failed += [f"{name}: {fault}" for fault in faults]
        print(f"\n{name}: {'; '.join(faults) or 'as it must be'}, after {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        sys.exit("\n".join(["", "out of bounds:", *failed]))


if __name__ == "__main__":
    main()

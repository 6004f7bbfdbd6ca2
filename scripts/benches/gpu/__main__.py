"""What can only be known on a GPU: overhead, device times, attribution of kernels, losses.

Each part prints a table and what it must show, and the program exits with 1 where something falls short. With
`--device cpu` all of it runs at a small size, to try the program: operators that call no other serve as kernels,
and neither overhead nor times are judged.
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
    parser.add_argument("--rounds", type=int, default=20, help="of overhead, each with all subjects")
    parser.add_argument("--steps", type=int, default=10, help="in a group that is timed, or profiled")
    parser.add_argument("--models", nargs="*", help="of attribution, by part of their names; default: all")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU that this torch sees; --device cpu tries the program without one")
    if options.device == "cpu":
        torch.set_num_threads(1)  # several may share a sum in another way each time: other bits without a recording too
    subject = Subject.of(options)
    print(subject.describe(), flush=True)
    failed = []
    for name in PARTS if options.part == "all" else [options.part]:
        print(f"\n## {name}\n", flush=True)
        begin = time.monotonic()
        short = PARTS[name](subject)
        failed += [f"{name}: {reason}" for reason in short]
        print(f"\n{name}: {'; '.join(short) or 'as it must be'}, after {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        sys.exit("\n".join(["", "falls short:", *failed]))


if __name__ == "__main__":
    main()

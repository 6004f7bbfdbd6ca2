"""The share of backward time that each engine puts under the right module, on small models of many architectures.

The truth comes from torch.profiler's slices of autograd nodes with their sequence numbers, and from hooks that note the
numbers that each call made; see tests/support/profiler_truth.py. Figures are shares of time. "nodes" are the autograd
nodes; "evaluated" adds the autograd engine's work for each node: checking and summing gradients. A node of no module is
right if no module's span contains it. The profiler's clock may be off by 3 µs, except in the column "exact".
"""

from __future__ import annotations

import argparse
import sys

import torch
from tests.support.models import ARCHITECTURES
from tests.support.profiler_truth import measure

import modtrace
from modtrace.record_options import EngineName

REQUIRED: dict[EngineName, float] = {"native": 0.999, "python": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", choices=list(REQUIRED), action="append", help="default: both")
    parser.add_argument("--only", nargs="*", help="names of architectures, by part")
    options = parser.parse_args()
    name_parts = [part.lower() for part in options.only or [""]]
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.steps} steps\n")
    print("| engine | model | nodes | evaluated | exact | nested | spans a step | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    short = 0
    for engine in options.engine or REQUIRED:
        for name, make in ARCHITECTURES.items():
            if not any(part in name.lower() for part in name_parts):
                continue
            torch.manual_seed(0)
            try:
                accuracy = measure(engine, make(), options.steps)
            except modtrace.EngineError as error:
                sys.exit(str(error))
            is_enough = accuracy.nodes_right >= REQUIRED[engine] and accuracy.nested == 1
            short += not is_enough
            print(
                f"| {engine} | {name} | {accuracy.nodes_right:.4f} | {accuracy.evaluated_right:.4f} |"
                f" {accuracy.exactly_right:.4f} | {accuracy.nested:.3f} | {accuracy.spans / options.steps:.0f} |"
                f" {'' if is_enough else 'short'} |",
                flush=True,
            )
    if short:
        sys.exit(f"{short} fall short")


if __name__ == "__main__":
    main()

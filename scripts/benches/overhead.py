"""The time that recording adds to a training step: µs per module call and the ratio of steps, paired and interleaved.

Every round runs all subjects once, in a rotated order, on the same model; a subject's figure is the median over the
rounds of its difference to (or ratio with) the step without tracing of the same round. A recording samples the steps
after 1, 2, 4, 8 and so on, which cost more: in a short recording that is most steps, in a long one hardly any.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker as TorchModTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.module_tracker import ModuleTracker as TorchModuleTracker

import modtrace
from modtrace.demo import GPT


@contextmanager
def empty_hooks() -> Iterator[None]:
    handles = [
        register_module_forward_pre_hook(lambda _module, _inputs: None),
        register_module_forward_hook(lambda _module, _inputs, _output: None),
    ]
    yield
    for handle in handles:
        handle.remove()


def subjects(folder: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "none": nullcontext,
        "two empty global hooks": empty_hooks,
        "torch ModuleTracker": TorchModuleTracker,
        "torch ModTracker": TorchModTracker,
        "modtrace python": lambda: modtrace.record(engine="python", capacity=1 << 16),
        "modtrace python, ring file": lambda: modtrace.record(
            engine="python", capacity=1 << 16, ring=folder / "python.modtrace"
        ),
    }
    try:
        with modtrace.record(engine="native"):
            pass
    except modtrace.EngineError as error:
        print(f"no native engine: {error}")
    else:
        contexts["modtrace native"] = lambda: modtrace.record(engine="native", capacity=1 << 16)
        contexts["modtrace native, ring file"] = lambda: modtrace.record(
            engine="native", capacity=1 << 16, ring=folder / "native.modtrace"
        )
    for name in ("ModuleTracker", "ModTracker"):
        tracker = getattr(modtrace, name, None)
        if tracker is not None:
            contexts[f"modtrace {name}"] = tracker
    return contexts


def calls_per_step(step: Callable[[], None]) -> int:
    count = 0

    def hook(_module: nn.Module, _inputs: object) -> None:
        nonlocal count
        count += 1

    handle = register_module_forward_pre_hook(hook)
    step()
    handle.remove()
    return count


def timed(step: Callable[[], None], context: AbstractContextManager[Any], steps: int) -> float:
    with context:
        step()
        best_ns = float("inf")
        for _ in range(steps):
            start_ns = time.perf_counter_ns()
            step()
            best_ns = min(best_ns, time.perf_counter_ns() - start_ns)
    return best_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=14, help="steps per subject and round; the fastest one counts")
    parser.add_argument("--only", nargs="*", help="names of subjects, by part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(layers=options.layers, width=options.width)
    tokens = torch.randint(0, 256, (1, 16))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens).sum().backward()

    calls = calls_per_step(step)
    with ExitStack() as stack:
        candidates = subjects(Path(stack.enter_context(TemporaryDirectory())))
        if options.only:
            parts = [part.lower() for part in options.only]
            candidates = {n: c for n, c in candidates.items() if n == "none" or any(p in n.lower() for p in parts)}
        names = list(candidates)
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(timed(step, candidates[name](), options.steps))
    base = times["none"]
    print(
        f"{options.layers}-layer GPT, {options.width} channels, {calls} module calls a step, "
        f"{options.rounds} rounds, torch {torch.__version__}; none: {statistics.median(base) / 1e6:.2f} ms a step"
    )
    print("| | added µs per module call | step ratio |\n| --- | --- | --- |")
    for name in names[1:]:
        added = statistics.median((t - b) / calls / 1e3 for t, b in zip(times[name], base, strict=True))
        ratio = statistics.median(t / b for t, b in zip(times[name], base, strict=True))
        print(f"| {name} | {added:.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()

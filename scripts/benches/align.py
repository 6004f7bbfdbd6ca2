"""How exactly a recording lies over torch.profiler's trace of the same steps, on the CPU, live.

Three figures for each engine and model:

- alignment error: moments that both files note and that the fit has not seen (`rec.mark` inside a record function),
  their distance from the middle of the profiler's slice;
- op time inside: of the operations and autograd nodes that the trace itself places in a module's call (by time in
  ranges that hooks open around each forward; backward by sequence number and thread), the share of their time that
  lies inside our spans of that call;
- partial overlaps of our backward spans with the profiler's `evaluate_function` slices.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.demo.gpt import GPT

NODE = "autograd::engine::evaluate_function: "
CALL = "call#"
Slice = tuple[int, int]


def with_ranges(model: nn.Module) -> nn.Module:
    """Make each forward open a range that only the profiler sees."""
    open_ranges: list[Any] = []

    def enter(*_: object) -> None:
        open_ranges.append(_RecordFunctionFast(CALL))
        open_ranges[-1].__enter__()

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
    return model


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def mlp() -> Callable[[], torch.Tensor]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64)) for _ in range(8)])
    with_ranges(model)
    x = torch.randn(32, 64)
    return lambda: model(x).square().mean()


def checkpointed() -> Callable[[], torch.Tensor]:
    blocks = [Checkpointed(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))) for _ in range(8)]
    model = nn.Sequential(*blocks)
    with_ranges(model)
    x = torch.randn(32, 64, requires_grad=True)
    return lambda: model(x).square().mean()


def gpt() -> Callable[[], torch.Tensor]:
    model = GPT(layers=4)
    with_ranges(model)
    tokens = torch.randint(0, 64, (2, 32))
    return lambda: model(tokens).float().square().mean()


MODELS = {"mlp": mlp, "mlp, checkpointed": checkpointed, "gpt": gpt}


def measure(engine: Any, make: Callable[[], Callable[[], torch.Tensor]], steps: int, folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    loss = make()
    loss().backward()
    profile, merged = folder / "profile.json", folder / "merged.json"
    with modtrace.record(engine=engine) as recording:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for step in range(steps):
                loss().backward()
                for probe in range(5):
                    with _RecordFunctionFast(name := f"probe#{step}.{probe}"):
                        recording.mark(name)
                recording.step()
    profiler.export_chrome_trace(str(profile))
    told = modtrace.merge(profile, recording.timeline(), merged)
    document = json.loads(profile.read_text())
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]
    added = json.loads(merged.read_text())["traceEvents"][len(document["traceEvents"]) :]
    ours = [e for e in added if e["ph"] == "X"]
    marks = {e["name"]: ns(e["ts"]) for e in added if e["ph"] == "i"}
    probes = [(marks[e["name"]], *extent(e)) for e in events if e["name"] in marks]
    errors = [abs(mark - (start + end) // 2) for mark, start, end in probes]
    forward = inside_forward(events, ours)
    backward = inside_backward(events, ours)
    return {
        "sync marks": told.metadata["alignment"]["marks"],
        "probes": len(errors),
        "median error ns": statistics.median(errors),
        "median probe ns": statistics.median(end - start for _, start, end in probes),
        "probes not in their span": sum(not start <= mark <= end for mark, start, end in probes),
        "forward inside %": 100 * forward[0] / forward[1],
        "backward inside %": 100 * backward[0] / backward[1],
        "partial overlaps": partial_overlaps(events, ours),
    }


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def extent(event: dict[str, Any]) -> Slice:
    start = ns(event["ts"])
    return start, start + ns(event["dur"])


def module_slices(events: list[dict[str, Any]]) -> list[Slice]:
    return sorted(extent(e) for e in events if e["name"] == CALL)


def call_slices(ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our forward and recompute spans, in start order: the n-th is the call of the n-th range."""
    return sorted((e for e in ours if e["cat"] in ("forward", "recompute")), key=lambda e: (e["ts"], -e["dur"]))


def innermost(slices: list[Slice], time: int) -> int:
    at = bisect.bisect_right(slices, (time, 1 << 62)) - 1
    while at >= 0 and slices[at][1] <= time:
        at -= 1
    return at


def overlap(a: Slice, b: Slice) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def inside_forward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int]:
    modules, calls = module_slices(events), call_slices(ours)
    assert len(modules) == len(calls), (len(modules), len(calls))
    inside = total = 0
    for event in events:
        if event["cat"] != "cpu_op" or event["name"].startswith(("probe#", "modtrace.sync#", NODE, CALL)):
            continue
        op = extent(event)
        at = innermost(modules, op[0])
        if at >= 0 and not event["args"].get("Fwd thread id"):
            inside += overlap(op, extent(calls[at]))
            total += op[1] - op[0]
    return inside, total


def inside_backward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int]:
    modules, calls = module_slices(events), call_slices(ours)
    of_call: dict[tuple[str, int], list[Slice]] = {}
    for event in ours:
        if event["cat"] == "backward":
            of_call.setdefault((event["args"]["fqn"], event["args"]["call"]), []).append(extent(event))
    makers: dict[int, int] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        args = event.get("args", {})
        if event["cat"] == "cpu_op" and "Sequence number" in args and not args.get("Fwd thread id"):
            makers[args["Sequence number"]] = ns(event["ts"])
    inside = total = 0
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if not event["name"].startswith(NODE) or number not in makers:
            continue
        at = innermost(modules, makers[number])
        if at >= 0:
            args = calls[at]["args"]
            node = extent(event)
            inside += max((overlap(node, s) for s in of_call.get((args["fqn"], args["call"]), [])), default=0)
            total += node[1] - node[0]
    return inside, total


def partial_overlaps(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> int:
    nodes = [extent(e) for e in events if e["name"].startswith(NODE)]
    found = 0
    for event in ours:
        if event["cat"] == "backward":
            start, end = extent(event)
            found += sum(s < start < e < end or start < s < end < e for s, e in nodes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.steps} steps")
    for engine in ("python", "native"):
        for name, make in MODELS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = measure(engine, make, options.steps, Path(folder))
                except modtrace.EngineError as error:
                    print(f"{engine}: {error}")
                    break
            said = ", ".join(f"{key} {value:.{3 * key.endswith('%')}f}" for key, value in found.items())
            print(f"{engine:7} {name:18} {said}")


if __name__ == "__main__":
    main()

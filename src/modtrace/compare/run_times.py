"""Typical times of each module and part of the step in a recording, and their baseline files.

A baseline is JSON with one module or part of a recording per line, so that its diffs are readable:

    {"format": "modtrace baseline", "version": 1, "recordings": [
    {"steps": 29, "warm_up": 1, "step": [time_ns, variance], "environment": {"torch": "2.13.0"}, "parts": {
    "data loading": [time_ns, variance, steps, calls, fewest_calls, most_calls],
    …}, "modules": [
    ["GPT.h.0", "Block", {"forward": [time_ns, variance, steps, calls, fewest_calls, most_calls]}],
    …
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arrays import Int64Array
from .._errors import ModtraceError
from .._files import atomic_writer, begins_with, open_regular
from ..timeline import PHASES, Timeline
from ..timeline.contents import COMPILED, COMPILED_CLASS, FUSED_TIMES, STEP_NOTES, Name, compiled_graphs
from ..timeline.memory import allocated
from ..timeline.nesting import self_times
from ..timeline.select import on_gpu, without_gpu
from ..timeline.slices import Arg
from ..timeline.summary import GroupBy, find_step_bounds, measure_steps, summarize, warm_up_steps
from ..timeline.summary.findings.noted import NotedSteps, program_facts
from ..timeline.summary.findings.occasions import period_of
from ..timeline.summary.flop_summary import FlopModule, step_flops
from ..timeline.summary.memory_summary import MemoryModule
from ..timeline.summary.overview import compiled_names
from ..timeline.summary.parts import divide_piece

Key = tuple[str, str]
"""Fully qualified name and phase; the phase is one of `SAMPLED_PHASES`."""
SAMPLED_PHASES = (*PHASES, *(f"GPU {phase}" for phase in PHASES))
MAX_STEPS = 2_000
_NO_STEP = -2
_FUSED = "fused"
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL_CLASSES = {"DistributedDataParallel", "DataParallel"}
ENVIRONMENT = (
    *("modtrace", "engine", "torch", "python", "os", "cpu", "cpus"),
    *("gpu", "gpu_driver", "cuda", "hip", "libraries"),
)
"""Keys of a recording's metadata that can explain a difference."""
MODULE_VALUE_PREFIXES = ("FLOPs of a call of ", "bytes retained by ", "shapes of a call of ")
"""Prefixes of the keys of modules' exact values: FLOPs, bytes and shapes of a call."""
INPUTS_PREFIX = "inputs of "
"""Prefix of the keys of an outermost module's inputs, which sampled steps have without `shapes=True`."""
PROGRAM_FACTS = {
    "optimizer": "optimizer",
    "hooks of gradients": "backward",
    "anomaly detection": "the step",
    "parameters": "the step",
}
"""Facts about a program, each with the part of the step, or the whole step, whose time it affects."""
EXACT_VALUE_PREFIXES = (*PROGRAM_FACTS, "FLOPs of ", "bytes held at most", INPUTS_PREFIX, *MODULE_VALUE_PREFIXES)
"""Prefixes of the keys of all exact values, which differ only if the program does."""
_MEAN_START = 0.05
"""Share of the steps, in order of their times, that the mean leaves out as the fastest."""
_MEAN_END = 0.5
"""Share of the steps, in the same order, at which the mean ends."""
_CLOCK_VARIANCE = 1e-8
"""Minimum relative variance of a time: one part in 10,000, squared."""
_HEAD = b'{"format": "modtrace baseline"'
_VERSION = 1
_MAX_BYTES = 1 << 28


class Typical(NamedTuple):
    """The mean of the faster half of a list of times, without the fastest twentieth.

    Other programs make single steps slower and none faster. That changes the faster half less than half as much as the
    median; without a disturbance, both are equally precise.
    """

    time_ns: float  # mean
    variance: float  # relative variance of the mean: 0.0001 if it is known to 1 %


class Samples(NamedTuple):
    """Times per step, of the whole steps after the warm-up; 0 for a module that was not called in a step.

    In a file of several ranks they are means over the ranks that called the module; steps are matched by number.
    """

    self_ns: Mapping[Key, Int64Array]  # by module and phase int64[steps], self times on the CPU, or on streams of GPUs
    calls: Mapping[Key, Int64Array]  # by module and phase int64[steps], number of spans
    duration_ns: Int64Array  # int64[steps], duration of the whole steps, without evaluations
    warm_up: int  # number of whole steps that were left out at the start
    classes: Mapping[str, str]  # class by module, in the order of their first calls
    parts: Mapping[str, Int64Array] = {}  # by part of the step int64[steps], see `divide_steps`: of the first process


def take_samples(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> Samples:
    """Return the samples of a recording, as of `Timeline.summary`; raises ModtraceError if no step is whole."""
    columns = timeline.columns
    on_cpu = without_gpu(timeline)
    all_steps = measure_steps(on_cpu, step_by)
    whole_steps = all_steps.take(all_steps.columns.whole)[-MAX_STEPS:]
    if not len(whole_steps):
        raise ModtraceError("a recording without whole steps cannot be compared; call recording.step() after each step")
    duration_ns = whole_steps.columns.training_ns
    warm_up = warm_up_steps(duration_ns)
    steps = whole_steps.columns.step[warm_up:]
    name_fqns = [plain_fqn(name.fqn) if by == "module" else name.module_class for name in timeline.names]
    fqns = list(dict.fromkeys(name_fqns))
    index_of = {fqn: index for index, fqn in enumerate(fqns)}
    module = np.array([index_of[fqn] for fqn in name_fqns], np.int64)
    step_of = find_step_bounds(on_cpu, step_by).of_spans(timeline)
    position = np.searchsorted(steps, step_of)
    rows = np.flatnonzero(np.append(steps, _NO_STEP)[position] == step_of)
    phase = columns.phase[rows] + len(PHASES) * on_gpu(timeline)[rows]
    row = (module[columns.name[rows]] * len(SAMPLED_PHASES) + phase) * len(steps) + position[rows]
    key_of_row, inverse = np.unique(row // len(steps), return_inverse=True)
    cell = inverse * len(steps) + row % len(steps)
    shape = (len(key_of_row), len(steps))
    # Sums of less than 2^53 ns, which is 104 days, are exact.
    total_ns = np.bincount(cell, self_times(columns)[rows], shape[0] * shape[1]).reshape(shape)
    ranks = _ranks_of(timeline, module[columns.name], len(fqns))[key_of_row // len(SAMPLED_PHASES), None]
    self_ns = np.rint(total_ns / ranks).astype(np.int64)
    # Inside a compiled region a call may be several spans, with kernels of other modules in between.
    outer = set(timeline.metadata.get(COMPILED, ()))
    is_compiled = np.array([not outer.isdisjoint(names_around(name.fqn)[1:]) for name in timeline.names] or [False])
    call = columns.take(rows)
    is_call_start = ~is_compiled[call.name]
    is_call_start[np.unique(np.stack([call.name, call.call, call.track, phase]), axis=1, return_index=True)[1]] = True
    calls = np.rint(np.bincount(cell, is_call_start, total_ns.size).reshape(shape) / ranks).astype(np.int64)
    keys = [
        (fqns[key // len(SAMPLED_PHASES)], SAMPLED_PHASES[key % len(SAMPLED_PHASES)]) for key in key_of_row.tolist()
    ]
    called, first = np.unique(columns.name, return_index=True)
    classes: dict[str, str] = {}
    for name in called[np.argsort(first)].tolist():
        classes.setdefault(name_fqns[name], timeline.names[name].module_class)
    divided = divide_piece(on_cpu, step_by)
    parts_ns = divided.ns[np.isin(divided.bounds.number, steps)]
    parts = np.flatnonzero(parts_ns.any(axis=0))
    parts = parts[np.argsort((parts_ns[:, parts] > 0).argmax(axis=0), kind="stable")]  # by their first steps
    own_ns, own_calls = dict(zip(keys, self_ns, strict=True)), dict(zip(keys, calls, strict=True))
    divide_fused(own_ns, own_calls, classes, timeline.metadata, plain_fqn if by == "module" else None)
    return Samples(
        self_ns=own_ns,
        calls=own_calls,
        duration_ns=duration_ns[warm_up:],
        warm_up=warm_up,
        classes=classes,
        parts={divided.names[part]: parts_ns[:, part] for part in parts.tolist()},
    )


def _ranks_of(timeline: Timeline, module: Int64Array, count: int) -> Int64Array:
    """Return the number of processes with spans of each of `count` modules; `module` is the module of each span."""
    distinct = dict.fromkeys(track.process for track in timeline.tracks)
    processes = {process: number for number, process in enumerate(distinct)}
    process = np.array([processes[track.process] for track in timeline.tracks] or [0], np.int64)
    pairs = np.unique(module * max(len(processes), 1) + process[timeline.columns.track])
    return np.bincount(pairs // max(len(processes), 1), minlength=count)


def divide_fused(
    self_ns: dict[Key, Int64Array],
    calls: dict[Key, Int64Array],
    classes: dict[str, str],
    metadata: Mapping[str, object],
    plain_name: Callable[[str], str] | None,
) -> None:
    """Divide the time of fused kernels among their modules, in place; among their classes without `plain_name`."""
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for fused, phase, times in _fused_times(metadata):
        share_of = shares[plain_name(fused) if plain_name else _FUSED, phase]
        for fqn, module_class, time in times:
            name = plain_name(fqn) if plain_name else module_class
            share_of[name] = share_of.get(name, 0) + time
            classes.setdefault(name, module_class)
    for (fused, cpu_phase), share_of in shares.items():
        total = math.fsum(share_of.values())
        for phase in (cpu_phase, f"GPU {cpu_phase}"):
            if (fused, phase) in self_ns and total:
                fused_ns, fused_calls = self_ns.pop((fused, phase)), calls.pop((fused, phase))
                for name, time in share_of.items():
                    share = np.rint(fused_ns * (time / total)).astype(np.int64)
                    self_ns[name, phase] = self_ns.get((name, phase), 0) + share
                    calls[name, phase] = np.maximum(calls.get((name, phase), 0), fused_calls)
    names = {name for name, _ in self_ns}
    for name in [name for name in classes if name not in names]:
        del classes[name]


def _fused_times(metadata: Mapping[str, object]) -> Iterator[tuple[str, str, list[tuple[str, str, float]]]]:
    """Yield the name and the phase of fused kernels, and the name, class and time of each of their modules."""
    for region, graph in compiled_graphs(metadata):
        paths_and_classes = (name.rpartition(": ") for name, *_ in graph.get("work", ()))
        classes = {path: module_class for path, _, module_class in paths_and_classes}
        for label, phase, times in graph.get(FUSED_TIMES, ()):
            parts = []
            for path, time in times:
                fqn = f"{region}.{path}" if path else region
                parts.append((fqn, classes.get(path) or fqn.rpartition(".")[2], max(float(time), 0.0)))
            yield f"{region}.{label}", PHASES[phase], parts


def plain_fqn(fqn: str, renamed: Mapping[str, str] | None = None) -> str:
    """Return the name without wrappers of compile, FSDP, DDP and checkpointing, after renaming."""
    parts = [part for part in fqn.split(".") if part not in _WRAPPERS]
    if parts[0] in _PARALLEL_CLASSES and parts[1:2] == ["module"]:
        del parts[1]
    return renamed_fqn(".".join(parts), renamed or {})


def renamed_fqn(fqn: str, renamed: Mapping[str, str]) -> str:
    """Return a module's name after renaming; the innermost matching entry of `renamed` wins."""
    old = next((name for name in names_around(fqn) if name in renamed), None) if renamed else None
    return fqn if old is None else renamed[old] + fqn[len(old) :]


def names_around(fqn: str) -> list[str]:
    """Return the name and the names of the modules around it, the longest first."""
    return [fqn, *(fqn[:end] for end in range(len(fqn) - 1, 0, -1) if fqn[end] == ".")]


class ModuleRun(NamedTuple):
    """A module in one phase of one recording, or a part of the step, with one call in each step that has it."""

    time: Typical  # typical time in a step with calls
    steps: int  # number of these steps
    calls: int  # median number of spans in one; inside a compiled region, of calls
    fewest_calls: int  # 5th percentile of this number
    most_calls: int  # 95th percentile of this number
    period: int = 0  # distance of the steps with calls, if all are at one distance; otherwise 0


class RunTimes(NamedTuple):
    """The measurements of one recording.

    Attributes:
        modules: times by module and phase.
        classes: class by module, in the order of the first calls.
        step: typical duration of a whole step.
        steps: number of measured steps.
        warm_up: number of steps that were left out at the start.
        environment: metadata that can explain a difference: texts by name.
        parts: times by part of the step; empty in a baseline of an earlier version.
        peak_bytes: by module or class, peak of the tensors' memory inside it, minus the memory at its start; under an
            empty name, peak of all tensors; empty if memory was not recorded.
        compiled: names of the regions that torch.compile made of modules.
        in_functions: by eager name, compiled name of a module that a compiled function calls.
        lines: program lines around time outside modules and ranges: part of the step, phrase with the lines, ns.
    """

    modules: Mapping[Key, ModuleRun]
    classes: Mapping[str, str]
    step: Typical
    steps: int
    warm_up: int
    environment: Mapping[str, str]
    parts: Mapping[str, ModuleRun] = {}
    peak_bytes: Mapping[str, int] = {}
    compiled: tuple[str, ...] = ()
    in_functions: Mapping[str, str] = {}
    lines: tuple[tuple[str, str, int], ...] = ()


def measure_run(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> RunTimes:
    """Measure a recording; arguments as in `Timeline.summary`; raises ModtraceError if no step is whole."""
    environment = {key: str(timeline.metadata[key]) for key in ENVIRONMENT if timeline.metadata.get(key)}
    exact, peak_bytes = _exact_values(timeline, by)
    notes = timeline.metadata.get(STEP_NOTES, {})
    lines = tuple((gap.part, gap.to_text(), gap.ns) for gap in NotedSteps(notes).gaps)
    regions = compiled_names(timeline) if by == "module" else {}
    environment |= program_facts(timeline.metadata) | _inputs(notes) | exact
    return measure_samples(take_samples(timeline, by, step_by), environment)._replace(
        peak_bytes=peak_bytes,
        compiled=tuple(map(plain_fqn, regions)),
        in_functions=_names_in_functions(timeline, regions),
        lines=lines,
    )


def _inputs(notes: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs of outermost modules that were the same in each of several sampled steps."""
    samples: Mapping[str, Sequence[tuple[int, str]]] = notes.get("inputs", {})
    texts = {fqn: [text for _, text in rows] for fqn, rows in samples.items()}
    return {INPUTS_PREFIX + plain_fqn(fqn): row[0] for fqn, row in texts.items() if len(row) > 1 == len({*row})}


def _names_in_functions(timeline: Timeline, regions: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return `RunTimes.in_functions`: eager names are below the calling module, or a class that no other has there."""
    names: dict[str, str] = {}
    classes = {name.fqn: name.module_class for name in timeline.names}
    for region in (region for region in regions if classes[region] == COMPILED_CLASS):
        caller = next((fqn for fqn in names_around(region)[1:] if fqn in classes), "")
        paths = dict(name.rpartition(": ")[::2] for name in regions[region])
        outermost = [path for path in paths if paths.keys().isdisjoint(names_around(path)[1:])]
        class_counts = Counter(paths[path] for path in outermost)
        for path in outermost:
            module_class = paths[path]
            if caller or class_counts[module_class] == 1:
                names[plain_fqn(f"{caller}.{path}" if caller else module_class)] = plain_fqn(f"{region}.{path}")
    return names


def _exact_values(timeline: Timeline, by: GroupBy) -> tuple[dict[str, str], dict[str, int]]:
    """Return the recorded FLOPs, bytes and shapes of a step and of each module's calls, and peaks of memory."""
    flops, peaks, shapes = step_flops(timeline), dict[str, int](), _shapes(timeline, by)
    if flops is None and not allocated(timeline.counters):
        return shapes, peaks
    summary, values = summarize(timeline, by), dict[str, int]()
    if flops is not None and summary.flops is not None:
        calls = {_name(row): row.self_flops // max(row.calls, 1) for row in summary.flops.rows}
        values = {"FLOPs of a step": flops} | {f"FLOPs of a call of {name}": count for name, count in calls.items()}
    if summary.memory is not None:
        values["bytes held at most"] = peaks[""] = summary.memory.peak_bytes
        for row in summary.memory.rows:
            if row.retained_bytes is not None:
                values[f"bytes retained by {_name(row)}"] = row.retained_bytes
            if row.peak_bytes is not None:
                peaks[_name(row)] = row.peak_bytes
    return {key: f"{value:,}" for key, value in values.items()} | shapes, peaks


def _name(module: Name | FlopModule | MemoryModule) -> str:
    """Return the name of a module in a comparison, or its class if it has no name."""
    return plain_fqn(module.fqn) if module.fqn else module.module_class


def _shapes(timeline: Timeline, by: GroupBy) -> dict[str, str]:
    """Return the input shapes of each module whose calls all have the same."""
    texts: dict[str, set[str]] = {}
    columns = timeline.columns
    shapes = columns.arg(Arg.SHAPES)
    for name_index, value in zip(columns.name[shapes.rows].tolist(), shapes.values.tolist(), strict=True):
        name = timeline.names[name_index]
        texts.setdefault(_name(name if by == "module" else name._replace(fqn="")), set()).add(shapes.text(value))
    return {f"shapes of a call of {name}": min(values) for name, values in texts.items() if len(values) == 1}


def texts_by_key(tables: Iterable[Mapping[str, str]]) -> dict[str, set[str]]:
    """Return the different texts of each key in the tables."""
    texts: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        for key, text in table.items():
            texts[key].add(text)
    return dict(texts)


def measure_samples(samples: Samples, environment: Mapping[str, str]) -> RunTimes:
    """Measure the samples of a recording, at least one step of them."""
    return RunTimes(
        modules={key: _measure(samples.self_ns[key], calls) for key, calls in samples.calls.items()},
        classes=samples.classes,
        step=typical(samples.duration_ns),
        steps=len(samples.duration_ns),
        warm_up=samples.warm_up,
        environment=environment,
        parts={part: _measure(ns, (ns > 0).astype(np.int64)) for part, ns in samples.parts.items()},
    )


def typical(times: Int64Array) -> Typical:
    """Return the mean of the faster half, without the fastest twentieth.

    It returns the variance of a trimmed mean (Tukey and McLaughlin): times outside that range are moved to its ends.
    """
    count = len(times)
    ordered = np.sort(np.maximum(times, 1)).astype(np.float64)
    first = int(_MEAN_START * count)
    last = max(math.ceil(_MEAN_END * count), first + 1)
    mean = float(ordered[first:last].mean())
    moved = np.clip(ordered, ordered[first], ordered[last - 1])
    variance = float(moved.var(ddof=1)) * count / (last - first) ** 2 if count > 1 else 0.0
    return Typical(mean, variance / mean**2 + _CLOCK_VARIANCE)


def _measure(self_ns: Int64Array, calls: Int64Array) -> ModuleRun:
    """Return the summary of a module's, or a part's, times and calls in each step."""
    in_steps = np.flatnonzero(calls)
    called = calls[in_steps]
    p5 = int(np.quantile(called, 0.05, method="lower"))
    p95 = int(np.quantile(called, 0.95, method="higher"))
    median, period = max(int(np.median(called)), 1), period_of(in_steps, np.arange(len(calls)))
    return ModuleRun(typical(self_ns[in_steps]), len(called), median, p5, p95, period)


def renamed_run(run: RunTimes, renamed: Mapping[str, str]) -> RunTimes:
    """Return the recording with renamed modules; raises ModtraceError if two would have one name."""
    new_name = {fqn: renamed_fqn(fqn, renamed) for fqn in run.classes}
    if len(set(new_name.values())) < len(new_name):
        raise ModtraceError("two modules would have one name; map each to another one")
    return run._replace(
        modules={(new_name[fqn], phase): module for (fqn, phase), module in run.modules.items()},
        classes={new_name[fqn]: module_class for fqn, module_class in run.classes.items()},
        peak_bytes={new_name.get(fqn, fqn): peak for fqn, peak in run.peak_bytes.items()},
        compiled=tuple(new_name.get(fqn, fqn) for fqn in run.compiled),
        in_functions={renamed_fqn(fqn, renamed): renamed_fqn(name, renamed) for fqn, name in run.in_functions.items()},
    )


def write_baseline(runs: Sequence[RunTimes], path: str | os.PathLike[str]) -> None:
    """Write measured recordings as JSON, a few kilobytes each: the same bytes for the same recordings."""
    recordings = ",\n".join(map(_run_to_json, runs))
    with atomic_writer(path) as file:
        file.write(_HEAD + f', "version": {_VERSION}, "recordings": [\n{recordings}\n]}}\n'.encode())


def _run_to_json(run: RunTimes) -> str:
    """Return the JSON of one recording, with a line for each module and each part of the step."""
    phases: dict[str, dict[str, list[float]]] = {fqn: {} for fqn in run.classes}
    for (fqn, phase), module in run.modules.items():
        phases[fqn][phase] = _numbers(module)
    modules = ",\n".join(json.dumps([fqn, module_class, phases[fqn]]) for fqn, module_class in run.classes.items())
    step = [*map(_digits, run.step)]
    head = {"steps": run.steps, "warm_up": run.warm_up, "step": step, "environment": dict(run.environment)}
    optional = {name: getattr(run, name) for name in ("peak_bytes", "compiled", "in_functions", "lines")}
    head |= {name: value for name, value in optional.items() if value}
    parts = ",\n".join(f"{json.dumps(part)}: {json.dumps(_numbers(times))}" for part, times in run.parts.items())
    return f'{json.dumps(head)[:-1]}, "parts": {{\n{parts}}}, "modules": [\n{modules}]}}'


def _numbers(times: ModuleRun) -> list[float]:
    counts = times[1:] if times.period else times[1:-1]
    return [*map(_digits, times.time), *counts]


def _digits(number: float) -> float:
    """Return a number rounded to six digits, since people read the file too."""
    return float(f"{number:.6g}")


def is_baseline(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts like a baseline; False if it cannot be read."""
    return begins_with(path, _HEAD)


def read_baseline(path: str | os.PathLike[str]) -> list[RunTimes]:
    """Read a file of `write_baseline`; raises ModtraceError if this version cannot."""
    name = os.fspath(path)
    try:
        if os.path.getsize(name) > _MAX_BYTES:
            raise ModtraceError(f"{name}: too large for a baseline; 'modtrace diff --save-baseline' writes one")
        with open_regular(name) as file:
            values = json.load(file)
        if values["version"] != _VERSION:
            raise ModtraceError(f"{name}: a baseline of version {values['version']!r}; this modtrace reads {_VERSION}")
        runs = [_run_from(run) for run in values["recordings"]]
    except OSError as error:
        raise ModtraceError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModtraceError(
            f"{name}: a damaged baseline ({error}); 'modtrace diff --save-baseline' writes one"
        ) from error
    if not runs:
        raise ModtraceError(f"{name}: the baseline has no recording; 'modtrace diff --save-baseline' writes one")
    return runs


def _run_from(values: Mapping[str, Any]) -> RunTimes:
    """Return the recording with the given JSON values; raises ValueError and the like if they are damaged."""
    modules: dict[Key, ModuleRun] = {}
    classes: dict[str, str] = {}
    steps = _number("steps", values["steps"], 1)
    for fqn, module_class, phases in values["modules"]:
        classes[str(fqn)] = str(module_class)
        for phase, numbers in phases.items():
            if phase not in SAMPLED_PHASES:
                raise ValueError(f"{fqn}: there is no phase {phase!r}")
            modules[str(fqn), phase] = _module_run(f"{fqn} {phase}", numbers, int(steps))
    parts = {str(part): _module_run(part, numbers, int(steps)) for part, numbers in values.get("parts", {}).items()}
    environment = {str(key): str(text) for key, text in values["environment"].items()}
    step = _typical("step", *values["step"])
    warm_up = int(_number("warm_up", values["warm_up"], 0))
    peak_bytes = {str(fqn): int(_number("peak_bytes", peak, 0)) for fqn, peak in values.get("peak_bytes", {}).items()}
    compiled = tuple(str(fqn) for fqn in values.get("compiled", ()))
    inner = {str(fqn): str(name) for fqn, name in values.get("in_functions", {}).items()}
    lines = tuple((str(part), str(where), int(_number("lines", ns, 0))) for part, where, ns in values.get("lines", ()))
    return RunTimes(modules, classes, step, int(steps), warm_up, environment, parts, peak_bytes, compiled, inner, lines)


def _module_run(field: str, numbers: Sequence[Any], steps: int) -> ModuleRun:
    time_ns, variance, *counts = numbers
    called, calls, fewest_calls, most_calls = (int(_number(field, count, 1)) for count in counts[:4])
    period = int(_number(field, counts[4], 0)) if len(counts) > 4 else 0
    return ModuleRun(_typical(field, time_ns, variance), min(called, steps), calls, fewest_calls, most_calls, period)


def _typical(field: str, time_ns: object, variance: object) -> Typical:
    return Typical(_number(field, time_ns, 1), _number(field, variance, 0, 1e6))


def _number(field: str, value: object, minimum: float, maximum: float = 2.0**63) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{field}: not a number from {minimum:g} to {maximum:g}")
    return float(value)

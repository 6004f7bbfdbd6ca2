"""The share of injected changes that `modtrace diff` finds, and its false reports, compared with the usual methods.

Three small models are recorded for 30 steps; each process records a model without and with each change
(_recorded_changes.py). A side of a comparison has one recording of each of 1, 5, 12 or 20 processes. The processes of
the two sides alternate; a random draw assigns two neighbours to the sides. Comparisons of one change share recordings.

Then a GPT does other work, such as a batch twice as large, or runs with other busy processes. A comparison is wrong if
it calls a module slower or faster that does the same work by its closed form, or faster if it does more. A stopwatch's
ratios for the step and for the optimizer are printed too.

Then there are synthetic recordings, of 80 modules and phases, with five kinds of noise; and the cost of a comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scripts.benches._recorded_changes import PLACES, UNCHANGED, WORK, slow_changes
from scripts.benches._usual_ways import changed, mean_per_name, totals_per_slice
from tests.support.timelines import gpt2_timeline

import modtrace
from modtrace.compare.compare import compare_runs
from modtrace.compare.run_times import RunTimes, Samples, measure_run, measure_samples
from modtrace.compare.verdicts import Change

PER_SIDE = (1, 5, 12, 20)
SLOWER_OR_FASTER = {"slower", "faster"}


class Measured(NamedTuple):
    """One recording, as measured by each method."""

    run: RunTimes
    means: Mapping[str, float]
    totals: Mapping[str, float]
    label_of: Mapping[str, str]


class Verdicts(NamedTuple):
    """For each method: whether it was right, and whether it called anything else changed."""

    right: tuple[bool, bool, bool]
    wrong: tuple[bool, bool, bool]


@cache
def measured(path: Path) -> Measured:
    timeline = modtrace.load(path)
    labels = {name.fqn: name.label for name in timeline.names}
    return Measured(measure_run(timeline), mean_per_name(timeline), totals_per_slice(timeline), labels)


def sides(
    folder: Path, architecture: str, before: Sequence[str], after: Sequence[str], per_side: int, draw: random.Random
) -> tuple[list[Measured], list[Measured]]:
    """Draw the recordings of a comparison: one of two neighbouring processes is before, the other after."""
    processes = sorted(int(path.name) for path in (folder / architecture).iterdir() if path.name.isdecimal())
    first = draw.randrange(len(processes) - 2 * per_side + 1)
    base, new = [], []
    for number in range(first, first + 2 * per_side, 2):
        pair = draw.sample(processes[number : number + 2], 2)
        base.append(measured(folder / architecture / str(pair[0]) / f"{draw.choice(before)}.pftrace"))
        new.append(measured(folder / architecture / str(pair[1]) / f"{draw.choice(after)}.pftrace"))
    return base, new


def judge(change: str, architecture: str, base: Sequence[Measured], new: Sequence[Measured]) -> Verdicts:
    """Return whether each method names the changed module first, and whether it names anything else."""
    comparison = compare_runs([recording.run for recording in base], [recording.run for recording in new], {})
    means = changed([recording.means for recording in base], [recording.means for recording in new])
    totals = changed([recording.totals for recording in base], [recording.totals for recording in new])
    different = [row for row in comparison.changes if row.verdict in SLOWER_OR_FASTER]
    ours = [f"{row.fqn} {row.phase}" for row in different]
    places = PLACES[architecture]
    if change in UNCHANGED:
        is_changed = bool(different) or comparison.step.verdict not in ("cannot tell", "same")
        return Verdicts((not is_changed, not means, not totals), (is_changed, bool(means), bool(totals)))
    if change.startswith("slow"):
        _, _, phase, path = change.split("_", 3)
        fqn = f"{architecture}.{path}"
        label, truth = new[0].label_of[fqn], f"{fqn} {phase}"
        first = [names[:1] == [right] for names, right in ((ours, truth), (means, truth), (totals, label))]
        parents = {f"{architecture}.{path[:end]}"[:-1] for end in range(len(path)) if end and path[end - 1] == "."}
        allowed = {truth, label, *(f"{outer} {phase}" for outer in (*parents, architecture))}
        return Verdicts(
            (first[0], first[1], first[2]),
            (any(name != truth for name in ours), not set(means) <= allowed, not set(totals) <= allowed),
        )
    if change == "swap_b":
        faster, slower = pair = [f"{architecture}.{path} forward" for path in places.swap]
        verdicts = {f"{row.fqn} {row.phase}": row.verdict for row in different}
        right = verdicts.get(faster) == "faster" and verdicts.get(slower) == "slower"
        labels = {new[0].label_of[f"{architecture}.{path}"] for path in places.swap}
        return Verdicts(
            (right and set(ours[:2]) == {*pair}, set(means[:2]) == {*pair}, set(totals[:2]) == labels),
            (len(ours) > 2, len(means) > 2, len(totals) > 2),
        )
    return judge_structure(change, architecture, new[0].label_of, (comparison, different), means, totals)


def judge_structure(
    change: str,
    architecture: str,
    label_of: Mapping[str, str],
    ours: tuple[modtrace.Diff, Sequence[Change]],
    means: Sequence[str],
    totals: Sequence[str],
) -> Verdicts:
    """Return the verdicts for a changed structure; a change of the parent module is not an error."""
    places, (comparison, different) = PLACES[architecture], ours
    path, parent, phase = {
        "twice": (*places.twice, "forward"),
        "recompute": (places.recompute, places.recompute.rpartition(".")[0], "recompute"),
        "rename": (f"{places.rename[0]}.{places.rename[2]}", places.rename[0], "forward"),
    }[change]
    fqn, outer, top = f"{architecture}.{path}", f"{architecture}.{parent}", comparison.changes[0]
    if change == "rename":
        right = comparison.suggested == {f"{outer}.{places.rename[1]}": fqn}
    else:
        right = top.calls_changed and top.fqn.startswith(fqn) and top.phase == phase
    return Verdicts(
        (right, means[:1] == [f"{fqn} {phase}"], totals[:1] == [label_of[fqn]]),
        (
            any(not row.fqn.startswith(outer) for row in different),
            any(not name.startswith(outer) for name in means),
            len(totals) > 1,
        ),
    )


def judge_recordings(folder: Path, comparisons: int, seed: int, only: Sequence[str]) -> None:
    """Print the share of comparisons in which each method is right, and in which it calls something else changed."""
    draw = random.Random(seed)
    kinds: dict[str, list[tuple[str, str]]] = {"A/A": [(name, UNCHANGED[0]) for name in PLACES]}
    for architecture, places in PLACES.items():
        for slow in slow_changes(places):
            kinds.setdefault(f"{slow.factor:.0%} slower", []).append((architecture, slow.name))
        for change in ("twice", "recompute", "rename", "swap_b"):
            kinds.setdefault(change, []).append((architecture, change))
    print("| change | a side | comparisons | diff: right | others | means: right | others | totals: right | others |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, changes in kinds.items():
        if only and kind not in only:
            continue
        for per_side in PER_SIDE:
            repetitions = max(comparisons // len(changes), 1) + (kind == "A/A")
            verdicts = []
            for architecture, change in changes:
                before = ["swap_a"] if change == "swap_b" else UNCHANGED
                after = UNCHANGED if kind == "A/A" else [change]
                for _ in range(repetitions):
                    base, new = sides(folder, architecture, before, after, per_side, draw)
                    verdicts.append(judge(change, architecture, base, new))
            shares = [
                f"{np.mean([getattr(verdict, field)[method] for verdict in verdicts]):.1%}"
                for method in range(3)
                for field in ("right", "wrong")
            ]
            print(f"| {kind} | {per_side} | {len(verdicts)} | {' | '.join(shares)} |", flush=True)


def judge_work(folder: Path, comparisons: int, seed: int, per_side: int = 6) -> None:
    """Print the number of wrong comparisons, and the ratios of diff and of a stopwatch."""
    draw, numbers = random.Random(seed), sorted(path.name for path in (folder / "WORK").iterdir())
    per_side = min(per_side, len(numbers) // 2)
    print(f"\n| work, {per_side} a side | wrong | modules in general | whose change | stopwatch: step | optimizer |")
    print("| --- | --- | --- | --- | --- | --- |")
    for change in [*WORK][1:]:
        for flops in ("", ", FLOPs"):
            wrong, ratios, causes, stopwatch_ratios = 0, [], dict[str, int](), []
            for _ in range(comparisons):
                sample = draw.sample(numbers, 2 * per_side)
                sides = (f"as it is{flops}", sample[::2]), (f"{change.replace('/', 'by')}{flops}", sample[1::2])
                (base, base_ns), (new, new_ns) = (
                    _work_recorded([folder / "WORK" / number / name for number in side]) for name, side in sides
                )
                comparison = compare_runs(base, new, {})
                rows = [row for row in (*comparison.changes, *comparison.parts) if row.verdict in SLOWER_OR_FASTER]
                wrong += any(is_wrong(change, row) for row in rows)
                ratios.append(comparison.common_ratio)
                causes[comparison.common_cause] = causes.get(comparison.common_cause, 0) + 1
                stopwatch_ratios.append(new_ns / base_ns)
            cause_counts = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
            step, optimizer = np.median(stopwatch_ratios, axis=0)
            figures = f"× {np.median(ratios):.2f} | {cause_counts} | × {step:.2f} | × {optimizer:.2f}"
            print(f"| {change}{flops} | {wrong} of {comparisons} | {figures} |", flush=True)


def _work_recorded(paths: Sequence[Path]) -> tuple[list[RunTimes], np.ndarray]:
    """Return recordings, and the means of their stopwatch's times in ns: of the step, and of the optimizer."""
    stopwatches = [json.loads(path.with_name(f"{path.name}.json").read_text()) for path in paths]
    mean_ns = np.mean([[times["step"], times["optimizer"]] for times in stopwatches], axis=0)
    return [measured(path.with_name(f"{path.name}.pftrace")).run for path in paths], mean_ns


def is_wrong(change: str, row: Change) -> bool:
    """Return whether a row with the same work is called changed, or a row changes opposite to its work.

    The optimizer's work is the same for any batch; the position embedding has no batch, and a Sequential has no work.
    """
    if WORK[change]._replace(busy=False) == WORK["as it is"]:
        return True
    if row.phase == "part":
        return row.fqn == "optimizer"
    if change in {"2 micro-batches", "layers twice", "bfloat16"}:
        does_more = row.fqn == "GPT" or ".h." in row.fqn or change == "2 micro-batches"
        return change != "bfloat16" and (row.verdict == "faster" or not does_more)
    is_same = row.fqn.endswith(".mlp") or (row.fqn == "GPT.wpe" and change != "sequence x 2")
    return is_same or row.verdict == ("slower" if change == "batch / 2" else "faster")


def synthetic_run(kind: str, random_: np.random.Generator, typical_ns: np.ndarray) -> RunTimes:
    """Return a recording of 30 steps: 3 % noise in each module and step, 1 % between recordings, and `kind`'s noise."""
    modules, steps = len(typical_ns), 30
    logs = random_.normal(0, 0.03, (modules, steps)) + random_.normal(0, 0.01, (modules, 1))
    if kind == "AR(1)":
        speed = random_.normal(0, 0.05, steps)
        for step in range(1, steps):
            speed[step] = 0.9 * speed[step - 1] + (1 - 0.9**2) ** 0.5 * speed[step]
        logs += speed
    elif kind == "jumps":
        logs += random_.normal(0, 0.1) + random_.normal(0, 0.15) * (np.arange(steps) > random_.integers(steps))
    elif kind == "heavy tails":
        logs += (random_.random((modules, steps)) < 0.15) * np.minimum(random_.pareto(1.5, (modules, steps)), 10)
    elif kind == "by size":
        # Small modules differ by up to 10 % more between recordings, and change together.
        small = np.clip(1e6 / typical_ns, 1, 50)[:, None]
        logs += random_.normal(0, 1, (modules, 1)) * 0.014 * np.sqrt(small - 1)
        logs += random_.normal(0, 0.03) * (typical_ns < 5e4)[:, None]
    times = np.maximum(np.exp(logs) * typical_ns[:, None], 1).astype(np.int64)
    keys = [(f"Net.{number // 2}", ("forward", "backward")[number % 2]) for number in range(modules)]
    calls = np.ones(steps, np.int64)
    classes = {fqn: "Layer" for fqn, _ in keys}
    samples = Samples(dict(zip(keys, times, strict=True)), dict.fromkeys(keys, calls), times.sum(axis=0), 0, classes)
    return measure_samples(samples, {})


def judge_synthetic(comparisons: int) -> None:
    random_ = np.random.default_rng(0)
    print("\n| noise | a side | A/A: anything changed | 10 % slower: first | others | large × 8: found | others |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("quiet", "AR(1)", "jumps", "heavy tails", "by size"):
        for per_side in PER_SIDE:
            has_changes, is_first, has_others, is_found, has_false = [], [], [], [], []
            for _ in range(comparisons):
                typical_ns = np.exp(random_.uniform(np.log(2e4), np.log(2e6), 80))
                if kind == "by size":
                    typical_ns[7] = 1e6
                slower = typical_ns * np.where(np.arange(80) == 7, 1.1, 1.0)
                # A module with 70 % of the step, forward and backward.
                is_large = np.isin(np.arange(80), (20, 21))
                large = np.where(is_large, typical_ns[~is_large].sum() * 7 / 6, typical_ns)
                base, same, new, large_base, large_new = (
                    [synthetic_run(kind, random_, times) for _ in range(per_side)]
                    for times in (typical_ns, typical_ns, slower, large, np.where(is_large, 8 * large, large))
                )
                reported = {
                    (row.fqn, row.phase, row.verdict)
                    for row in compare_runs(large_base, large_new, {}).changes
                    if row.verdict in SLOWER_OR_FASTER
                }
                truth = {("Net.10", phase, "slower") for phase in ("forward", "backward")}
                is_found.append(truth <= reported)
                has_false.append(bool(reported - truth))
                equal, slowed = compare_runs(base, same, {}), compare_runs(base, new, {})
                has_changes.append(any(row.verdict in SLOWER_OR_FASTER for row in (equal.step, *equal.changes)))
                names = [(row.fqn, row.phase) for row in slowed.changes if row.verdict in SLOWER_OR_FASTER]
                is_first.append(names[:1] == [("Net.3", "backward")])
                has_others.append(any(name != ("Net.3", "backward") for name in names))
            columns = (has_changes, is_first, has_others, is_found, has_false)
            shares = " | ".join(f"{np.mean(column):.1%}" for column in columns)
            print(f"| {kind} | {per_side} | {shares} |", flush=True)


def cost(spans: int, folder: Path) -> None:
    """Print the cost of comparing two files, in a fresh process."""
    paths = [folder / "base.pftrace", folder / "new.pftrace"]
    for seed, path in enumerate(paths):
        gpt2_timeline(spans, seed=seed).save(path)
    process = subprocess.run([sys.executable, __file__, "--cost-of", *map(str, paths)], check=True, capture_output=True)
    print(f"\n{spans:,} spans a side: {process.stdout.decode().strip()}")


def print_cost(paths: Sequence[str]) -> None:
    start_s = time.perf_counter()
    timelines = [modtrace.load(path) for path in paths]
    loaded_s = time.perf_counter()
    loaded_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    modtrace.diff(*timelines)
    compared_s = time.perf_counter()
    compared_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    columns = sum(timeline.columns.nbytes for timeline in timelines)
    print(
        f"reading {loaded_s - start_s:.1f} s, comparing {compared_s - loaded_s:.1f} s; columns {columns >> 20} MiB, "
        f"peak memory while reading {loaded_kib >> 10} MiB, {compared_kib - loaded_kib >> 10} MiB more while comparing"
    )


def record(folder: Path, processes: int, only: Sequence[str]) -> None:
    script = Path(__file__).with_name("_recorded_changes.py")
    architectures = ["WORK"] if only == ["work"] else [*PLACES, "WORK"]
    for number, architecture in _turns(processes, architectures):
        target = folder / architecture / str(number)
        if not target.exists():
            subprocess.run([sys.executable, str(script), architecture, str(number), str(target)], check=True)


def _turns(processes: int, architectures: Sequence[str]) -> Iterator[tuple[int, str]]:
    return ((number, architecture) for number in range(processes) for architecture in architectures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep recordings here, and use existing ones")
    parser.add_argument("--processes", type=int, default=42)
    parser.add_argument("--comparisons", type=int, default=200, help="for each change and number of recordings")
    parser.add_argument("--spans", type=int, default=1_000_000, help="spans on each side, for the cost")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="CHANGE", help="changes named in the table, or work; default: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost-of", nargs=2, metavar="TRACE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost_of:
        print_cost(options.cost_of)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "recordings"
        record(folder, options.processes, options.only)
        judge_recordings(folder, options.comparisons, options.seed, options.only)
        if not options.only or "work" in options.only:
            judge_work(folder, options.comparisons // 10, options.seed)
        judge_synthetic(options.comparisons)
        if options.spans:
            cost(options.spans, Path(temporary))


if __name__ == "__main__":
    main()

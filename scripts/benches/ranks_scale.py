"""Late ranks in jobs with known culprits: small jobs of each parallelism, and large ones packed as a dataset.

A real job of two ranks on gloo is recorded for each parallelism; `tests/support/made_job` makes jobs of many ranks from
it, with clock offsets and drift, noise, and slow modules on some ranks. Answers are compared with these. Two usual
methods are scored too, by SQL over the same dataset: in each step they name the rank and the module whose duration, or
whose self time, exceeds the median of the ranks most.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.made_job import Culprit, MadeJob, Template, read_template
from tests.support.ranks_job import MICRO_BATCHES, SPENT

from modtrace.ranks import find_rank_recordings
from modtrace.ranks.dataset_tables import DatasetTables, query
from modtrace.ranks.pack import pack
from modtrace.ranks.slow import find_slow_ranks

MS = 1_000_000
KINDS = ("ddp", "fsdp", "tp")
PIPELINES = ("gpipe", "1f1b")
USUAL = """
    WITH total AS (SELECT step, rank, fqn, phase, sum({column}) AS ns FROM spans GROUP BY ALL),
    usual AS (SELECT step, fqn, phase, median(ns) AS ns FROM total GROUP BY ALL)
    SELECT step, arg_max(total.rank, total.ns - usual.ns) AS rank,
    arg_max(fqn || ' ' || phase, total.ns - usual.ns) AS what
    FROM total JOIN usual USING (step, fqn, phase) GROUP BY step ORDER BY step
"""


def run_ranks(folder: Path, kind: str, ranks: int, layers: int, steps: int, *culprit: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.ranks_job"]
    arguments = (folder, kind, layers, steps, *culprit)
    processes = [subprocess.Popen([*command, str(rank), str(ranks), *map(str, arguments)]) for rank in range(ranks)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a rank has failed")


def templates(folder: Path, layers: int) -> dict[str, Template]:
    by_kind = {}
    for kind in KINDS:
        kind_folder = folder / f"{kind}-{layers}"
        kind_folder.mkdir()
        run_ranks(kind_folder, kind, 2, layers, 12)
        by_kind[kind] = read_template(kind_folder / "1.modtrace")
    return by_kind


def leaves(template: Template, phase: str) -> list[str]:
    return [fqn for fqn in template.modules(phase) if fqn.endswith(("up", "down"))]


def command(*arguments: object) -> tuple[str, float, float]:
    """Run modtrace; return its output, the seconds, and the largest memory of a process in MB."""
    start = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "modtrace", "ranks", *map(str, arguments)], stdout=subprocess.PIPE, check=True, text=True
    )
    return process.stdout, time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def is_right(step: dict[str, Any], culprits: list[Culprit]) -> bool:
    """Return whether a step's answer names the culprit with the largest delay in that step, and its module."""
    active = [culprit for culprit in culprits if step["step"] % culprit.every == 0]
    if not active:
        return bool(step["verdict"] != "late")
    worst = max(active, key=lambda culprit: culprit.extra_ns)
    if step["verdict"] != "late" or step["rank"] != worst.rank or not step["modules"]:
        return False
    first = step["modules"][0]
    return bool((first["fqn"], first["phase"]) == (worst.fqn, worst.phase))


def usual_right(dataset: Path, column: str, culprits: list[Culprit]) -> tuple[int, int]:
    """Return the numbers of steps in which a usual method names the rank, and the rank and the module."""
    rows = query(dataset, USUAL.format(column=column)).to_pylist()[1:]
    worst = max(culprits, key=lambda culprit: culprit.extra_ns)
    rank = sum(row["rank"] == worst.rank for row in rows)
    both = sum(row["rank"] == worst.rank and row["what"] == f"{worst.fqn} {worst.phase}" for row in rows)
    return rank, both


def measure_accuracy(folder: Path, steps: int, layers: int) -> None:
    print(
        "job, ranks, phase, ms: steps that name rank and module; cost, relative to the delay; usual method: rank, both"
    )
    for kind, template in templates(folder, layers).items():
        for ranks in (2, 4, 16):
            balanced = slow_of(folder, MadeJob(template, ranks, steps))
            slow_ranks = [rank["rank"] for rank in balanced["late_ranks"] if rank["is_slow"]]
            late = sum(step["verdict"] == "late" for step in balanced["steps"])
            print(
                f"{kind:6} {ranks:5} balanced       late in {late} of {steps} steps, slow: {slow_ranks or 'none'}",
                flush=True,
            )
            for phase in ("forward", "backward"):
                modules = leaves(template, phase)
                # The ranks of the largest job are on two hosts, with a clock uncertainty of a third of the delay.
                for milliseconds in (1, 5, 50):
                    culprit = Culprit(ranks - 1, modules[len(modules) // 2], phase, milliseconds * MS)
                    dataset = folder / "dataset"
                    job = MadeJob(template, ranks, steps, [culprit], bound_ns=culprit.extra_ns // 3)
                    answer = slow_of(folder, job, dataset)
                    judged = answer["steps"][1:]
                    right = [step for step in judged if is_right(step, [culprit])]
                    costs = sorted(step["cost_ns"] / culprit.extra_ns for step in right) or [0.0]
                    near = sum(abs(cost - 1) <= 0.2 for cost in costs)
                    by_duration, by_self = (
                        usual_right(dataset, f"{column}_ns", [culprit]) for column in ("duration", "self")
                    )
                    print(
                        f"{kind:6} {ranks:5} {phase:8} {milliseconds:4}  {len(right)}/{len(judged)}  {costs[0]:.2f} to "
                        f"{costs[-1]:.2f}, within 20 %: {near}; by durations {by_duration}, self times {by_self}",
                        flush=True,
                    )


def slow_of(folder: Path, job: MadeJob, dataset: Path | None = None) -> dict[str, Any]:
    rings = folder / "rings"
    shutil.rmtree(rings, ignore_errors=True)
    rings.mkdir()
    job.write(rings)
    if dataset is not None:
        shutil.rmtree(dataset, ignore_errors=True)
        pack(find_rank_recordings(rings), dataset, processes=1)
    return find_slow_ranks(rings).to_dict()


def measure_scale(folder: Path, ranks: int, steps: int, layers: int, kind: str) -> None:
    template = templates(folder, layers)[kind]
    forward, backward = (leaves(template, phase) for phase in ("forward", "backward"))
    culprits = [
        Culprit(ranks // 3, forward[len(forward) // 2], "forward", 8 * MS, every=3),
        Culprit(ranks // 2, backward[len(backward) // 3], "backward", 5 * MS),
        Culprit(ranks - 2, forward[1], "forward", 20 * MS, every=7),
    ]
    rings, dataset = folder / "rings", folder / "dataset"
    rings.mkdir()
    start = time.perf_counter()
    MadeJob(template, ranks, steps, culprits).write(rings)
    size = sum(path.stat().st_size for path in rings.iterdir())
    seconds = time.perf_counter() - start
    print(f"{ranks:,} ranks × {steps} steps of {kind}: rings of {size / 1e9:.2f} GB in {seconds:.0f} s", flush=True)
    _, seconds, memory = command("pack", rings, "-o", dataset)
    spans = sum(rank.spans for rank in DatasetTables(dataset).ranks)
    nbytes = sum(path.stat().st_size for path in (dataset / "spans").iterdir())
    collective_bytes = sum(path.stat().st_size for path in (dataset / "collectives").iterdir())
    print(
        f"pack: {seconds:.0f} s, largest process {memory:,.0f} MB; {spans:,} spans, {nbytes / spans:.2f} bytes each; "
        f"collectives {collective_bytes / 1e6:,.0f} MB",
        flush=True,
    )
    text, seconds, memory = command("slow", dataset, "--format", "json")
    answer = json.loads(text)
    judged = answer["steps"][1:]
    right = sum(is_right(step, culprits) for step in judged)
    print(f"slow: {seconds:.1f} s, largest process so far {memory:,.0f} MB; right in {right} of {len(judged)} steps")
    for rank in answer["late_ranks"][:4]:
        module = rank["modules"][0]
        print(
            f"  rank {rank['rank']}: {rank['steps']} steps, {rank['cost_ns'] / 1e6 / rank['steps']:.2f} ms each, "
            f"{module['fqn']} {module['phase']}, {'slow' if rank['is_slow'] else 'now and then'}"
        )
    print(
        "  injected:",
        *(f"rank {c.rank} {c.fqn} {c.phase} {c.extra_ns / 1e6:g} ms every {c.every};" for c in culprits),
    )
    _, seconds, _ = command("query", dataset, "SELECT count(*), avg(self_ns) FROM spans WHERE step BETWEEN 40 AND 41")
    print(f"query of two steps: {seconds:.2f} s", flush=True)


def measure_live(folder: Path, steps: int, ranks: int) -> None:
    """Run real ranks on this machine, which must be idle: balanced jobs, then jobs with a delay in a module."""
    print(
        "job, ranks, module: steps that name rank and module, those with a cost within 20 % of the injected delay, and "
        "of the measured delay; the same for steps with a delay of at least 3 times the usual variation; usual method: "
        "rank, both"
    )
    delays: list[tuple[str, str, int]] = [("", "", 0)]
    delays += [(*kind, ms) for kind in (("forward", "sleep"), ("backward", "busy")) for ms in (1, 5, 50)]
    for kind in (*KINDS, *PIPELINES):
        for phase, how, milliseconds in delays:
            job = folder / f"live-{kind}-{ranks}-{phase}-{milliseconds}"
            job.mkdir()
            name = f"{4 * (ranks - 1) + 2 if kind in PIPELINES else 2}.up"
            run_ranks(job, kind, ranks, 4, steps, *((ranks - 1, name, phase, milliseconds, how) if phase else ()))
            answer = json.loads(command("slow", job, "--format", "json")[0])
            judged = answer["steps"][1:-1]  # the last step contains a barrier
            slow = [rank["rank"] for rank in answer["late_ranks"] if rank["is_slow"]]
            if not phase:
                late = sum(step["verdict"] == "late" for step in judged)
                print(f"{kind:5} {ranks} balanced: slow {slow}, late {late} of {len(judged)}", flush=True)
                continue
            culprit = Culprit(ranks - 1, f"Sequential.{name}", phase, milliseconds * MS)
            delay_ns = milliseconds * MS * (MICRO_BATCHES if kind in PIPELINES else 1)
            spent = json.loads((job / SPENT).read_text())
            large = [step for step in judged if delay_ns >= 3 * max(step["noise_ns"], step["bound_ns"])]
            pack(find_rank_recordings(job), job / "dataset", processes=1)
            by_duration, by_self = (
                usual_right(job / "dataset", f"{column}_ns", [culprit]) for column in ("duration", "self")
            )
            print(
                f"{kind:5} {ranks} {phase:8} {how:5} {milliseconds:2} ms: {score(judged, culprit, delay_ns, spent)}; "
                f"of those {score(large, culprit, delay_ns, spent)}; slow: {slow}; by durations {by_duration}, "
                f"by self times {by_self}",
                flush=True,
            )


def score(steps: list[dict[str, Any]], culprit: Culprit, delay_ns: int, spent: list[int]) -> str:
    right = [step for step in steps if is_right(step, [culprit])]
    near = sum(abs(step["cost_ns"] / delay_ns - 1) <= 0.2 for step in right)
    near_spent = sum(abs(step["cost_ns"] / spent[step["step"]] - 1) <= 0.2 for step in right)
    return f"right {len(right)} of {len(steps)}, cost {near}, {near_spent}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("accuracy", "scale", "live"))
    parser.add_argument("--ranks", type=int, help="default: 1000; for live 2; at most the number of CPUs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--folder", type=Path, help="folder with enough space; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modtrace-ranks-", dir=options.folder) as name:
        if options.task == "accuracy":
            measure_accuracy(Path(name), min(options.steps, 20), 4)
        elif options.task == "live":
            measure_live(Path(name), options.steps, options.ranks or 2)
        else:
            measure_scale(Path(name), options.ranks or 1000, options.steps, options.layers, options.kind)


if __name__ == "__main__":
    main()

"""Who is late, of jobs with known culprits: small ones of each parallelism, and large ones packed as a dataset.

A real job of two ranks on gloo is recorded for each parallelism; `tests/support/made_job` makes jobs of many ranks of
it, with clocks that are apart and drift, noise, and modules that are slow on some ranks. Answers are compared with
these. Two usual ways are scored beside it, over the same dataset, by SQL: per step the rank and module whose duration,
or whose self time, exceeds the median of the ranks by most.
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
        own = folder / f"{kind}-{layers}"
        own.mkdir()
        run_ranks(own, kind, 2, layers, 12)
        by_kind[kind] = read_template(own / "1.modtrace")
    return by_kind


def leaves(template: Template, phase: str) -> list[str]:
    return [fqn for fqn in template.modules(phase) if fqn.endswith(("up", "down"))]


def command(*arguments: object) -> tuple[str, float, float]:
    """Run modtrace; return what it prints, the seconds, and the largest memory of a process in MB."""
    before = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "modtrace", "ranks", *map(str, arguments)], stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout, time.perf_counter() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def is_right(step: dict[str, Any], culprits: list[Culprit]) -> bool:
    """Whether a step names the culprit that cost most in it, and its module."""
    acting = [culprit for culprit in culprits if step["step"] % culprit.every == 0]
    if not acting:
        return bool(step["verdict"] != "late")
    worst = max(acting, key=lambda culprit: culprit.extra_ns)
    if step["verdict"] != "late" or step["rank"] != worst.rank or not step["modules"]:
        return False
    first = step["modules"][0]
    return bool((first["fqn"], first["phase"]) == (worst.fqn, worst.phase))


def usual_right(dataset: Path, column: str, culprits: list[Culprit]) -> tuple[int, int]:
    """In how many steps a usual way names the rank, and the rank and the module."""
    rows = query(dataset, USUAL.format(column=column)).to_pylist()[1:]
    worst = max(culprits, key=lambda culprit: culprit.extra_ns)
    rank = sum(row["rank"] == worst.rank for row in rows)
    both = sum(row["rank"] == worst.rank and row["what"] == f"{worst.fqn} {worst.phase}" for row in rows)
    return rank, both


def measure_accuracy(folder: Path, steps: int, layers: int) -> None:
    print(
        "job, ranks, phase, ms: steps that name rank and module; cost as a part of what was made; usual way: rank, both"
    )
    for kind, template in templates(folder, layers).items():
        for ranks in (2, 4, 16):
            balanced = slow_of(folder, MadeJob(template, ranks, steps))
            accused = [one["rank"] for one in balanced["late_ranks"] if one["is_slow"]]
            late = sum(step["verdict"] == "late" for step in balanced["steps"])
            print(
                f"{kind:6} {ranks:5} balanced       late in {late} of {steps} steps, slow: {accused or 'none'}",
                flush=True,
            )
            for phase in ("forward", "backward"):
                modules = leaves(template, phase)
                # The ranks of the largest job are on two hosts, whose clocks are known to a third of what is made.
                for milliseconds in (1, 5, 50):
                    culprit = Culprit(ranks - 1, modules[len(modules) // 2], phase, milliseconds * MS)
                    dataset = folder / "dataset"
                    job = MadeJob(template, ranks, steps, [culprit], bound_ns=culprit.extra_ns // 3)
                    answer = slow_of(folder, job, dataset)
                    told = answer["steps"][1:]
                    right = sum(is_right(step, [culprit]) for step in told)
                    rights = [step for step in told if is_right(step, [culprit])]
                    costs = sorted(step["cost_ns"] / culprit.extra_ns for step in rights) or [0.0]
                    near = sum(abs(cost - 1) <= 0.2 for cost in costs)
                    by_duration, by_self = (
                        usual_right(dataset, f"{what}_ns", [culprit]) for what in ("duration", "self")
                    )
                    print(
                        f"{kind:6} {ranks:5} {phase:8} {milliseconds:4}  {right}/{len(told)}  {costs[0]:.2f} to "
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
    begin = time.perf_counter()
    MadeJob(template, ranks, steps, culprits).write(rings)
    size = sum(path.stat().st_size for path in rings.iterdir())
    took = time.perf_counter() - begin
    print(f"{ranks:,} ranks × {steps} steps of {kind}: rings of {size / 1e9:.2f} GB in {took:.0f} s", flush=True)
    _, seconds, memory = command("pack", rings, "-o", dataset)
    spans = sum(one.spans for one in DatasetTables(dataset).ranks)
    nbytes = sum(path.stat().st_size for path in (dataset / "spans").iterdir())
    other = sum(path.stat().st_size for path in (dataset / "collectives").iterdir())
    print(
        f"pack: {seconds:.0f} s, largest process {memory:,.0f} MB; {spans:,} spans, {nbytes / spans:.2f} bytes each; "
        f"collectives {other / 1e6:,.0f} MB",
        flush=True,
    )
    text, seconds, memory = command("slow", dataset, "--format", "json")
    answer = json.loads(text)
    told = answer["steps"][1:]
    right = sum(is_right(step, culprits) for step in told)
    print(f"slow: {seconds:.1f} s, largest process so far {memory:,.0f} MB; right in {right} of {len(told)} steps")
    for one in answer["late_ranks"][:4]:
        module = one["modules"][0]
        print(
            f"  rank {one['rank']}: {one['steps']} steps, {one['cost_ns'] / 1e6 / one['steps']:.2f} ms each, "
            f"{module['fqn']} {module['phase']}, {'slow' if one['is_slow'] else 'now and then'}"
        )
    print(
        "  made:",
        *(f"rank {one.rank} {one.fqn} {one.phase} {one.extra_ns / 1e6:g} ms every {one.every};" for one in culprits),
    )
    _, seconds, _ = command("query", dataset, "SELECT count(*), avg(self_ns) FROM spans WHERE step BETWEEN 40 AND 41")
    print(f"query of two steps: {seconds:.2f} s", flush=True)


def measure_live(folder: Path, steps: int, ranks: int) -> None:
    """Real ranks on this machine, which has to be quiet: balanced ones, then with a module that is asleep or busy."""
    print(
        "job, ranks, module: steps that name rank and module, of these with a cost within 20 % of what it was told to "
        "take, and of what it took; the same of the steps in which it was told to take 3 times what all vary by; usual "
        "way: rank, both"
    )
    made: list[tuple[str, str, int]] = [("", "", 0)]
    made += [(*what, one) for what in (("forward", "sleep"), ("backward", "busy")) for one in (1, 5, 50)]
    for kind in (*KINDS, *PIPELINES):
        for phase, how, milliseconds in made:
            own = folder / f"live-{kind}-{ranks}-{phase}-{milliseconds}"
            own.mkdir()
            name = f"{4 * (ranks - 1) + 2 if kind in PIPELINES else 2}.up"
            run_ranks(own, kind, ranks, 4, steps, *((ranks - 1, name, phase, milliseconds, how) if phase else ()))
            answer = json.loads(command("slow", own, "--format", "json")[0])
            told = answer["steps"][1:-1]  # behind the last step stands a barrier
            slow = [one["rank"] for one in answer["late_ranks"] if one["is_slow"]]
            if not phase:
                late = sum(step["verdict"] == "late" for step in told)
                print(f"{kind:5} {ranks} balanced: slow {slow}, late {late} of {len(told)}", flush=True)
                continue
            culprit = Culprit(ranks - 1, f"Sequential.{name}", phase, milliseconds * MS)
            wanted = milliseconds * MS * (MICRO_BATCHES if kind in PIPELINES else 1)
            spent = json.loads((own / SPENT).read_text())
            large = [step for step in told if wanted >= 3 * max(step["noise_ns"], step["bound_ns"])]
            pack(find_rank_recordings(own), own / "dataset", processes=1)
            by_duration, by_self = (
                usual_right(own / "dataset", f"{what}_ns", [culprit]) for what in ("duration", "self")
            )
            print(
                f"{kind:5} {ranks} {phase:8} {how:5} {milliseconds:2} ms: {score(told, culprit, wanted, spent)}; "
                f"of those {score(large, culprit, wanted, spent)}; slow: {slow}; by durations {by_duration}, "
                f"by self times {by_self}",
                flush=True,
            )


def score(steps: list[dict[str, Any]], culprit: Culprit, wanted: int, spent: list[int]) -> str:
    right = [step for step in steps if is_right(step, [culprit])]
    near = sum(abs(step["cost_ns"] / wanted - 1) <= 0.2 for step in right)
    near_spent = sum(abs(step["cost_ns"] / spent[step["step"]] - 1) <= 0.2 for step in right)
    return f"right {len(right)} of {len(steps)}, cost {near}, {near_spent}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("accuracy", "scale", "live"))
    parser.add_argument("--ranks", type=int, help="default: 1000; of live 2, no more than there are processors")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--folder", type=Path, help="where there is room; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modtrace-ranks-", dir=options.folder) as name:
        if options.what == "accuracy":
            measure_accuracy(Path(name), min(options.steps, 20), 4)
        elif options.what == "live":
            measure_live(Path(name), options.steps, options.ranks or 2)
        else:
            measure_scale(Path(name), options.ranks or 1000, options.steps, options.layers, options.kind)


if __name__ == "__main__":
    main()

"""Costs of the commands that read a large trace: seconds, peak memory, and the ratio to `convert` to `.json`.

Each command runs in its own process; rounds are interleaved, and figures are medians. Seconds are CPU seconds, which
other processes disturb less than wall time; `--help` should cost 0.3 of them. Exits with 1 if a ratio is above the
bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.support.gpt_timeline import gpt_timeline

LAYERS = 12
MAX_RATIO = 1.5
BASE = "convert to .json"


class Cost(NamedTuple):
    """The cost of one run."""

    seconds: float
    peak_bytes: int


# The system's peak of a child starts with its parent's memory at the fork; VmHWM is only the command's.
_SCRIPT = """
import re, sys
from modtrace.cli import main
try:
    main()
except SystemExit as error:
    if error.code:
        raise
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def run(*arguments: object) -> Cost:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        sys.exit(f"modtrace {arguments[0]}: {errors}")
    return Cost(usage.ru_utime + usage.ru_stime, int(errors.split()[-1]) * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=1_100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    per_step = len(gpt_timeline(1, LAYERS).columns)
    timeline = gpt_timeline(-(-options.spans // per_step), LAYERS)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for suffix in ("pftrace", "json"):
            timeline.save(folder / f"trace.{suffix}")
        print(f"{len(timeline.columns):,} spans")
        print(f"{'':36}{'seconds':>9}{'peak MB':>9}{'ratio':>7}")
        help_costs = [run("--help") for _ in range(5)]
        print(f"{'--help':36}{min(help_costs).seconds:9.2f}{min(help_costs).peak_bytes / 1e6:9.0f}")
        worst_ratio = 0.0
        for suffix in ("pftrace", "json"):
            trace = folder / f"trace.{suffix}"
            commands: dict[str, tuple[object, ...]] = {
                BASE: ("convert", trace, folder / "out.json"),
                "convert to .pftrace": ("convert", trace, folder / "out.pftrace"),
                "summary": ("summary", trace),
                "check": ("check", trace),
                "report": ("report", trace, "-o", folder / "out.zip"),
            }
            costs: dict[str, list[Cost]] = {command: [] for command in commands}
            for _ in range(options.rounds):
                for command, arguments in commands.items():
                    costs[command].append(run(*arguments))
            for command, runs in costs.items():
                seconds = statistics.median(cost.seconds for cost in runs)
                peak = max(cost.peak_bytes for cost in runs)
                pairs = zip(runs, costs[BASE], strict=True)
                ratio = statistics.median(cost.seconds / base.seconds for cost, base in pairs)
                worst_ratio = max(worst_ratio, ratio)
                print(f"{command} of .{suffix}".ljust(36) + f"{seconds:9.2f}{peak / 1e6:9.0f}{ratio:7.2f}")
        if worst_ratio > MAX_RATIO:
            sys.exit(f"the slowest command needs {worst_ratio:.2f} times the time of {BASE}; the bound is {MAX_RATIO}")


if __name__ == "__main__":
    main()

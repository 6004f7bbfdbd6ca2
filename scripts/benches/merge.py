"""The cost of merging a large profiler trace: time and peak memory, compared with copying it and with orjson.

The trace is a real trace with its events repeated; the recording covers its forward thread. Each method runs in its own
process. Copying and merging write to the same disk; the source is in the page cache.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).parents[2] / "tests" / "data" / "kineto" / "a100-ddp-rank0.json.gz"
METHODS = ("copy", "merge", "orjson")


def make(path: Path, size: int) -> int:
    """Write a trace of at least `size` bytes, and return its number of events."""
    text = gzip.decompress(DATA.read_bytes())
    start = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    end = text.index(b'],\n  "INFO"', start) if b'],\n  "INFO"' in text[start:] else text.rindex(b'],\n  "traceName"')
    events = text[start:end]
    count = len(json.loads(b"[" + events + b"]"))
    times = -(-size // len(events))
    with path.open("wb") as file:
        file.write(text[:start])
        for index in range(times):
            file.write(b"," * (index > 0) + events)
        file.write(text[end:])
    return count * times


def recording(path: Path) -> None:
    """Save spans over the trace's forward thread: 100 calls of 20 modules each."""
    import numpy as np

    from modtrace.formats.event_stream import EventStream
    from modtrace.formats.trace_file import TraceFile
    from modtrace.profiler.event_collector import EventCollector
    from modtrace.timeline import Name, Process, Slices, Timeline, Track

    collector = EventCollector()
    with TraceFile(DATA) as source:
        stream = EventStream(source)
        for chunk in stream.chunks():
            collector.add(chunk.events)
    events = collector.events()
    pid, tid = (int(number) for number in events.tracks[int(events.ops.track[0])])
    base = stream.keys["baseTimeNanoseconds"]
    edges = np.linspace(events.first, events.last, 100 * 20 + 1).astype(np.int64) + base
    count = len(edges) - 1
    columns = Slices.of(
        start=edges[:-1],
        end=edges[1:],
        name=np.arange(count) % 20,
        phase=np.zeros(count),
        track=np.zeros(count),
        depth=np.zeros(count),
        parent=np.full(count, -1),
        call=np.arange(count) // 20,
        step=np.zeros(count),
        link=np.full(count, -1),
        complete=np.ones(count),
    )
    names = [Name(f"h.{n}: Block", f"Net.h.{n}", "Block") for n in range(20)]
    path.write_bytes(pickle.dumps(Timeline(columns, names, [Track("forward", "Main", tid, Process(pid))])))


def run(method: str, trace: Path, timeline: Path, out: Path) -> None:
    """Run a method once, and print seconds and the peak of resident memory in MB."""
    if method == "copy":
        start = time.perf_counter()
        shutil.copyfile(trace, out)
    elif method == "orjson":
        import orjson

        start = time.perf_counter()
        out.write_bytes(orjson.dumps(orjson.loads(trace.read_bytes())))
    else:
        from modtrace.profiler.merge import merge_timeline

        recorded = pickle.loads(timeline.read_bytes())
        start = time.perf_counter()
        merge_timeline(trace, recorded, out)
    seconds = time.perf_counter() - start
    # Not ru_maxrss, which a process inherits from its parent.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps([seconds, int(peak.split()[1]) / 1000]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, *paths = options.one
        run(method, *map(Path, paths))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace, timeline, out = (Path(folder, name) for name in ("trace.json", "timeline", "out.json"))
        events = make(trace, options.megabytes * 1_000_000)
        recording(timeline)
        print(f"{trace.stat().st_size / 1e6:.0f} MB, {events} events; best of {options.rounds}")
        best: dict[str, tuple[float, float]] = {}
        for _ in range(options.rounds):
            for method in METHODS:
                command = [sys.executable, __file__, "--one", method, str(trace), str(timeline), str(out)]
                seconds, memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                last = best.get(method, (seconds, memory))
                best[method] = min(last[0], seconds), max(last[1], memory)
                out.unlink()
        for method, (seconds, memory) in best.items():
            print(f"{method:10} {seconds:7.2f} s {memory:7.0f} MB")
        print(f"merge / orjson {best['merge'][0] / best['orjson'][0]:.2f}")


if __name__ == "__main__":
    main()

"""Saving a timeline: time, bytes and memory of both formats, compared with simple writers of the same content.

The writers alternate in one process, so that all see the same machine; a figure is the median of the rounds. Our
writer is measured as users call it, with a temporary file, fsync and a rename. The simple writers only write.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
from tests.support.timelines import gpt2_timeline
from tests.support.trace_processor import TraceProcessor

from modtrace import Timeline
from modtrace.timeline import BACKWARD, PHASES
from modtrace.write import write
from modtrace.write.chrome import ChromeTimeline
from modtrace.write.lanes import Lanes
from modtrace.write.perfetto import PerfettoWriter
from modtrace.write.written_parts import WrittenPart, first_moment, part_counters

MIB = 1 << 20
# Writing this first imports all modules that writing needs, so that imports are not measured.
EMPTY_TIMELINE = "type(timeline)(slices=timeline.columns.take(slice(0, 0)))"


def plain_events(timeline: Timeline, base: int) -> list[dict[str, object]]:
    """Return the dict of every event, as a simple exporter makes it."""
    events: list[dict[str, object]] = []
    columns = timeline.columns
    for span, track, link in zip(timeline.spans, columns.track.tolist(), columns.link.tolist(), strict=True):
        backward = track == BACKWARD
        where = {"pid": 48213, "tid": track + 1}
        ts = (span.start_ns - base) / 1000
        event = {"ph": "f", "bp": "e"} if backward else {"ph": "s"}
        events.append({**event, **where, "cat": "call", "name": "backward", "id": link, "ts": ts})
        events.append(
            {
                "ph": "X",
                **where,
                "cat": span.phase,
                "name": span.name,
                "args": {
                    "fqn": span.fqn,
                    "module_class": span.module_class,
                    "call": span.call,
                    "step": span.step,
                },
                "ts": ts,
                "dur": (span.end_ns - span.start_ns) / 1000,
            }
        )
    return events


def plain_json(timeline: Timeline, path: Path) -> None:
    path.write_bytes(orjson.dumps({"traceEvents": plain_events(timeline, first_moment(timeline))}))


def packet_by_packet(timeline: Timeline, path: Path) -> None:
    """Write the same slices with the package's builder: names interned, args as annotations with interned texts."""
    columns, spans = timeline.columns, list(timeline.spans)
    moments = sorted(
        [
            (start, 1, depth, row)
            for row, (start, depth) in enumerate(zip(columns.start.tolist(), columns.depth.tolist(), strict=True))
        ]
        + [
            (end, 0, -depth, row)
            for row, (end, depth) in enumerate(zip(columns.end.tolist(), columns.depth.tolist(), strict=True))
        ]
    )
    iids: dict[str, int] = {}
    for name in timeline.names:
        for text in name:
            iids.setdefault(text, len(iids) + 1)
    tracks, links = columns.track.tolist(), columns.link.tolist()
    with path.open("wb") as file:
        builder = StreamingTraceProtoBuilder(file)
        for sequence in (1, 2):
            packet = builder.create_packet()
            packet.trusted_packet_sequence_id = sequence
            packet.sequence_flags = 3
            packet.trace_packet_defaults.track_event_defaults.track_uuid = sequence
            for text, iid in iids.items():
                packet.interned_data.event_names.add(iid=iid, name=text)
                packet.interned_data.debug_annotation_string_values.add(iid=iid, str=text.encode())
            for iid, text in enumerate(("fqn", "module_class", "call", "step"), 1):
                packet.interned_data.debug_annotation_names.add(iid=iid, name=text)
            for iid, text in enumerate(PHASES, 1):
                packet.interned_data.event_categories.add(iid=iid, name=text)
            builder.write_packet(packet)
        for moment, is_start, _, row in moments:
            packet = builder.create_packet()
            packet.timestamp = moment
            packet.trusted_packet_sequence_id = tracks[row] + 1
            event = packet.track_event
            if is_start:
                span = spans[row]
                event.type = TrackEvent.TYPE_SLICE_BEGIN
                event.name_iid = iids[span.name]
                event.category_iids.append(PHASES.index(span.phase) + 1)
                event.correlation_id = iids[span.fqn]
                event.debug_annotations.add(name_iid=1, string_value_iid=iids[span.fqn])
                event.debug_annotations.add(name_iid=2, string_value_iid=iids[span.module_class])
                event.debug_annotations.add(name_iid=3, int_value=span.call)
                event.debug_annotations.add(name_iid=4, int_value=span.step)
                (event.terminating_flow_ids if tracks[row] else event.flow_ids).append(links[row])
            else:
                event.type = TrackEvent.TYPE_SLICE_END
            builder.write_packet(packet)


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def same_content(plain: Path, ours: Path) -> bool:
    """Return whether both files have the same spans and arrows, value by value."""

    def events(path: Path) -> list[bytes]:
        trace_events = orjson.loads(path.read_bytes())["traceEvents"]
        return sorted(
            orjson.dumps(event, option=orjson.OPT_SORT_KEYS) for event in trace_events if event["ph"] in "Xsf"
        )

    return events(plain) == events(ours)


def speeds(count: int, rounds: int, folder: Path) -> None:
    timeline = gpt2_timeline(count)
    part = gpt2_timeline(count // 10)
    spans = len(timeline.columns)
    base = first_moment(timeline)
    ready = plain_events(timeline, base)

    ways: dict[str, Callable[[], object]] = {
        "JSON, a dict per event and orjson.dumps": lambda: plain_json(timeline, folder / "plain.json"),
        "JSON, ours": lambda: write(timeline, folder / "ours.json"),
        "orjson.dumps of ready dicts, no file": lambda: orjson.dumps({"traceEvents": ready}),
        "JSON, ours, no file": lambda: sum(
            len(text)
            for _, text in ChromeTimeline(
                timeline, Lanes.from_timeline(timeline), base, parts=part_counters(timeline)
            ).events()
        ),
        "Perfetto, packet by packet (a tenth, times ten)": lambda: packet_by_packet(part, folder / "plain.pftrace"),
        "Perfetto, ours": lambda: write(timeline, folder / "ours.pftrace"),
        "Perfetto, ours, no file": lambda: sum(
            len(packets) for _, packets in PerfettoWriter().packets(WrittenPart(timeline, part_counters(timeline)))
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, action in ways.items():
            scale = spans / len(part.columns) if "tenth" in name else 1
            times[name].append(seconds(action) * scale)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{spans:,} spans, {rounds} rounds")
    for name, median in medians.items():
        spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
        print(f"  {name:50} {median:7.3f} s   {median / spans * 1e9:6.0f} ns a span   {spread}")
    plain, ours, ready_dicts, no_file, packets, perfetto, perfetto_no_file = medians.values()
    size = {name: (folder / name).stat().st_size for name in ("ours.json", "ours.pftrace")}
    verdict("same content after parsing", same_content(folder / "plain.json", folder / "ours.json"), "yes")
    verdict("JSON against the plain way", plain / ours >= 3, f"{plain / ours:.2f} times the speed (at least 3)")
    verdict(
        "JSON against orjson.dumps of ready dicts",
        no_file < ready_dicts,
        f"{ready_dicts / no_file:.2f} times the speed (stretch: more than 1)",
    )
    verdict(
        "Perfetto against our JSON",
        perfetto <= ours,
        f"{ours / perfetto:.2f} times the speed (at least 1); without files {no_file / perfetto_no_file:.2f}",
    )
    verdict(
        "Perfetto against packet by packet",
        packets / perfetto >= 4,
        f"{packets / perfetto:.2f} times the speed (at least 4)",
    )
    ratio = size["ours.json"] / size["ours.pftrace"]
    span_bytes = {name: f"{bytes_ / spans:.1f}" for name, bytes_ in size.items()}
    verdict(
        "bytes",
        ratio >= 6,
        f"JSON {span_bytes['ours.json']} a span, Perfetto {span_bytes['ours.pftrace']}: 1/{ratio:.2f} (at most 1/6)",
    )


def verdict(requirement: str, is_met: bool, figure: str) -> None:
    print(f"{'ok  ' if is_met else 'FAIL'} {requirement}: {figure}")


def memory(count: int, suffix: str, folder: Path) -> None:
    """Print the memory of a save in addition to the timeline's, in a fresh process."""
    stored = folder / "timeline.pickle"
    stored.write_bytes(pickle.dumps(gpt2_timeline(count), protocol=5))
    code = f"""
import pickle, sys
from modtrace.write import write
with open({str(stored)!r}, "rb") as file:
    timeline = pickle.load(file)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
write({EMPTY_TIMELINE}, {str(folder / ("warm" + suffix))!r})
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
write(timeline, {str(folder / ("memory" + suffix))!r})
print(timeline.columns.nbytes, status("VmHWM") - before)
"""
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    timeline_bytes, added = map(int, process.stdout.split())
    verdict(
        f"memory of saving {count:,} spans as {suffix}",
        added <= timeline_bytes // 2 + 64 * MIB,
        f"timeline {timeline_bytes / MIB:.0f} MiB, peak {(timeline_bytes + added) / timeline_bytes:.2f} times that, "
        f"{added / MIB:.0f} MiB more (at most {(timeline_bytes // 2 + 64 * MIB) / MIB:.0f})",
    )


def opened(count: int, folder: Path) -> None:
    """Open a big trace in the trace processor."""
    timeline = gpt2_timeline(count)
    path = folder / "big.pftrace"
    start = time.perf_counter()
    write(timeline, path)
    write_seconds = time.perf_counter() - start
    spans, size = len(timeline.columns), path.stat().st_size
    del timeline
    start = time.perf_counter()
    trace = TraceProcessor.open(path)
    problems = trace.import_problems()
    (row,) = trace.query("select count(*) as n from slice where category != 'step' and dur >= 0")
    verdict(
        f"{spans:,} spans as .pftrace in the trace processor",
        row["n"] == spans and not problems,
        f"written in {write_seconds:.1f} s, {size / MIB:.0f} MiB, opened in {time.perf_counter() - start:.0f} s, "
        f"{row['n']:,} slices, problems {problems}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--open", type=int, default=10_000_000, metavar="N", help="spans to open in the trace processor"
    )
    parser.add_argument("--folder", type=Path, help="folder to write to, whose disk decides the costs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        speeds(arguments.spans, arguments.rounds, folder)
        for suffix in (".json", ".pftrace"):
            for count in (arguments.spans, 4 * arguments.spans):
                memory(count, suffix, folder)
        for path in folder.iterdir():
            os.unlink(path)
        if arguments.open:
            opened(arguments.open, folder)


if __name__ == "__main__":
    main()

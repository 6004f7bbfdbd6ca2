"""Copies a timeline for a report: this file selects each field, and no field is copied by default."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from .._version import __version__
from ..timeline import CounterSeries, Group, Mark, Process, Stats, Timeline, Track
from ..timeline.contents import BACKWARD_PASSES, STEPS_END_WITH, TRACK_KINDS, WITH_REMEDY
from ..timeline.join import move_times, replace_processes
from ..timeline.select import DEVICE_METADATA
from ..timeline.slices import ARGS, TRIGGERS, Arg, Args, without_empty
from ..write.written_parts import first_moment
from .names import ReportNames

_VERSION = r"[0-9][\w.+-]{0,40}"
_COUNT = r"\d+"
_WORD = r"[A-Za-z][\w-]{0,40}"
_ALLOWED: Mapping[str, tuple[str | None, re.Pattern[str]]] = {
    key: (label, re.compile(pattern, re.ASCII))
    for key, label, pattern in (
        ("modtrace", "modtrace", _VERSION),
        ("torch", "torch", _VERSION),
        ("python", "Python", _VERSION),
        ("engine", "engine", "native|python"),
        ("capacity", "capacity", _COUNT),
        ("os", "operating system", rf"{_WORD} {_WORD}"),
        ("cpu", "CPU", r"[\w .()@/+-]{1,80}"),
        ("cpus", "CPUs", _COUNT),
        ("gpu", "GPU", r"\d+ × [\w .()-]{1,60}"),
        ("gpu_driver", "GPU driver", _VERSION),
        ("cuda", "CUDA", _VERSION),
        ("hip", "HIP", _VERSION),
        ("libraries", "libraries", rf"{_WORD} {_VERSION}(?:, {_WORD} {_VERSION})*"),
        (STEPS_END_WITH, None, BACKWARD_PASSES),
        *((key, None, _COUNT) for key in DEVICE_METADATA),
    )
}
"""The keys of a recording's metadata in a report, each with its label in `environment.txt` and the pattern of its
value. The label is None for keys that do not describe the machine."""


def clean_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the versions, hardware and counts of a recording's metadata: without host, its hash, and unknown keys."""
    clean: dict[str, object] = {}
    for key, (_, pattern) in _ALLOWED.items():
        value = metadata.get(key)
        value_type = int if pattern.pattern == _COUNT else str
        # torch's version is an instance of a subclass of str.
        if isinstance(value, value_type) and not isinstance(value, bool) and pattern.fullmatch(str(value)):
            clean[key] = value_type(value)
    return clean


def environment_text(metadata: Mapping[str, object]) -> str:
    """Return the text of `environment.txt`.

    It describes the machine that made the recording, not the machine that makes the report.
    """
    lines = [f"{label}: {value}" for key, value in clean_metadata(metadata).items() if (label := _ALLOWED[key][0])]
    head = ["Noted by the recording when it started:", ""] if lines else ["The trace does not describe its machine."]
    return "".join(f"{line}\n" for line in [*head, *lines, "", f"Reported by modtrace {__version__}."])


REPORT_START_NS = 946_684_800_000_000_000
"""The start of every report in Unix ns: 2000-01-01 00:00 UTC."""

_MIN_OS_ID = 1024
"""Minimum id that is replaced: lower ids are GPUs and streams of a profiler, or the first processes of a container."""
_MAX_OS_ID = 2**31 - 1
"""Maximum id that is replaced: higher ids are rows that a merge adds."""
_FIRST_NUMBER = 100_001


class IdNumbers:
    """Replaces ids of processes and threads by numbers in order of appearance; equal ids get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, os_id: int) -> int:
        """Return the number of an id, or the id itself if it is not an operating system's."""
        if 0 <= os_id < _MIN_OS_ID or os_id > _MAX_OS_ID:
            return os_id
        return self._numbers.setdefault(os_id, _FIRST_NUMBER + len(self._numbers))


def without_identity(timeline: Timeline) -> Timeline:
    """Return the timeline moved to `REPORT_START_NS`, with numbers in place of process and thread ids."""
    shift = np.int64(REPORT_START_NS - first_moment(timeline))
    moved = move_times(timeline, lambda times: times + shift)
    ids = IdNumbers()
    moved = replace_processes(moved, lambda process: process._replace(pid=ids.number(process.pid)))
    return replace(
        moved,
        tracks=[track._replace(tid=ids.number(track.tid)) if track.device is None else track for track in moved.tracks],
    )


_SHAPE = re.compile(r"(?:\w+=)?\w+\[[\d, ]*\]", re.ASCII)


def clean_timeline(timeline: Timeline, names: ReportNames) -> Timeline:
    """Return the timeline with replaced texts, without metadata and args that a report does not need."""
    timeline = replace_processes(timeline, lambda process: Process(process.pid, process.rank))
    return Timeline(
        replace(timeline.slices, args=_clean_args(timeline.slices.args, names)),
        names=[names.name(name) for name in timeline.names],
        tracks=[
            Track(
                kind=track.kind if track.kind in TRACK_KINDS else "backward",
                thread=names.thread(track.thread) if track.stream is None else f"stream {track.stream}",
                tid=track.tid,
                process=track.process,
                device=track.device,
                stream=track.stream,
            )
            for track in timeline.tracks
        ],
        stats=Stats(**dict(timeline.stats)),
        marks=[
            Mark(mark.time_ns, mark.kind, names.mark(mark.text))
            for mark in timeline.marks
            if mark.kind in ("step", "mark")
        ],
        counters=[
            CounterSeries(names.counter(c.name), names.counter(c.unit), c.process, c.time, c.value)
            for c in timeline.counters
        ],
        metadata=clean_metadata(timeline.metadata),
        begin_ns=timeline.begin_ns,
        # Names of groups may be the user's; numbers of ranks stay.
        groups=[Group(names.group(g.name), g.ranks, names.group(g.description)) for g in timeline.groups],
    )


def _clean_args(args: Args, names: ReportNames) -> Args:
    """Return the args for a report: numbers, and replaced texts."""
    cleaners: dict[str, Callable[[str], str | None]] = {
        Arg.SHAPES: _clean_shapes,
        Arg.COMPILED_MODULES: names.inner_modules,
        Arg.COMPILED_UNKNOWN: lambda text: text if {*text.split("; ")} <= {*WITH_REMEDY.values()} else None,
        Arg.OPERATOR: names.collective,
        Arg.GROUP: names.group,
        Arg.DEVICE: _clean_device,
        Arg.TRIGGER: lambda text: text if text in TRIGGERS else None,
    }
    return without_empty(
        {
            name: column if column.texts is None else column.with_texts(cleaners[name])
            for name, column in args.items()
            if name in ARGS
        }
    )


def _clean_device(device: str) -> str:
    """Return torch's name of a device type; other backends, which can have any name, become `privateuseone`."""
    return device if device in ("", "cuda", "hpu", "mtia", "npu", "xla", "xpu") else "privateuseone"


def _clean_shapes(shapes: str) -> str | None:
    """Return shapes and dtypes without the names of arguments; None if `shapes` has another form."""
    parts = re.split(r", (?=\w+=|\w+\[|…)", shapes)
    if not all(part == "…" or _SHAPE.fullmatch(part) for part in parts):
        return None
    return ", ".join(part.rpartition("=")[2] for part in parts)

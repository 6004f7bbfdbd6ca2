"""The parts of a timeline other than its spans: names, processes, tracks, marks, counters and statistics."""

import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from .._arrays import BoolArray, Int64Array
from ..ring.event_text import RangeCategory
from .slices import COMMUNICATION as COMMUNICATION
from .slices import PASSES as PASSES
from .slices import PHASES, TrackKind
from .slices import RANGES as RANGES

GPU: TrackKind = "gpu"
TRACK_KINDS: tuple[TrackKind, ...] = get_args(TrackKind)
"""The kinds of tracks, in display order; calls during backward are on the backward track."""

STEPS_END_WITH = "steps_end_with"
"""Metadata key: `BACKWARD_PASSES` if steps end with backward passes because no torch optimizer stepped."""
BACKWARD_PASSES = "backward passes"

WHOLE_RUN = "whole_run"
"""Metadata key: the `steps`, `spans` and `seconds` of the whole recording, and `kept_steps`, the number of steps that
the ring still contains; each is None if the ring does not know it."""

FIRST_CALLED = "first_called_step"
"""Metadata key, present if calls or ranges were selected as steps: the number of the first, by step kind."""

COUNTED = "flops"
"""Metadata key, present if operators were counted: the steps counted, and the operators that have no formula."""

MEMORY = "memory"
"""Metadata key: memory held by tensors, its owners, its growth, and failed allocations; JSON values."""

OPTIMIZERS = "optimizers"
"""Metadata key: one record per optimizer that stepped. Its `class`, the number of `tensors` that it updates, of its
`groups` if not 1, and of the `hooks` of its step, and `how` it updates (`fused`, `foreach`, `one by one`), if known.
If many stepped, further records have the number that had `stepped` by then, and of their different `first_tensors`."""

WITHOUT_GRADIENTS = "calls without gradients"
"""The name of evaluations in training mode, such as rollouts of a policy."""

FLOAT64 = " (float64)"
"""Suffix of the names of operators with float64 inputs; by itself the name of all such operators of a module."""
STEP_NOTES = "step_notes"
"""Metadata key: facts about a few sampled steps; `metadata.SHAPE_OF_STEP_NOTES` lists their keys."""

MIN_CALLS_IN_STEP = 8
"""Minimum number of a module's calls in a step for the first to be compared with the later ones: times and inputs."""


def is_sampled_step(number: int) -> bool:
    """Return whether a recording samples the step of this number for its notes: one of 0, 1, 2, 4, 8 and so on."""
    return number & (number - 1) == 0


def place_in_lists(fqn: str, called: Container[str]) -> str:
    """Return the name that a module shares with its siblings: `*` replaces each index into an `nn.ModuleList`.

    Modules of an `nn.Sequential` are not siblings: it is in `called`, and runs its modules one after another.
    """
    words = fqn.split(".")
    last = len(words) - 1
    return ".".join(
        "*" if word.isdecimal() and not (index == last and ".".join(words[:index]) in called) else word
        for index, word in enumerate(words)
    )


OPEN_AT_END = "open_at_end"
"""Metadata key, present if the process died or hung inside a call or range: the `thread`, the `place`, the `seconds`
from its start to the last known time, and its `usual_seconds`, None if unknown."""

UNSAVED = "unsaved"
"""Metadata key, present if the process died before it saved: a phrase for the data lost."""


def unsaved_sentence(lost: str) -> str:
    """Return the sentence about the data that a process lost because it died before it saved."""
    return f"the process ended without saving: {lost} is lost"


MISSING_BYTES = "missing_bytes"
"""Metadata key: number of bytes missing at the end of the ring's file."""

LEFT_OUT = "events_left_out"
"""Metadata key: number of profiler events that could not be read."""

COMPILED = "compiled"
"""Metadata key, present if code ran that torch.compile made: the graphs by region, see `summary.compiled`."""

FUSED_TIMES = "fused_times"
"""Key of such a graph in a merged trace: the share of each module in the time of kernels fused from several modules,
by the name below the region and the phase of the kernels' spans."""

COMPILED_BEFORE = "compiled before the first recording"
FROM_AUTOGRAD_CACHE = "from the cache of AOTAutograd"
FROM_CACHE = "from a cache that was filled without modtrace"
NOT_IN_PROFILE = "some kernels are not in the profile"
WITH_REMEDY = {
    COMPILED_BEFORE: f"{COMPILED_BEFORE} (record from before its first call)",
    FROM_CACHE: f"{FROM_CACHE} (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it again)",
    NOT_IN_PROFILE: f"{NOT_IN_PROFILE} (torch._inductor.config.cpp.enable_kernel_profile = True adds those in C++)",
}
"""Reasons why the modules and kernels inside a region are unknown, each followed by its remedy."""


def why_unknown(graphs: Iterable[Mapping[str, Any]]) -> str:
    """Return the reasons, with remedies, why kernels of a region's graphs have no modules; empty if they have them."""
    reasons = dict.fromkeys(record.get("unknown", "") for graph in graphs for record in graph.get("kernels") or [graph])
    return "; ".join(WITH_REMEDY.get(reason, reason) for reason in reasons if reason)


def compiled_graphs(metadata: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (region, graph) for each graph that torch.compile made."""
    for region, graphs in metadata.get(COMPILED, {}).items():
        yield from ((region, graph) for graph in graphs)


COMPILED_CLASS = "CompiledFunction"
"""The class of a compiled function that is not a module."""
REPLAY_CLASS = "CUDAGraph"
"""The class, and the last part of the name, of the replay of a CUDA graph, which is not a module."""
REGION_CLASS = "record_function"
"""The class of a `record_function` range, which is not a module; the user wrote its name."""


class Name(NamedTuple):
    """The names of a module.

    Attributes:
        label: the span's name: the path below the nearest called ancestor and the class (`h.0: Block`); only the
            class for a root.
        fqn: the fully qualified name (`GPT.transformer.h.0`).
        module_class: the name of the module's class (`Block`).
    """

    label: str
    fqn: str
    module_class: str

    @property
    def category(self) -> str | None:
        """The category of a range (`optimizer`); None for a module."""
        category = self.module_class.removeprefix(_RANGE_CLASS)
        return category if category != self.module_class else None


_RANGE_CLASS = "range · "
"""Prefix of `Name.module_class` of a range; the category follows."""


def range_name(name: str, category: str) -> Name:
    """Return the name of a range."""
    return Name(name, name, f"{_RANGE_CLASS}{category}")


class Process(NamedTuple):
    """A process that was recorded.

    Attributes:
        pid: the operating system's id of the process.
        rank: its distributed rank; None if there is none.
        program: the name of the program that it ran.
        role: its role in the job, such as `trainer`; empty if unknown.
    """

    pid: int
    rank: int | None = None
    program: str = "python"
    role: str = ""

    @property
    def name(self) -> str:
        """The name of the process in a trace (`rank 0 · python`, `trainer 0 · python`)."""
        label = process_label(self.role, self.rank)
        return f"{label} · {self.program}" if label else self.program


def process_label(role: str, rank: int | None) -> str:
    """Return the label of a process of a job; empty if neither role nor rank is known.

    Example:
        >>> process_label("rollout", 2), process_label("", 2), process_label("driver", None)
        ('rollout 2', 'rank 2', 'driver')
    """
    return role if rank is None else f"{role or 'rank'} {rank}"


class Track(NamedTuple):
    """One row of slices: the forward or backward of a thread, or the modules whose kernels ran on a GPU stream.

    Spans on a GPU track have the phase of the calls that launched the work.

    Attributes:
        kind: one of `TRACK_KINDS`: "forward", "backward" (and calls inside) or "gpu", which hold the spans of modules;
            "communication", see `Timeline.collectives`; "backward pass", see `Timeline.backward_passes`; "ranges", see
            `Timeline.ranges`.
        thread: the thread's name (`MainThread`, `pt_autograd_0`), or the stream's (`stream 7`).
        tid: the operating system's id of the thread, or the stream's number.
        process: the process that it belongs to; for a GPU track the one that launched the work.
        device: the number of the GPU; None for a thread.
        stream: the number of the stream on it; None for a thread.
    """

    kind: TrackKind
    thread: str
    tid: int
    process: Process
    device: int | None = None
    stream: int | None = None

    @property
    def name(self) -> str:
        """The name of the track in a trace (`forward · MainThread`, `gpu 0 · stream 7`)."""
        return f"{self.kind} · {self.thread}" if self.device is None else f"{self.kind} {self.device} · {self.thread}"


class BackwardPass(NamedTuple):
    """A call of `backward()` or `torch.autograd.grad`, from its start to its return on the thread that called it.

    It is longer than its backward spans, because work of no module runs before the first node, between nodes and after
    the last one, where DistributedDataParallel waits for the other ranks.

    Attributes:
        start_ns: Unix nanoseconds; the first recorded time if the start was overwritten.
        end_ns: Unix nanoseconds; the last recorded time if the end never came.
        thread: the thread's name (`MainThread`).
        tid: the operating system's id of the thread.
        process: the process that it belongs to.
        complete: False if its start was overwritten or its end never came.
    """

    start_ns: int
    end_ns: int
    thread: str
    tid: int
    process: Process
    complete: bool = True

    @property
    def duration_ns(self) -> int:
        """The duration."""
        return self.end_ns - self.start_ns


class Range(NamedTuple):
    """A named interval on a thread: a data fetch, an optimizer step, a garbage collection, a range of the user.

    Attributes:
        name: the name that torch or the user gave it (`Optimizer.step#AdamW.step`).
        category: "data loading", "optimizer", "communication", "gc", "compile", "saving", "evaluation",
            "generate", "torch" (another name given by torch), "user".
        start_ns: Unix nanoseconds; the first recorded time if the start was overwritten.
        end_ns: Unix nanoseconds; the last recorded time if the end never came.
        depth: number of ranges around it on its track.
        track: the name of the track (`ranges · MainThread`).
        thread: the thread's name (`MainThread`).
        process: the process that it belongs to; each worker of a `DataLoader` is a process.
        step: number of steps that had ended at its start.
        complete: False if its start was overwritten or its end never came.
    """

    name: str
    category: RangeCategory
    start_ns: int
    end_ns: int
    depth: int
    track: str
    thread: str
    process: Process
    step: int
    complete: bool = True

    @property
    def duration_ns(self) -> int:
        """The duration."""
        return self.end_ns - self.start_ns


MarkKind: TypeAlias = Literal["step", "mark", "sync"]


class Mark(NamedTuple):
    """A moment in a recording.

    Attributes:
        time_ns: Unix nanoseconds.
        kind: "step" (the end of a training step), "mark" (written by the user) or "sync" (written for alignment).
        text: the label (`step 3`).
    """

    time_ns: int
    kind: MarkKind
    text: str

    @classmethod
    def of_step(cls, time_ns: int, number: int) -> "Mark":
        """Return the mark that ends a step."""
        return cls(time_ns, "step", f"step {number}")

    @property
    def ends_step(self) -> bool:
        """Whether the mark ends a step."""
        return self.kind == "step"


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """A quantity that was sampled over time.

    Attributes:
        name: the quantity (`process RSS`).
        unit: its unit (`bytes`).
        process: the process that sampled it.
        time: int64[n], Unix nanoseconds, ascending.
        value: int64[n], in `unit`.
    """

    name: str
    unit: str
    process: Process
    time: Int64Array
    value: Int64Array


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, int]):
    """Counts of events and spans that a recording kept and lost; also a mapping (`stats["recorded"]`).

    Attributes:
        recorded: events written to the ring since it was started.
        overwritten: the recorded events whose slots were used again.
        torn: slots that were being written when they were read or when the process died.
        unfinished: spans whose exit never came.
        unstarted: spans whose enter was overwritten.
        unattributed: runs of autograd nodes outside all modules, such as the nodes of a loss function; nothing is lost.
            A run is a sequence of such nodes in one pass on one thread, without nodes of a module between them. The
            Python engine omits nodes of a graph if another thread than the one that runs the pass made it.
    """

    recorded: int = 0
    overwritten: int = 0
    torn: int = 0
    unfinished: int = 0
    unstarted: int = 0
    unattributed: int = 0

    def __getitem__(self, key: str) -> int:
        value: int = asdict(self)[key]
        return value

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


def damage_sentence(torn: int, tracks: Iterable[Track]) -> str:
    """Return the sentence on damaged events; empty for up to one per thread, cut off as the process died."""
    threads = {(track.process, track.tid) for track in tracks}
    return f"{torn:,} events are damaged, and left out" if torn > len(threads) else ""


Place = tuple[tuple[int, int], ...]
"""Path of (index into `GpuWork.modules`, index into `PHASES`) from the outermost module to the launching module."""

NO_PHASE = -1
"""The phase of work that no module launched."""
COMMUNICATION_KIND = 3
_FIELDS = 6


@dataclass(frozen=True)
class GpuWork:
    """The kernels, memcpys, memsets and communication of a trace, summed by launcher and step.

    Attributes:
        modules: fully qualified name and class of each module; for work without a module, the reason and an empty text.
        places: the launchers, see `place`.
        place: int64[n], index into `places`.
        step: int64[n], number of the step that launched it; -1 if steps are not distinguished.
        kind: int64[n], 0 for kernels, 1 for memcpys, 2 for memsets, 3 for communication of any kind.
        count: int64[n], number of kernels, copies or collectives.
        duration: int64[n], total duration in nanoseconds.
        overlap: int64[n], nanoseconds of communication while the device computed; 0 for the other kinds.
    """

    modules: Sequence[tuple[str, str]]
    places: Sequence[Place]
    place: Int64Array
    step: Int64Array
    kind: Int64Array
    count: Int64Array
    duration: Int64Array
    overlap: Int64Array

    @property
    def rows(self) -> Int64Array:
        """int64[n, 6]: the columns as one array."""
        return np.stack([self.place, self.step, self.kind, self.count, self.duration, self.overlap], axis=1)

    def take(self, is_selected: BoolArray) -> "GpuWork":
        """Return the selected rows."""
        return GpuWork(self.modules, self.places, *self.rows[is_selected].T)

    def only(self, pattern: str | None, max_depth: int | None) -> "GpuWork":
        """Return the work that the matching modules launched, see `Timeline.only`."""
        matches = [fnmatch.fnmatchcase(fqn, "*" if pattern is None else pattern) for fqn, _ in self.modules]
        places = [tuple(launcher for launcher in place if matches[launcher[0]])[:max_depth] for place in self.places]
        has_module = np.array([bool(place) for place in places], np.bool_)
        return replace(self.take(has_module[self.place]), places=places)

    def to_json_values(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {"modules": self.modules, "places": self.places, "rows": self.rows.tolist()}

    @classmethod
    def from_json_values(cls, values: Mapping[str, Any]) -> "GpuWork":
        """Read the result of `to_json_values`; raises KeyError, TypeError or ValueError for anything different."""
        modules = [(str(fqn), str(module_class)) for fqn, module_class in values["modules"]]
        places = [tuple((int(module), int(phase)) for module, phase in place) for place in values["places"]]
        rows = np.array(values["rows"], np.int64).reshape(-1, _FIELDS)
        is_known = [
            0 <= module < len(modules) and NO_PHASE <= phase < len(PHASES)
            for place in places
            for module, phase in place
        ]
        place_index, kinds = rows[:, 0], rows[:, 2]
        in_range = (place_index >= 0) & (place_index < len(places)) & (kinds >= 0) & (kinds <= COMMUNICATION_KIND)
        if not (all(places) and all(is_known) and in_range.all()):
            raise ValueError("a place, a kind or a module in it does not exist")
        return cls(modules, places, *rows.T)

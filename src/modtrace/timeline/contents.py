"""The contents of a timeline beside its spans: names, processes, tracks, marks, counters and statistics."""

import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from .._arrays import BoolArray, Int64Array
from .slices import BACKWARD_PASS, COLLECTIVE, KINDS, PHASES, RANGE

GPU = "gpu"
COMMUNICATION, PASSES, RANGES = KINDS[COLLECTIVE].track, KINDS[BACKWARD_PASS].track, KINDS[RANGE].track
TRACK_KINDS = ("forward", "backward", PASSES, RANGES, COMMUNICATION, GPU)
"""The kinds of tracks, in the order in which they are shown; calls inside backward are on its track."""


STEPS_END_WITH, BACKWARD_PASSES = "steps_end_with", "backward passes"
"""In a timeline's metadata, where its steps end with backward passes: no optimizer of torch stepped."""

WHOLE_RUN = "whole_run"
"""In a timeline's metadata: the `steps`, `spans` and `seconds` of the recording of which a ring kept the end, and the
`kept_steps`; None for what the ring does not know."""

FIRST_CALLED = "first_called_step"
"""In a timeline's metadata, if calls or ranges were chosen as steps: by what a step is, the number of the first."""

COUNTED = "flops"
"""In a timeline's metadata, if operators were counted: when, and what could not be."""

MEMORY = "memory"
"""In a timeline's metadata: what tensors held and by whom, what grew, and what could not be allocated; JSON values."""

OPTIMIZERS = "optimizers"
"""In a timeline's metadata: the `class` of each optimizer that stepped, how many `tensors` it updates, in how many
`groups` if not in one, `how` (`fused`, `foreach`, `one by one`), and how many `hooks` its step has, as far as known. If
many did, again for some of them, with how many had `stepped` by then, and how many different `first_tensors` these had.
"""

WITHOUT_GRADIENTS = "calls without gradients"
"""The name of evaluations in training mode, such as those of a policy that plays."""

FLOAT64 = " (float64)"
"""The ending of names of operators that take tensors of float64, and the name of all of these in a module."""
STEP_NOTES = "step_notes"
"""In a timeline's metadata: what was noted of few steps; `metadata.SHAPE_OF_STEP_NOTES` has each key."""


def place_in_lists(fqn: str, called: Container[str]) -> str:
    """Return a name with `*` for its places in lists: what its siblings are called.

    A module in an `nn.Sequential` has no siblings there: that is `called` itself, and holds what follows each other.
    """
    words = fqn.split(".")
    last = len(words) - 1
    return ".".join(
        "*" if word.isdecimal() and not (place == last and ".".join(words[:place]) in called) else word
        for place, word in enumerate(words)
    )


OPEN_AT_END = "open_at_end"
"""In a timeline's metadata, if its process died or hung: the `thread` that was in a call or a range, the `place`, for
how many `seconds` until the end of what is known, and `usual_seconds`, None if these are not known."""

UNSAVED = "unsaved"
"""In a timeline's metadata, if its process died before it saved: what is lost by that."""


def unsaved_sentence(lost: str) -> str:
    """Say what a process lost that died before it saved."""
    return f"the process ended without saving: {lost} is lost"


MISSING_BYTES = "missing_bytes"
"""In a timeline's metadata: what was cut off the end of its ring's file."""

LEFT_OUT = "events_left_out"
"""In a timeline's metadata: how many events of the profiler could not be read."""

COMPILED = "compiled"
"""In a timeline's metadata, if torch.compile made any of it: by region its graphs, see `summary.compiled`."""

FUSED_TIMES = "fused_times"
"""In what a merged trace knows of such a graph: by name below the region and phase of spans of kernels that are fused
of several modules, what each of these took of them."""

COMPILED_BEFORE = "compiled before the first recording"
FROM_AUTOGRAD_CACHE = "from the cache of AOTAutograd"
FROM_CACHE = "from a cache that was filled without modtrace"
NOT_IN_PROFILE = "some kernels are not in the profile"
WITH_REMEDY = {
    COMPILED_BEFORE: f"{COMPILED_BEFORE} (record from before its first call)",
    FROM_CACHE: f"{FROM_CACHE} (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it anew)",
    NOT_IN_PROFILE: f"{NOT_IN_PROFILE} (those in C++ are with torch._inductor.config.cpp.enable_kernel_profile = True)",
}
"""Why modules and kernels inside a region are not known: the reasons for which something helps, with that."""


def why_unknown(graphs: Iterable[Mapping[str, Any]]) -> str:
    """Return why kernels of a region, of which these are the graphs, have no modules, and what helps; else empty."""
    reasons = dict.fromkeys(record.get("unknown", "") for graph in graphs for record in graph.get("kernels") or [graph])
    return "; ".join(WITH_REMEDY.get(reason, reason) for reason in reasons if reason)


def compiled_graphs(metadata: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each graph that torch.compile made, after the name of its region."""
    for region, graphs in metadata.get(COMPILED, {}).items():
        yield from ((region, graph) for graph in graphs)


COMPILED_CLASS = "CompiledFunction"
"""The class of a compiled function that is not a module."""
REPLAY_CLASS = "CUDAGraph"
"""The class, and the last part of the name, of the replay of a graph of CUDA's, which is not a module."""
REGION_CLASS = "record_function"
"""The class of a range of `record_function`, which is not a module; its name is a text of the user's."""


class Name(NamedTuple):
    """The names of a module.

    Attributes:
        label: the span's name: the path below the nearest called ancestor and the class (`h.0: Block`); the class
            alone for a root.
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
"""The begin of the class in the name of a range; its category follows."""


def range_name(name: str, category: str) -> Name:
    """Return the name of a range."""
    return Name(name, name, f"{_RANGE_CLASS}{category}")


class Process(NamedTuple):
    """A process that was recorded.

    Attributes:
        pid: its id as the operating system has it.
        rank: its distributed rank; None if there is none.
        program: what it ran.
        role: what it does in its job; empty if that is not known.
    """

    pid: int
    rank: int | None = None
    program: str = "python"
    role: str = ""

    @property
    def name(self) -> str:
        """The name of the process in a trace (`rank 0 · python`, `trainer 0 · python`)."""
        place = process_label(self.role, self.rank)
        return f"{place} · {self.program}" if place else self.program


def process_label(role: str, rank: int | None) -> str:
    """Return what a process of a job is called; empty if nothing is known of it.

    Example:
        >>> process_label("rollout", 2), process_label("", 2), process_label("driver", None)
        ('rollout 2', 'rank 2', 'driver')
    """
    return role if rank is None else f"{role or 'rank'} {rank}"


class Track(NamedTuple):
    """One row of slices: what ran forward or backward on a thread, or whose kernels ran on a stream of a GPU.

    Spans above a GPU stream have the phase of the calls that launched the work.

    Attributes:
        kind: one of `TRACK_KINDS`: "forward", "backward" (and calls inside) or "gpu", which hold the spans of modules;
            "communication", see `Timeline.collectives`; "backward pass", see `Timeline.backward_passes`; "ranges", see
            `Timeline.ranges`.
        thread: the thread's name (`MainThread`, `pt_autograd_0`), or the stream's (`stream 7`).
        tid: the thread's id as the operating system has it, or the stream's number.
        process: the process it belongs to; of a GPU's the one that launched the work.
        device: the number of the GPU; None for a thread.
        stream: the number of the stream on it; None for a thread.
    """

    kind: str
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
    """A call of `backward()` or `torch.autograd.grad`, from its begin to its return on the thread that called it.

    It is longer than the backward spans in it by what torch and others do there that belongs to no module: before the
    first node and after the last, where DistributedDataParallel waits for the other ranks, and between nodes.

    Attributes:
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds; of one that is not complete the edge of what is known.
        thread: the thread's name (`MainThread`).
        tid: its id as the operating system has it.
        process: the process it belongs to.
        complete: False where its begin was overwritten or its end never came.
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
    """A named time of a thread: a fetch of data, an optimizer's step, a garbage collection, a range of the user's.

    Attributes:
        name: as torch or the user calls it (`Optimizer.step#AdamW.step`).
        category: "data loading", "optimizer", "communication", "gc", "compile", "saving", "evaluation",
            "generate", "torch" (another name of torch's), "user".
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds; if it is not complete the edge of what is known.
        depth: how many ranges are around it on its track.
        track: the name of the track (`ranges · MainThread`).
        thread: the thread's name (`MainThread`).
        process: the process it belongs to; a worker of a `DataLoader` is one of its own.
        step: the number of steps that had ended when it began.
        complete: False if its begin was overwritten or its end never came.
    """

    name: str
    category: str
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


class Mark(NamedTuple):
    """A moment in a recording.

    Attributes:
        time_ns: Unix nanoseconds.
        kind: "step" (the end of a training step), "mark" (written by the user) or "sync" (written for alignment).
        text: what it says (`step 3`).
    """

    time_ns: int
    kind: str
    text: str

    @classmethod
    def of_step(cls, time_ns: int, number: int) -> "Mark":
        """Return the mark that ends a step."""
        return cls(time_ns, "step", f"step {number}")

    @property
    def ends_step(self) -> bool:
        """Whether it ends a step."""
        return self.kind == "step"


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """A quantity that was sampled over time.

    Attributes:
        name: what was sampled (`process RSS`).
        unit: its unit (`bytes`).
        process: the process that it was sampled in.
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
    """Counts of what a recording kept and lost; also readable as a mapping (`stats["recorded"]`).

    Attributes:
        recorded: events written to the ring since it was started.
        overwritten: of these, the events whose slots were used again.
        torn: slots that were being written when they were read or when the process died.
        unfinished: spans whose exit never came.
        unstarted: spans whose enter was overwritten.
        unattributed: runs of autograd nodes outside all modules, as those of a loss function are; no loss. A run is
            what a pass runs of them on one thread without nodes of a module between. The Python engine does not
            count those of a graph that another thread made than the one that runs the pass.
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
    """Say how many events of a ring are damaged; empty if none is: each of its threads was writing one if it died."""
    threads = {(track.process, track.tid) for track in tracks}
    return f"{torn:,} events are damaged, and left out" if torn > len(threads) else ""


Place = tuple[tuple[int, int], ...]
"""A module and phase, and those around it: (index into `GpuWork.modules`, index into `PHASES`), the outermost first."""

NO_PHASE = -1
"""The phase of work that no module launched."""
COMMUNICATION_KIND = 3
_FIELDS = 6


@dataclass(frozen=True)
class GpuWork:
    """The kernels, memcpys and memsets of a trace, and its communication, added up by launcher and step."""

    # Fully qualified name and class of each module; the reason and an empty text for work without a module
    modules: Sequence[tuple[str, str]]
    places: Sequence[Place]  # who launched work
    place: Int64Array  # int64[n], index into `places`
    step: Int64Array  # int64[n], in which step it was launched; -1 if the steps are not told apart
    kind: Int64Array  # int64[n], 0 for kernels, 1 for memcpys, 2 for memsets, 3 for communication of any kind
    count: Int64Array  # int64[n], how many there were
    duration: Int64Array  # int64[n], ns, of all together
    overlap: Int64Array  # int64[n], ns of it while the device computed; of communication alone

    @property
    def rows(self) -> Int64Array:
        """int64[n, 6]: the columns beside each other."""
        return np.stack([self.place, self.step, self.kind, self.count, self.duration, self.overlap], axis=1)

    def take(self, chosen: BoolArray) -> "GpuWork":
        """Return some of the rows."""
        return GpuWork(self.modules, self.places, *self.rows[chosen].T)

    def only(self, pattern: str | None, max_depth: int | None) -> "GpuWork":
        """Return what the modules that match launched, see `Timeline.only`."""
        chosen = [fnmatch.fnmatchcase(fqn, "*" if pattern is None else pattern) for fqn, _ in self.modules]
        places = [tuple(launcher for launcher in place if chosen[launcher[0]])[:max_depth] for place in self.places]
        has_module = np.array([bool(place) for place in places], np.bool_)
        return replace(self.take(has_module[self.place]), places=places)

    def to_json_values(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"modules": self.modules, "places": self.places, "rows": self.rows.tolist()}

    @classmethod
    def from_json_values(cls, values: Mapping[str, Any]) -> "GpuWork":
        """Read what `to_json_values` returned; raises KeyError, TypeError or ValueError if it is something else."""
        modules = [(str(fqn), str(module_class)) for fqn, module_class in values["modules"]]
        places = [tuple((int(module), int(phase)) for module, phase in place) for place in values["places"]]
        rows = np.array(values["rows"], np.int64).reshape(-1, _FIELDS)
        is_known = [
            0 <= module < len(modules) and NO_PHASE <= phase < len(PHASES)
            for place in places
            for module, phase in place
        ]
        of_places, kinds = rows[:, 0], rows[:, 2]
        in_range = (of_places >= 0) & (of_places < len(places)) & (kinds >= 0) & (kinds <= COMMUNICATION_KIND)
        if not (all(places) and all(is_known) and in_range.all()):
            raise ValueError("a place, a kind or a module in it does not exist")
        return cls(modules, places, *rows.T)

"""Timeline: the spans of one recording, and what is known about it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._interrupts import cached_property
from . import select
from .args import args_by_row
from .collectives import Collectives, Group
from .contents import RANGE_CLASS, BackwardPass, CounterSeries, Mark, Name, Range, Stats, Track
from .gpu_work import GpuWork, with_gpu_times
from .slices import BACKWARD_PASS, MODULE, RANGE, Slices
from .spans import Spans
from .summary import GroupBy, Summary, find_typical_step, summarize, take_steps


@dataclass(frozen=True)
class Timeline:
    """The slices of one recording, and what is known about it.

    Attributes:
        slices: all slices as NumPy columns: modules, collectives and waits, backward passes, ranges.
        names: what `slices.name` points into.
        tracks: what `slices.track` points into.
        stats: what was kept and what was lost.
        marks: steps and marks, in time order.
        counters: sampled quantities.
        metadata: about the recording as a whole: `torch`, `engine`, `modtrace` versions and the like; JSON values.
        groups: the process groups of torch.distributed.
        gpu_work: what modules launched on GPUs, of a merged trace that has any; None if that is not known.
        begin_ns: when the first of chosen steps began, Unix nanoseconds; None: the timeline has all from its start.
        trained: the names of modules that trained before `begin_ns`; None: that is not known.

    Examples:
        >>> timeline = modtrace.load("step.pftrace")
        >>> slowest = max(timeline.spans, key=lambda span: span.duration_ns)
        >>> timeline.steps(3, 5).save("two-steps.html")
    """

    slices: Slices
    names: Sequence[Name] = ()
    tracks: Sequence[Track] = ()
    stats: Stats = field(default_factory=Stats)
    marks: Sequence[Mark] = ()
    counters: Sequence[CounterSeries] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    gpu_work: GpuWork | None = None
    begin_ns: int | None = None
    trained: frozenset[str] | None = None

    @cached_property
    def columns(self) -> Slices:
        """The slices of modules as NumPy columns, in start order: the first rows of `slices`, not copied."""
        rows = self.slices.block_of(MODULE)
        return self.slices if rows.stop == len(self.slices) else self.slices.take(rows)

    @property
    def span_args(self) -> dict[int, dict[str, int | str]]:
        """What only some slices have, by index of the slice; see `modtrace.timeline.slices.ARGS`."""
        return args_by_row(self.slices.args)

    @cached_property
    def collectives(self) -> Collectives:
        """What the threads did of torch.distributed, as columns and as a sequence of `Collective`."""
        return Collectives.of_slices(self.slices, self.groups, self.track_names)

    @cached_property
    def backward_passes(self) -> Sequence[BackwardPass]:
        """The whole backward passes, in the order of their begins."""
        rows = self.slices.take(self.slices.block_of(BACKWARD_PASS))
        columns = (rows.start.tolist(), rows.end.tolist(), rows.track.tolist(), rows.complete.tolist())
        return [
            BackwardPass(start, end, (track := self.tracks[index]).thread, track.tid, track.process, complete)
            for start, end, index, complete in zip(*columns, strict=True)
        ]

    @cached_property
    def ranges(self) -> Sequence[Range]:
        """What threads did by name, beside modules, in the order of their begins."""
        rows = self.slices.take(self.slices.block_of(RANGE))
        columns = (rows.name, rows.start, rows.end, rows.depth, rows.track, rows.step, rows.complete)
        track_names, ranges = self.track_names, []
        for index, start, end, depth, on, step, complete in zip(*(c.tolist() for c in columns), strict=True):
            name, track = self.names[index], self.tracks[on]
            category = name.module_class.removeprefix(RANGE_CLASS)
            where = track_names[on], track.thread, track.process
            ranges.append(Range(name.label, category, start, end, depth, *where, step, complete))
        return ranges

    @property
    def spans(self) -> Spans:
        """The spans in start order."""
        return Spans(self.columns, self.names, self.track_names, [track.process for track in self.tracks])

    def frame(self) -> Any:
        """Return a DataFrame of pandas or polars with a row per span: the program's own library, if it uses one.

        Its columns are the attributes of `Span`, with `duration_ns`; `process` is the process's name.

        Raises:
            ModtraceError: neither is installed.

        Example:
            >>> timeline.frame().groupby(["fqn", "phase"]).duration_ns.median()
        """
        return self.spans.to_frame()

    @property
    def track_names(self) -> list[str]:
        """One name per track; the thread's id is added where two threads of a process have the same name."""
        count = Counter((track.process, track.name) for track in self.tracks)
        return [
            track.name if count[track.process, track.name] == 1 else f"{track.name} {track.tid}"
            for track in self.tracks
        ]

    def __repr__(self) -> str:
        if not len(self.columns):
            return "<Timeline: no spans>"
        length_ms = (int(self.columns.end.max()) - int(self.columns.start[0])) / 1e6
        return f"<Timeline: {len(self.columns)} spans on {len(self.tracks)} tracks, {length_ms:.3f} ms>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to `path`; the suffix picks the format.

        Raises:
            WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
        """
        from ..write import write  # a timeline can be built and read without any writer

        write(self, path)

    def window(self, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
        """Return what lies in a range of time.

        A span that begins before it or ends after it is cut to it and marked incomplete; one that only touches it is
        left out. Marks and samples are kept from `start_ns` to before `end_ns`, and for each counter the last sample
        before, moved to `start_ns`, so that its value there is known.

        Args:
            start_ns: Unix nanoseconds; None: from the beginning.
            end_ns: Unix nanoseconds; None: to the end.

        Raises:
            ValueError: the end is before the start.
        """
        return select.window(self, start_ns, end_ns)

    def steps(self, first: int | None = None, last: int | None = None, step_by: str | None = None) -> Timeline:
        """Return the spans that began in the steps from `first` to before `last`, whole; None: from or to the end.

        Negative numbers count from the end, as in a slice of a list: `steps(-1)` is the last step.

        A training step begins where the one before it ended, so marks and samples are those between these moments.
        Steps that are calls or ranges last from the begin of the first to the end of the last, with all between them;
        what is left counts them from 0.

        Args:
            first: the first step.
            last: the step after the last one.
            step_by: what a step is, as for `summary`.

        Raises:
            ValueError: `last` is before `first`.
            ModtraceError: `step_by` names no range and no class.
        """
        return take_steps(self, first, last, step_by)

    def typical_step(self, step_by: str | None = None) -> Timeline:
        """Return the spans of the typical step: that whose duration is nearest the median.

        The median is of the whole steps after the first ones, which are left out while they are slower than what
        follows; of equally near steps the first is taken.

        Args:
            step_by: what a step is, as for `summary`.

        Raises:
            ModtraceError: no step is whole, or `step_by` names no range and no class.

        Example:
            >>> modtrace.load("train.pftrace").typical_step().save("step.html")
        """
        number = find_typical_step(self, step_by).step
        return self.steps(number, number + 1, step_by)

    def only(self, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
        """Return the spans of the modules whose fully qualified name matches.

        A span whose outer spans are left out moves up. Its label stays, though it names the path below what called it.

        Args:
            pattern: as of a shell, over the whole name, case matters: `GPT.h.*`; `*` also matches dots. None: all.
            max_depth: how many levels to keep, counted after those left out by the pattern; None: all.
        """
        return select.modules(self, pattern, max_depth)

    def summary(self, by: GroupBy = "module", step_by: str | None = None) -> Summary:
        """Return what each module and each step took: calls, totals, self times, and percentiles over steps.

        Args:
            by: "module" for a row per module, "class" for a row per class.
            step_by: what a step is. "optimizer": what optimizers or `Recording.step` end. "call": an outermost call of
                a module; a call of `generate` is one step with all calls inside. "range NAME": a range. Else a class of
                modules, whose outermost calls are steps. None: "optimizer" if there are such steps or backward passes,
                else "call".

        Raises:
            ModtraceError: there is no such range or class.

        Example:
            >>> for unit in timeline.summary(step_by="range request").units:
            ...     print(unit.unit, unit.stage, unit.thread, unit.p99_ns / 1e6)
        """
        summary = summarize(self, by, step_by)
        return summary if self.gpu_work is None else with_gpu_times(summary, self.gpu_work)

    def _repr_html_(self) -> str:
        """Show the timeline in a notebook: the offline viewer, in a frame of its own."""
        from ..view.pages import iframe_html  # a timeline can be built and read without the viewer

        return iframe_html(self)

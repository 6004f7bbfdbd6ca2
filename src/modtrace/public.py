"""The objects of users: `Timeline` with all that one does with it, `load`, and `merge`.

Inside modtrace a timeline is plain data (`timeline.Timeline`), which the rooms below make and take. What needs several
of them is bound to it here, above them all, and imported when it is called: so a recording imports no reader.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ._errors import TraceError
from .timeline import Timeline as TimelineData
from .timeline import select
from .timeline.summary import GroupBy, Summary, find_typical_step, summarize, take_steps

if TYPE_CHECKING:
    from .formats.trace_file import Progress
    from .profiler.merge import MergeResult


class Timeline(TimelineData):
    """The slices of one recording, and what is known about it.

    Made of its data are `spans` (a `Span` for each call of a module), `columns` (these as NumPy columns), `ranges`,
    `collectives` and `backward_passes`.

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

    @classmethod
    def of(cls, timeline: TimelineData) -> Timeline:
        """Return the timeline that has this data; itself if it is one already."""
        return timeline if isinstance(timeline, cls) else cls(**timeline.__getstate__())

    def frame(self) -> Any:
        """Return a DataFrame of pandas or polars with a row per span: the program's own library, if it uses one.

        Its columns are the attributes of `Span`, with `duration_ns`; `process` is the process's name.

        Raises:
            ModtraceError: neither is installed.

        Example:
            >>> timeline.frame().groupby(["fqn", "phase"]).duration_ns.median()
        """
        return self.spans.to_frame()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to `path`; the suffix picks the format.

        Raises:
            WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
        """
        from .write import REPORT, write

        if os.fspath(path).lower().endswith(REPORT):
            from .reporting import report

            report(self, path)
        else:
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
        return Timeline.of(select.window(self, start_ns, end_ns))

    def steps(self, first: int | None = None, last: int | None = None, step_by: str | None = None) -> Timeline:
        """Return the spans that began in the steps from `first` to before `last`, whole; None: from or to the end.

        Negative numbers count from the end, as in a slice of a list: `steps(-1)` is the last step.

        A training step begins where the one before it ended, so marks and samples are those between these moments.
        Steps that are calls or ranges last from the begin of the first to the end of the last, with all between them;
        they keep their numbers.

        Args:
            first: the first step.
            last: the step after the last one.
            step_by: what a step is, as for `summary`.

        Raises:
            ValueError: `last` is before `first`.
            ModtraceError: `step_by` names no range and no class.
        """
        return Timeline.of(take_steps(self, first, last, step_by))

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
            pattern: like a shell's, over the whole name, case matters: `GPT.h.*`; `*` also matches dots. None: all.
            max_depth: how many levels to keep, counted after those left out by the pattern; None: all.
        """
        return Timeline.of(select.modules(self, pattern, max_depth))

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
        return summarize(self, by, step_by)

    def _repr_html_(self) -> str:
        """Show the timeline in a notebook: the offline viewer, in a frame of its own."""
        from .view.server import iframe_html

        return iframe_html(self)


def load(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from any file that modtrace knows; what it is follows from its content, not from its name.

    Args:
        path: a ring file, also of a running or a killed process; `.json` or `.pftrace` (also `.gz`) that modtrace
            saved or merged; a page; a report's `.zip`. Or a trace of torch.profiler: its `nn.Module` slices
            become module tracks, so profile with `with_stack=True`. `timeline.metadata["notes"]` says what such a trace
            does not tell.

    Returns:
        Modules, ranges, collectives, marks and counters, as far as the file has them; not the profiler's own events.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: the file cannot be read, is broken, or is something else; says what.

    Example:
        >>> modtrace.load("step.pftrace").summary()
    """
    from .read import read_timeline

    return Timeline.of(read_timeline(path))


def merge(
    profiler_trace: str | os.PathLike[str],
    timeline: TimelineData | str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    capture: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    """Lay a recording over a trace of torch.profiler.

    The profiler's events are kept byte for byte, and its file is never written. Events that are broken JSON, as torch
    writes some names, are repaired or left out, and the result says so. Module tracks are above the threads of
    the process; above each stream of a GPU is a track of the modules whose kernels ran.

    Args:
        profiler_trace: `.json` or `.json.gz`, as `export_chrome_trace` writes it.
        timeline: the recording, or any file that `modtrace.load` reads; None makes module tracks from what the trace
            knows of modules.
        out: `.json`, `.json.gz`, `.pftrace` or `.pftrace.gz`.
        capture: another torch.profiler trace, which contains the capture of the CUDA graphs replayed here; not needed
            if `profiler_trace` contains it.
        progress: called with the number of bytes of the trace that were read since the last call.

    Returns:
        What was written and left out, and how exactly the recording lies over the trace.

    Raises:
        RingError: the recording is a ring file that is damaged beyond reading.
        TraceError: a file is cut off or not a trace, or the two do not overlap in time.
        WriteError: `out` cannot be written; an existing file there is intact.

    Example:
        >>> print(modtrace.merge("profile.json", "run.modtrace", "merged.pftrace"))
    """
    from .profiler.merge import merge_timeline
    from .read import NO_PROFILE, FileKind, file_kind_by_head, read_timeline

    kind = file_kind_by_head(profiler_trace)
    if kind in NO_PROFILE:
        advice = "give the profiler's trace first, as `export_chrome_trace` wrote it, then the recording"
        raise TraceError(profiler_trace, f"it is {kind.value}; {advice}")
    if timeline is not None and not isinstance(timeline, TimelineData):
        if file_kind_by_head(timeline) is FileKind.ZIP:
            # Every report begins at the same made-up moment, so nothing says where it lies in the profiler's trace.
            raise TraceError(
                timeline, "a report does not tell when it was recorded; give the recording it was made from"
            )
        timeline = read_timeline(timeline)
    try:
        return merge_timeline(profiler_trace, timeline, out, capture=capture, progress=progress)
    except RecursionError as error:
        raise TraceError(profiler_trace, "something in it is nested too deeply to be read") from error

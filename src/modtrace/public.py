"""The public `Timeline` with its methods, `load`, and `merge`.

Inside modtrace a timeline is plain data (`timeline.Timeline`), which the packages below this file exchange. Methods
that need several packages are added here. Each imports its packages when it is called: a recording imports no reader.
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
    """The slices of one recording, and information about the recording.

    Derived from its data are `spans` (a `Span` for each call of a module), `columns` (the spans as NumPy columns),
    `ranges`, `collectives` and `backward_passes`.

    Attributes:
        slices: all slices as NumPy columns: modules, collectives and waits, backward passes, ranges.
        names: the names to which `slices.name` refers by index.
        tracks: the tracks to which `slices.track` refers by index.
        stats: counts of recorded and lost events.
        marks: steps and marks, in time order.
        counters: sampled quantities.
        metadata: facts about the whole recording, such as `torch`, `engine` and `modtrace` versions; JSON values.
        groups: the process groups of torch.distributed.
        gpu_work: the work that modules launched on GPUs, if a merged trace has any; None if it is not known.
        begin_ns: start of the first selected step in Unix ns; None if the timeline is complete from its start.
        trained: names of modules that trained before `begin_ns`; None if they are not known.

    Examples:
        >>> timeline = modtrace.load("step.pftrace")
        >>> slowest = max(timeline.spans, key=lambda span: span.duration_ns)
        >>> timeline.steps(3, 5).save("two-steps.html")
    """

    @classmethod
    def of(cls, timeline: TimelineData) -> Timeline:
        """Return a public timeline with this data; `timeline` itself if it is public already."""
        return timeline if isinstance(timeline, cls) else cls(**timeline.__getstate__())

    def frame(self) -> Any:
        """Return a DataFrame with a row per span, of pandas or polars: of the library that the program has imported.

        Its columns are the attributes of `Span`, with `duration_ns`; `process` is the process's name.

        Raises:
            ModtraceError: neither library is installed.

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
        """Return the part of the timeline in a range of time.

        A span that extends beyond the range is cut to it and marked incomplete; a span that only touches the range is
        left out. Marks and samples are kept from `start_ns` to before `end_ns`. Each counter also keeps its last
        earlier sample, moved to `start_ns`, so that its value there is known.

        Args:
            start_ns: start of the range in Unix ns; None: the start of the timeline.
            end_ns: end of the range in Unix ns; None: the end of the timeline.

        Raises:
            ArgumentError: the end is before the start.
        """
        return Timeline.of(select.window(self, start_ns, end_ns))

    def steps(self, first: int | None = None, last: int | None = None, step_by: str | None = None) -> Timeline:
        """Return the spans that started in the steps from `first` to before `last`; they are not cut.

        Negative numbers count from the end, as in a slice of a list: `steps(-1)` is the last step.

        A training step starts at the end of the step before it, and marks and samples between these moments belong to
        it. Steps that are calls or ranges reach from the start of the first to the end of the last, including all
        events between them. All steps keep their numbers.

        Args:
            first: number of the first step; None: the first step of the timeline.
            last: number of the step after the last; None: to the end of the timeline.
            step_by: definition of a step, as for `summary`.

        Raises:
            ArgumentError: `last` is before `first`, or `step_by` names no range and no class.
        """
        return Timeline.of(take_steps(self, first, last, step_by))

    def typical_step(self, step_by: str | None = None) -> Timeline:
        """Return the spans of the typical step, whose duration is nearest to the median.

        The median is over whole steps, without the first ones as long as they are slower than the steps after
        them. If several steps are equally near, the first is returned.

        Args:
            step_by: definition of a step, as for `summary`.

        Raises:
            ModtraceError: no step is whole.
            ArgumentError: `step_by` names no range and no class.

        Example:
            >>> modtrace.load("train.pftrace").typical_step().save("step.html")
        """
        number = find_typical_step(self, step_by).step
        return self.steps(number, number + 1, step_by)

    def only(self, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
        """Return the spans of the modules whose fully qualified name matches.

        A span moves up if its outer spans are left out. Its label, the path below the module that called it, stays.

        Args:
            pattern: a shell pattern for the whole name, case-sensitive: `GPT.h.*`; `*` also matches dots. None: all.
            max_depth: maximum number of levels, counted after `pattern` was applied; None: all.
        """
        return Timeline.of(select.modules(self, pattern, max_depth))

    def summary(self, by: GroupBy = "module", step_by: str | None = None) -> Summary:
        """Return the times of each module and each step: calls, totals, self times, and percentiles over steps.

        Args:
            by: "module" for a row per module, "class" for a row per class.
            step_by: definition of a step. "optimizer": an optimizer or `Recording.step` ends it. "call": an outermost
                call of a module; a call of `generate` is one step with all calls inside. "range NAME": a range. Any
                other text is a class of modules, whose outermost calls are steps. None: "optimizer" if there are such
                steps or backward passes, otherwise "call".

        Raises:
            ArgumentError: there is no such range or class.

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
    """Read a timeline from any kind of file that modtrace knows; the content determines the kind, not the name.

    Args:
        path: a ring file, also of a running or a killed process; `.json` or `.pftrace` (also `.gz`) that modtrace
            saved or merged; a page; a report's `.zip`. Or a trace of torch.profiler: its `nn.Module` slices
            become module tracks, so profile with `with_stack=True`. `timeline.metadata["notes"]` lists the information
            that such a trace lacks.

    Returns:
        Modules, ranges, collectives, marks and counters, as far as the file has them; not the profiler's own events.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: the file cannot be read, is broken, or is of another kind; the message names the fault.

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

    The profiler's events are kept byte for byte, and its file is never written. Events with broken JSON (torch does
    not escape some names) are repaired or left out, and the result counts them. Module tracks are above the threads of
    the process; above each stream of a GPU is a track of the modules whose kernels ran.

    Args:
        profiler_trace: `.json` or `.json.gz`, as `export_chrome_trace` writes it.
        timeline: the recording, or any file that `modtrace.load` reads; None: module tracks are made from the trace's
            own information about modules.
        out: `.json`, `.json.gz`, `.pftrace` or `.pftrace.gz`.
        capture: another torch.profiler trace, which contains the capture of the CUDA graphs replayed here; not needed
            if `profiler_trace` contains it.
        progress: called with the number of bytes of the trace that were read since the last call.

    Returns:
        The number of written and left out events, and the accuracy of the alignment between recording and trace.

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
            # Every report starts at the same invented time, so its position in the profiler's trace is unknown.
            raise TraceError(timeline, "a report lacks the time of its recording; give the recording it was made from")
        timeline = read_timeline(timeline)
    try:
        return merge_timeline(profiler_trace, timeline, out, capture=capture, progress=progress)
    except RecursionError as error:
        raise TraceError(profiler_trace, "its data is nested too deeply to be read") from error

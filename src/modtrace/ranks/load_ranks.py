"""`modtrace.load_ranks`: the recordings of a job as one timeline."""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor

from .._errors import ModtraceError
from ..public import Timeline
from ..record_options import StepRange
from ..ring.event_text import rank_list
from .all_ranks import all_ranks_timeline, read_fitting, read_ranks, unchanged
from .rank_folder import JobTime, Location, RankRecording, as_folder, check_size, find_rank_recordings
from .slow import slow_of_recordings, worst_ranks

_MAX_FULL_RANKS = 16
"""Number of ranks up to which all levels of modules are always read."""


def load_ranks(
    folder: Location,
    *,
    steps: StepRange | None = None,
    ranks: Collection[int] | None = None,
    worst: int = 0,
    role: str | None = None,
    on_left_out: Callable[[ModtraceError], None] | None = None,
    executor: Executor | None = None,
    bytes_per_step: int | None = None,
) -> Timeline:
    """Read the recordings of all ranks of a job into one timeline: a process per rank, on one clock.

    Each rank's times are moved by the offset of its clock. `metadata["ranks"]` has the maximum error of its times in
    nanoseconds, and the method by which the offset was found ("same clock", "pings", "collectives", "wall clock").

    Args:
        folder: a folder or URL with a ring file or saved trace of each rank; the processes may run, hang or be dead.
        steps: (first, end) of the steps to read, without `end`, as in `Timeline.steps`; None reads all steps.
        ranks: the ranks to read; None reads all ranks, or with `worst` only the worst.
        worst: number of the most delaying ranks to read in addition to `ranks`.
        role: role of the processes to read; None reads all roles.
        on_left_out: called with the error of each recording that is left out; None: the error is raised.
        executor: reads the recordings, see `find_slow_ranks`; None: this process reads them.
        bytes_per_step: approximate size of a step in a Perfetto trace. More than 16 ranks are reduced to it: first
            levels of modules are dropped (`levels` in the metadata `ranks`), then ranks (`left_out`). None reads all.

    Raises:
        ModtraceError: the folder contains no recording, or none of the ranks; a recording cannot be read, or is a ring
            with more than 4 million events and `steps` is None; with `worst`, no two ranks waited for each other, or
            roles have ranks of their own.

    Example:
        >>> modtrace.load_ranks("run", steps=(10, 12), worst=4).save("late.pftrace")
    """
    with as_folder(folder, executor) as local_folder:
        files = find_rank_recordings(local_folder, on_left_out, role)
        if steps is None:
            check_size(files)
        job = JobTime(files)
        chosen_files: Sequence[RankRecording] = files
        if ranks is not None or worst:
            chosen_ranks = {
                *(ranks or ()),
                *(worst_ranks(slow_of_recordings(files, job, steps, executor), worst) if worst else ()),
            }
            chosen_files = [file for file in files if file.rank_in_world in chosen_ranks]
        if not chosen_files:
            raise ModtraceError(f"{os.fspath(folder)}: has none of these ranks; it has {rank_list(job.ranks)}")
        if bytes_per_step is not None and len(chosen_files) > _MAX_FULL_RANKS:
            timelines = read_fitting(chosen_files, job, steps, executor, bytes_per_step)
        else:
            timelines = read_ranks(unchanged, chosen_files, job, steps, executor)
        return Timeline.of(all_ranks_timeline(timelines, len(chosen_files) - len(timelines)))

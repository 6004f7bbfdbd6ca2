"""`modtrace.load_ranks`: the recordings of a job as one timeline."""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor

from .._errors import ModtraceError
from ..public import Timeline
from ..record_options import StepRange
from ..ring.event_text import rank_list
from .all_ranks import all_ranks_timeline, read_fitting, read_ranks, whole
from .rank_folder import JobTime, Place, RankRecording, as_folder, check_size, find_rank_recordings
from .slow import slow_of_recordings, worst_ranks

_FEW = 16
"""So many ranks are always taken whole."""


def load_ranks(
    folder: Place,
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

    Each rank's times are moved by what its clock was ahead. How far they are off at most is in `metadata["ranks"]`, in
    nanoseconds, with the way in which it was found ("same clock", "pings", "collectives", "wall clock").

    Args:
        folder: with a ring file or a saved trace of each rank, or its URL; the processes may run, hang or be dead.
        steps: take those from the first number to before the second, as `Timeline.steps` does; None: all.
        ranks: take these; None: all, or with `worst` none but those.
        worst: take so many of those that were late most, too.
        role: take processes of this role; None: all.
        on_left_out: is called with what is wrong with a recording that is not taken; None: that is raised.
        executor: reads the recordings, as `find_slow_ranks` says it; None: this process.
        bytes_per_step: of more than 16 ranks take fewer levels of modules, and fewer ranks, so that a Perfetto trace
            takes about so much; in `metadata` the `ranks` have the `levels` that are left, and `left_out` says how many
            ranks are. None: all.

    Raises:
        ModtraceError: the folder holds no recording, or none of these ranks; one cannot be read, or is a ring with more
            than 4 million events, and `steps` says nothing; with `worst`, no two ranks waited for each other, or roles
            have ranks of their own.

    Example:
        >>> modtrace.load_ranks("run", steps=(10, 12), worst=4).save("late.pftrace")
    """
    with as_folder(folder, executor) as local_folder:
        files = find_rank_recordings(local_folder, on_left_out, role)
        if steps is None:
            check_size(files)
        job = JobTime(files)
        chosen: Sequence[RankRecording] = files
        if ranks is not None or worst:
            wanted = {
                *(ranks or ()),
                *(worst_ranks(slow_of_recordings(files, job, steps, executor), worst) if worst else ()),
            }
            chosen = [file for file in files if file.rank_in_world in wanted]
        if not chosen:
            raise ModtraceError(f"{os.fspath(folder)}: none of these ranks is in it; it holds {rank_list(job.ranks)}")
        if bytes_per_step is not None and len(chosen) > _FEW:
            read = read_fitting(chosen, job, steps, executor, bytes_per_step)
        else:
            read = read_ranks(whole, chosen, job, steps, executor)
        return Timeline.of(all_ranks_timeline(read, len(chosen) - len(read)))

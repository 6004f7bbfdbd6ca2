"""All ranks of a job together: one time, one timeline, who is late, and tables to ask.

Nothing here needs torch. `find_rank_recordings` says what a folder holds, `JobTime` where each rank is in the time of
the job and how far that is off at most. `slow.find_slow_ranks` says who is late, `query.query` asks a dataset.
"""

from __future__ import annotations

from .all_ranks import RankTimeline, all_ranks_timeline, load_rank
from .job_time import JobTime, RankTime
from .load_ranks import load_ranks
from .rank_folder import RankRecording, find_rank_recordings, is_dataset, parse_rank_list

__all__ = [
    "JobTime",
    "RankRecording",
    "RankTime",
    "RankTimeline",
    "all_ranks_timeline",
    "find_rank_recordings",
    "is_dataset",
    "load_rank",
    "load_ranks",
    "parse_rank_list",
]

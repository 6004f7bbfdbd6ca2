"""All ranks of a job together: one time, one timeline, who is late, and tables to ask.

Nothing here needs torch. `find_rank_files` says what a folder holds, `JobTime` where each rank lies in the time of the
job and how far that is off at most.
"""

from __future__ import annotations

from .all_ranks import RankTimeline, all_ranks_timeline, load_rank
from .job_time import JobTime, RankTime
from .rank_folder import RankFile, find_rank_files, parse_rank_list

__all__ = [
    "JobTime",
    "RankFile",
    "RankTime",
    "RankTimeline",
    "all_ranks_timeline",
    "find_rank_files",
    "load_rank",
    "parse_rank_list",
]

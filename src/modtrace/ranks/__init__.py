"""All ranks of a job together: one time, one timeline, who is late, and tables to ask.

Nothing here needs torch. `find_rank_recordings` says what a folder holds, `JobTime` where each rank is in the time of
the job and how far that is off at most. `slow.find_slow_ranks` says who is late, `dataset_tables.query` asks a dataset.
"""

from .all_ranks import damage_sentences, peak_sentence
from .load_ranks import load_ranks
from .rank_folder import JobTime, as_folder, find_rank_recordings, is_dataset, parse_rank_list

__all__ = [
    "JobTime",
    "as_folder",
    "damage_sentences",
    "find_rank_recordings",
    "is_dataset",
    "load_ranks",
    "parse_rank_list",
    "peak_sentence",
]

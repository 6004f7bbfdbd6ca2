"""All ranks of a job together: a common time, one timeline, the late ranks, and tables to query.

Nothing here needs torch. `find_rank_recordings` lists the recordings in a folder, `JobTime` maps each rank's clock to
the job's, with an error bound. `slow.find_slow_ranks` finds late ranks, `dataset_tables.query` queries a dataset.
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

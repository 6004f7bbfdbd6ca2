"""Comparing: two sets of recordings → which modules became slower or faster, and how sure that is."""

from .compare import diff, save_baseline
from .diff_result import Diff, suffix_of
from .regions import RegionChange
from .run_times import Key, ModuleRun, RunTimes, Typical
from .side_by_side import TypicalStep
from .verdicts import Cause, Change, PeakChange, Verdict

__all__ = [
    "Cause",
    "Change",
    "Diff",
    "Key",
    "ModuleRun",
    "PeakChange",
    "RegionChange",
    "RunTimes",
    "Typical",
    "TypicalStep",
    "Verdict",
    "diff",
    "save_baseline",
    "suffix_of",
]

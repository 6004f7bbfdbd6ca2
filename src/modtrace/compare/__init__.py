"""Comparing: two sets of recordings → which modules became slower or faster, and how sure that is."""

from .compare import diff, save_baseline
from .diff_result import Diff, suffix_of
from .run_times import RunTimes
from .side_by_side import TypicalStep
from .verdicts import Change, PeakChange

__all__ = ["Change", "Diff", "PeakChange", "RunTimes", "TypicalStep", "diff", "save_baseline", "suffix_of"]

"""Comparing: two sets of recordings → which modules became slower or faster, and how sure that is."""

from .compare import diff, save_baseline
from .diff_result import Diff, suffix_of
from .verdicts import Change, PeakChange

__all__ = ["Change", "Diff", "PeakChange", "diff", "save_baseline", "suffix_of"]

"""The files that a recording writes, a set for each cycle of its schedule."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from .._next_step import next_step_hint
from ..write import check_writable, find_writer
from .cycles import Cycles
from .rank_files import RankFile

__all__ = ["Outputs", "log_saved"]

_log = logging.getLogger("modtrace")

_T = TypeVar("_T")


class Outputs:
    """Where a recording saves, and the file behind its ring.

    Args:
        path: where to save, or None.
        ring: the file behind the ring, or None.
        cycles: those of its schedule.

    Attributes:
        saved: the files saved so far.

    Raises:
        RecordingError: one is no path, or its `%r` has no value.
        WriteError: nothing can be saved at `path`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, ring: str | os.PathLike[str] | None, cycles: Cycles
    ) -> None:
        self._trace = None if path is None else RankFile("path", path)
        self._ring = None if ring is None else RankFile("ring", ring)
        self._cycles = cycles
        self.saved: list[str] = []
        if self._trace is not None:
            check_writable(self._trace.path)
            # Now, and not when the recording ends: a disk that is full by then takes no `.pyc` file either.
            find_writer(self._trace.path)
            importlib.import_module("numpy.ma")  # which `numpy.unique` imports when it is first called

    @property
    def path(self) -> str | None:
        """Where the cycle that runs or comes next is saved."""
        return None if self._trace is None else self._path_of(self._trace)

    @property
    def ring_path(self) -> str | None:
        """The file behind the ring of the cycle that runs or comes next."""
        return None if self._ring is None else self._path_of(self._ring)

    def make_with_ring(self, make: Callable[[str | None], _T]) -> _T:
        """Return what `make` makes with the path of the ring's file, or with None.

        Raises:
            RecordingError: another rank writes that file, or saves where this one does.
        """
        if self._trace is not None:
            self._trace.claim(self._path_of(self._trace))
        if self._ring is None:
            return make(None)
        path = self._path_of(self._ring)
        self._ring.claim(path)
        made = make(path)
        self._ring.note_written(path)
        return made

    def save(self, save: Callable[[str], None]) -> None:
        """Call `save` with where to save, if anywhere.

        Raises:
            RecordingError: another rank has saved there.
        """
        if self._trace is not None:
            path = self._path_of(self._trace)
            self._trace.check(path)
            save(path)
            self._trace.note_written(path)
            if path not in self.saved:
                self.saved.append(path)

    def _path_of(self, file: RankFile) -> str:
        return self._cycles.path(file.path)


def log_saved(path: str) -> None:
    """Log where a recording is, and how to look at it."""
    _log.info("recorded to %s. %s", path, next_step_hint(path))

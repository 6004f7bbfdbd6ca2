"""What a recording keeps while it runs: by a watcher beside it, or at once by a thread where there is none."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence

from .._errors import ModtraceError, RecordingError
from .._rank import rank_in
from ..timeline import Timeline
from ..watching.conditions import parse_conditions
from ..watching.start import start_watcher
from ..watching.windows import KeepLimits, kept_folder, save_window

_NO_PATH = "modtrace"


class KeptWindows:
    """What `Recording.keep` and `keep_when` keep.

    Args:
        keep_when: conditions; an empty sequence has a watcher that waits for `keep` alone, None has none.
        ring: the file behind the recording's ring, or None.

    Attributes:
        on_signal: whether a signal is among the conditions.

    Raises:
        RecordingError: a condition is not understood, or there is no ring for the watcher to read.
    """

    def __init__(self, keep_when: str | Iterable[str] | None, ring: object) -> None:
        self._conditions: Sequence[str] | None = None
        self.on_signal = False
        if keep_when is not None:
            try:
                parsed = parse_conditions(keep_when)
                self._conditions = [condition.text for condition in parsed]
                self.on_signal = any(condition.subject == "signal" for condition in parsed)
            except ModtraceError as error:
                raise RecordingError(f"keep_when: {error}") from None
            if ring is None:
                raise RecordingError(
                    "keep_when needs a ring, which another process reads; give ring='run.modtrace' too"
                )
        self._limits = KeepLimits()
        self._kept = 0
        self._saving = threading.Lock()

    @property
    def has_watcher(self) -> bool:
        """Whether a watcher reads the ring."""
        return self._conditions is not None

    def watch(self, ring: str | None, warn: Callable[[str], None]) -> None:
        """Start the watcher if there are conditions; what is wrong goes to `warn`."""
        if self._conditions is None or ring is None:
            return
        try:
            start_watcher(ring, self._conditions)
        except (OSError, AttributeError) as error:  # no such function in another system's library
            warn(f"keep_when: the watcher cannot be started, nothing is kept: {error}")

    def keep_now(
        self, why: str, path: str | None, snapshot: Callable[[], Timeline], warn: Callable[[str], None]
    ) -> None:
        """Save the last steps, by a thread, where no watcher does; one at a time, and no more than a watcher would."""
        if self._conditions is not None or self._kept >= self._limits.max_kept or not self._saving.acquire(False):
            return
        self._kept += 1

        def save() -> None:
            try:
                timeline = snapshot()
                last = timeline.steps(-1 - self._limits.steps)
                step = int(last.columns.step.max(initial=0))
                rank = rank_in(os.environ)
                who = "" if rank is None else f"rank{rank}-"
                save_window(last, kept_folder(path or _NO_PATH), f"{who}step{step}-keep {why}", [why])
            except (ModtraceError, OSError) as error:
                warn(f"the window cannot be kept: {error}")
            finally:
                self._saving.release()

        try:
            threading.Thread(target=save, name="modtrace-keep").start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            with contextlib.suppress(RuntimeError):
                self._saving.release()
            warn(f"the window cannot be kept: {error}")

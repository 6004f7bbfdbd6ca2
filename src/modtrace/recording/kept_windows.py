"""Windows that a recording keeps while it runs: a watcher saves them, or a thread of this process if there is none.

The training never sees the watcher as a child process.
"""

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .._errors import ModtraceError, RecordingError
from .._files import Folder
from .._processes import run_without_child
from .._ranks import rank_in
from ..live.triggers import parse_conditions
from ..live.windows import STEPS_FILE, KeepLimits, KeptFolder, begin_file, folder_mode, kept_folder, save_window
from ..public import Timeline
from ..ring import Ring

_NO_PATH = "modtrace"
_NOT_IN_METRICS = r"[^\w.\- ]"
"""Characters that MLflow refuses in the name of a metric."""
_MAIN = (
    "import sys; sys.path[0] = sys.argv.pop(1); import os, signal; os.setsid(); os.fchdir(9); "
    "os.closerange(3, min(os.sysconf('SC_OPEN_MAX'), 1 << 20)); signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "from modtrace.cli import main; main()"
)
"""It leaves the terminal and the descriptors of the training, which other libraries may hand on. It goes to the folder
that is descriptor 9, once it imports nothing from the working directory any more."""
_PRIVATE_MODE = 0o600
"""Permissions of what has no ring's file to take them from."""


class KeptWindows:
    """The windows of `Recording.keep` and `keep_when`.

    Raises RecordingError if a condition is not understood, or there is no ring for the watcher to read.
    """

    def __init__(self, keep_when: str | Iterable[str] | None, ring: object) -> None:
        # The texts of those that a watcher of the ring has; None if there is no watcher.
        self.conditions: Sequence[str] | None = None
        self._is_asked_for = keep_when is not None  # whether there should be one
        self.on_signal = False  # whether a signal is among the conditions
        if keep_when is not None:
            try:
                parsed = parse_conditions(keep_when)
                self.conditions = [condition.text for condition in parsed]
                self.on_signal = any(condition.subject == "signal" for condition in parsed)
            except ModtraceError as error:
                raise RecordingError(f"keep_when: {error}") from None
            if ring is None:
                raise RecordingError(
                    "keep_when needs a ring, which another process reads; give ring='run.modtrace' too"
                )
        self._steps = _WatchedSteps()
        self._limits = KeepLimits()
        self._kept = 0
        self._saving = threading.Lock()

    def watch(self, ring: Ring | None, warn: Callable[[str], None]) -> None:
        """Start the watcher of a ring in a file if there are conditions; what is wrong goes to `warn`."""
        if self.conditions is None or ring is None or ring.path is None or ring.folder is None:
            return
        try:
            _start_watcher(os.path.basename(ring.path), ring.folder, self.conditions)
        except (OSError, AttributeError) as error:  # no such function in another system's library
            self.conditions = None
            warn(f"keep_when: the watcher cannot be started, nothing is kept: {error}")

    def lines_path(self, ring: str | None) -> Path | None:
        """Return the file in which the watcher of a ring writes a JSON line per step; None if there is no watcher."""
        return None if ring is None or self.conditions is None else kept_folder(ring) / STEPS_FILE

    def take_step_metrics(self, ring: str | None) -> dict[int, dict[str, float]]:
        """Return what `Recording.step_metrics` does, for the ring in this file."""
        if not self._is_asked_for:
            raise RecordingError("step_metrics() needs a watcher: record(ring='run.modtrace', keep_when=())")
        path = self.lines_path(ring)
        return {} if path is None else self._steps.take_new_metrics(path)

    def keep_now(
        self, why: str, path: str | None, snapshot: Callable[[], Timeline], warn: Callable[[str], None]
    ) -> None:
        """Save the last steps on a thread, if no watcher does: one window at a time, no more than a watcher would."""
        if self.conditions is not None or self._kept >= self._limits.max_kept or not self._saving.acquire(False):
            return
        self._kept += 1

        def save() -> None:
            try:
                timeline = snapshot()
                last = timeline.steps(-1 - self._limits.steps)
                step = int(last.columns.step.max(initial=0))
                rank = rank_in(os.environ)
                prefix = "" if rank is None else f"rank{rank}-"
                folder = KeptFolder(kept_folder(path or _NO_PATH)).open(_PRIVATE_MODE)
                save_window(last, folder, f"{prefix}step{step}-keep {why}", [why], _PRIVATE_MODE)
            except (ModtraceError, OSError) as error:
                warn(f"the window cannot be kept: {error}")
            finally:
                self._saving.release()

        try:
            threading.Thread(target=save, name="modtrace-keep").start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._saving.release()
            warn(f"the window cannot be kept: {error}")


class _WatchedSteps:
    """Reads the file of the watcher, which writes a JSON line per step."""

    _file = _last = -1
    _read = 0

    def take_new_metrics(self, path: Path) -> dict[int, dict[str, float]]:
        """Return what `Recording.step_metrics` does, of the lines that were written since the last call."""
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._file:  # a new one
                    self._file, self._read = inode, 0
                file.seek(self._read)
                text = file.read().rpartition(b"\n")[0]
        except OSError:  # no step has ended
            return {}
        self._read += len(text) + bool(text)
        lines = [json.loads(line) for line in text.splitlines()]
        lines = [line for line in lines if line["pid"] == os.getpid() and line["step"] > self._last]
        self._last = max([self._last, *(line["step"] for line in lines)])
        return {
            line["step"]: {
                f"modtrace/{re.sub(_NOT_IN_METRICS, '_', part)}_ms": ns / 1e6
                for part, ns in [("step", line["duration_ns"]), *line["parts"].items()]
            }
            for line in lines
        }


def _start_watcher(ring: str, place: Folder, conditions: Sequence[str]) -> None:
    """Start `modtrace watch` for a ring of this process; it ends by itself once the ring has.

    The kernel sends SIGCHLD for an ended child, and `os.wait` returns it. A program that expects neither must not get
    them from a profiler. So the process between the two is made by `clone` without a signal, which `os.wait` does not
    see; its child runs the shell, which starts the watcher and ends.
    """
    log = begin_file(place.make(kept_folder(ring).name, folder_mode(_PRIVATE_MODE)), "watch.log", _PRIVATE_MODE)
    try:
        options = [word for condition in conditions for word in ("--keep-when", condition)]
        root = str(Path(__file__).parents[2])
        command = shlex.join([sys.executable, "-c", _MAIN, root, "watch", ring, "--no-wait", *options])
        # By their descriptors, since the names may be others' by now. A numpy that reads a ring needs one thread.
        opened = f"/proc/{os.getpid()}/fd"
        folder = place.path.replace("/proc/self/fd", opened)
        run_without_child(
            f"{{ OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 {command} </dev/null & }} "
            f"9<{shlex.quote(folder)} >>{opened}/{log} 2>&1"
        )
    finally:
        os.close(log)

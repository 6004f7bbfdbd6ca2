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
"""Pattern of the characters that MLflow refuses in the name of a metric."""
_WATCHER_PROGRAM = (
    "import sys; sys.path[0] = sys.argv.pop(1); import os, signal; os.setsid(); os.fchdir(9); "
    "os.closerange(3, min(os.sysconf('SC_OPEN_MAX'), 1 << 20)); signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "from modtrace.cli import main; main()"
)
"""The Python program of the watcher. It leaves the terminal, and closes the descriptors of the training, which other
libraries may pass on. Once no import reads the working directory any more, it changes to the folder of descriptor 9."""
_PRIVATE_MODE = 0o600
"""Permissions of files without a ring whose permissions they could have."""


class KeptWindows:
    """The windows of `Recording.keep` and `keep_when`.

    Raises RecordingError if a condition is not understood, or there is no ring for the watcher to read.
    """

    def __init__(self, keep_when: str | Iterable[str] | None, ring: object) -> None:
        # The texts of the watcher's conditions; None without a watcher.
        self.conditions: Sequence[str] | None = None
        self._has_keep_when = keep_when is not None
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
        self._kept_count = 0
        self._saving = threading.Lock()

    def watch(self, ring: Ring | None, warn: Callable[[str], None]) -> None:
        """Start the watcher of a ring in a file if there are conditions; errors go to `warn`."""
        if self.conditions is None or ring is None or ring.path is None or ring.folder is None:
            return
        try:
            _start_watcher(os.path.basename(ring.path), ring.folder, self.conditions)
        except (OSError, AttributeError) as error:  # another system's C library has no such function
            self.conditions = None
            warn(f"keep_when: the watcher cannot be started, nothing is kept: {error}")

    def lines_path(self, ring: str | None) -> Path | None:
        """Return the file in which the watcher of a ring writes a JSON line per step; None without a watcher."""
        return None if ring is None or self.conditions is None else kept_folder(ring) / STEPS_FILE

    def take_step_metrics(self, ring: str | None) -> dict[int, dict[str, float]]:
        """Return the new step metrics of a ring file, see `Recording.step_metrics`."""
        if not self._has_keep_when:
            raise RecordingError("step_metrics() needs a watcher: record(ring='run.modtrace', keep_when=())")
        path = self.lines_path(ring)
        return {} if path is None else self._steps.take_new_metrics(path)

    def keep_now(
        self, why: str, path: str | None, snapshot: Callable[[], Timeline], warn: Callable[[str], None]
    ) -> None:
        """Without a watcher, save the last steps on a thread: one window at a time, up to a watcher's maximum."""
        if self.conditions is not None or self._kept_count >= self._limits.max_kept or not self._saving.acquire(False):
            return
        self._kept_count += 1

        def save() -> None:
            try:
                timeline = snapshot()
                window = timeline.steps(-1 - self._limits.margin_steps)
                step = int(window.columns.step.max(initial=0))
                rank = rank_in(os.environ)
                prefix = "" if rank is None else f"rank{rank}-"
                folder = KeptFolder(kept_folder(path or _NO_PATH)).open(_PRIVATE_MODE)
                save_window(window, folder, f"{prefix}step{step}-keep {why}", [why], _PRIVATE_MODE)
            except (ModtraceError, OSError) as error:
                warn(f"the window cannot be kept: {error}")
            finally:
                self._saving.release()

        try:
            threading.Thread(target=save, name="modtrace-keep").start()
        except RuntimeError as error:  # the thread limit is reached, or the interpreter ends
            self._saving.release()
            warn(f"the window cannot be kept: {error}")


class _WatchedSteps:
    """Reads the file in which the watcher writes a JSON line per step."""

    _inode = _last_step = -1
    _offset = 0

    def take_new_metrics(self, path: Path) -> dict[int, dict[str, float]]:
        """Return the metrics of the lines that were written since the last call, see `Recording.step_metrics`."""
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # a new file
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                text = file.read().rpartition(b"\n")[0]
        except OSError:  # no step has ended
            return {}
        self._offset += len(text) + bool(text)
        lines = [json.loads(line) for line in text.splitlines()]
        lines = [line for line in lines if line["pid"] == os.getpid() and line["step"] > self._last_step]
        self._last_step = max([self._last_step, *(line["step"] for line in lines)])
        return {
            line["step"]: {
                f"modtrace/{re.sub(_NOT_IN_METRICS, '_', part)}_ms": ns / 1e6
                for part, ns in [("step", line["duration_ns"]), *line["parts"].items()]
            }
            for line in lines
        }


def _start_watcher(ring: str, ring_folder: Folder, conditions: Sequence[str]) -> None:
    """Start `modtrace watch` for a ring of this process; it ends by itself after the recording.

    The kernel sends SIGCHLD for an ended child, and `os.wait` returns it. A program that expects neither must not get
    them from a profiler. So `clone` makes an intermediate process without a signal, which `os.wait` does not see. Its
    child runs the shell, which starts the watcher and ends.
    """
    log = begin_file(ring_folder.make(kept_folder(ring).name, folder_mode(_PRIVATE_MODE)), "watch.log", _PRIVATE_MODE)
    try:
        options = [word for condition in conditions for word in ("--keep-when", condition)]
        root = str(Path(__file__).parents[2])
        command = shlex.join([sys.executable, "-c", _WATCHER_PROGRAM, root, "watch", ring, "--no-wait", *options])
        # Descriptors and not names, which may belong to other files by now. numpy needs one thread to read a ring.
        descriptors = f"/proc/{os.getpid()}/fd"
        folder = ring_folder.path.replace("/proc/self/fd", descriptors)
        run_without_child(
            f"{{ OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 {command} </dev/null & }} "
            f"9<{shlex.quote(folder)} >>{descriptors}/{log} 2>&1"
        )
    finally:
        os.close(log)

"""The loop of the watcher: looks at each ring once a second until its process has ended; its numbers for Prometheus."""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from .._errors import RingError
from .._local_server import LocalHandler, LocalServer
from ..ring import find_rings
from ..timeline.summary.units import median, nearest_rank
from .follow import Look, RingFollower
from .triggers import Condition, Triggers
from .windows import WindowKeeper

_RECENT_NS = 60_000_000_000
_OWN_HOSTS = ("127.0.0.1", "localhost")
_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _RankNumbers(Counter[str]):
    """The nanoseconds of each part of the steps of one process, and how many steps there were."""

    steps = total_ns = 0


class Metrics:
    """Serves `http://127.0.0.1:PORT/metrics`, 0 for a free port; raises OSError if another program has it."""

    def __init__(self, port: int) -> None:
        self._numbers: dict[RingFollower, _RankNumbers] = {}
        self._server = LocalServer(port, self._make_handler())
        self.port = self._server.server_port  # which it is
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add_look(self, follower: RingFollower, look: Look) -> None:
        """Count the steps of a look."""
        numbers = self._numbers.get(follower, _RankNumbers())
        for step in look.steps:
            numbers.steps += 1
            numbers.total_ns += step.end_ns - step.start_ns
            numbers.update(step.parts)
        self._numbers = {**self._numbers, follower: numbers}  # a thread may go through the one before

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Return the metrics as they are now, as text of OpenMetrics."""
        of_rank = [(_labels(follower), follower, numbers) for follower, numbers in self._numbers.items()]
        lines = _family("modtrace_steps", "counter", "Training steps that have ended.")
        lines += [f"modtrace_steps_total{{{labels}}} {numbers.steps}" for labels, _, numbers in of_rank]
        lines += _family(
            "modtrace_step_seconds", "summary", "Time of a step; quantiles are of the last minute, 256 steps at most."
        )
        for labels, follower, numbers in of_rank:
            since_ns = follower.last_ns - _RECENT_NS
            recent = [step.end_ns - step.start_ns for step in list(follower.last_steps) if step.end_ns >= since_ns]
            quantiles = {0.5: median(recent), 0.95: nearest_rank(recent, 0.95)} if recent else {}
            for quantile, ns in quantiles.items():
                lines.append(f'modtrace_step_seconds{{{labels},quantile="{quantile}"}} {ns / 1e9:.9f}')
            lines.append(f"modtrace_step_seconds_count{{{labels}}} {numbers.steps}")
            lines.append(f"modtrace_step_seconds_sum{{{labels}}} {numbers.total_ns / 1e9:.9f}")
        lines += _family(
            "modtrace_part_seconds", "counter", "Time of all steps by part; the parts add up to the steps."
        )
        for labels, _, numbers in of_rank:
            for part, ns in list(numbers.items()):
                escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                lines.append(f'modtrace_part_seconds_total{{{labels},part="{escaped}"}} {ns / 1e9:.9f}')
        lines += _family("modtrace_quiet_seconds", "gauge", "Time since the last event.")
        lines += [f"modtrace_quiet_seconds{{{labels}}} {f.quiet_ns / 1e9:.3f}" for labels, f, _ in of_rank]
        return "\n".join([*lines, "# EOF", ""])

    def _make_handler(self) -> type[LocalHandler]:
        metrics = self

        class Handler(LocalHandler):
            def do_GET(self) -> None:  # noqa: N802 (http.server's name)
                is_own = (self.headers.get("Host") or "").rpartition(":")[0] in _OWN_HOSTS
                is_there = is_own and self.path == "/metrics"
                body = metrics.text().encode() if is_there else b""
                self.send_response(200 if is_there else 404)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def _family(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# TYPE {name} {kind}", f"# HELP {name} {meaning}"]


def _labels(follower: RingFollower) -> str:
    rank = "" if follower.rank is None else f'rank="{follower.rank}",'
    return f'{rank}pid="{follower.pid}"'


class LookSink(Protocol):
    """A consumer of the looks at all rings."""

    def add_look(self, follower: RingFollower, look: Look, /) -> object:
        """Take what is new in a ring."""

    def close(self) -> object:
        """End, after the last new events of all rings."""


class Watcher:
    """Watches the rings of a job.

    Args:
        paths: ring files, folders and patterns. A folder's new rings are found; a file that is named is followed until
            its process has ended, also if it is renamed.
        conditions: when a window is kept.
        keeper: keeps it.
        say: takes a line for the user.
        sinks: they take each look.
        waits: whether to wait for a ring if none is there; that of a recording is, or will never be again.
    """

    def __init__(
        self,
        paths: Sequence[str],
        conditions: Sequence[Condition],
        keeper: WindowKeeper,
        say: Callable[[str], None],
        sinks: Sequence[LookSink] = (),
        *,
        waits: bool = True,
    ) -> None:
        self._paths, self._conditions, self._keeper, self._say = paths, conditions, keeper, say
        self._sinks, self._waits = sinks, waits
        self._followers: dict[tuple[int, int], tuple[RingFollower, Triggers]] = {}
        self._named: set[str] = set()
        self._said: set[str] = set()
        self._is_short = False

    def run(self, every_s: float) -> bool:
        """Look until all processes have ended or KeyboardInterrupt comes; return whether all rings were read."""
        try:
            while self.look():
                time.sleep(every_s)
        except KeyboardInterrupt:
            pass
        self._keeper.save_ready(self._readable(), flush=True)
        for follower, _ in self._followers.values():
            if follower.missed_events:
                self._say(f"{follower.path}: {follower.missed_events:,} events were overwritten before they were read")
        self._keeper.close()
        for sink in self._sinks:
            sink.close()
        lost = [follower for follower, _ in self._followers.values() if follower.is_unread]
        for follower in lost:
            self._say(f"{follower.path}: its end was not read, as it could not be")
        self._say(f"ended: {self._keeper.kept} kept")
        return not lost

    def look(self) -> bool:
        """Look at each ring once; return whether a process still runs, or none was there yet."""
        self._find()
        for follower, triggers in self._followers.values():
            if follower.state == "ended":
                continue
            try:
                look = follower.look()
            except RingError as error:
                self._say_once(str(error))
                if follower.is_lost(error):
                    follower.state, follower.analysis = "ended", None
                continue
            for trigger in triggers.judge(follower, look):
                self._keeper.add(follower, trigger)
            for sink in self._sinks:
                sink.add_look(follower, look)
        self._keeper.save_ready(self._readable())
        if not self._followers:
            return self._waits or self._is_short
        return self._is_short or any(follower.state != "ended" for follower, _ in self._followers.values())

    def _readable(self) -> list[RingFollower]:
        return [follower for follower, _ in self._followers.values() if follower.analysis is not None]

    def _find(self) -> None:
        self._is_short = False
        try:
            rings, _, errors = find_rings(self._paths)
        except OSError as error:
            self._note_short(error)
            rings, errors = [], [str(error)]
        for path in rings:
            if path in self._named:
                continue
            try:
                status = os.stat(path)
                if (status.st_dev, status.st_ino) not in self._followers:
                    follower = RingFollower(path)
                    self._followers[status.st_dev, status.st_ino] = follower, Triggers(self._conditions)
                    self._said.clear()
            except OSError as error:
                self._note_short(error)
                errors.append(f"{path}: {error.strerror or error}")
            else:
                self._named |= {path} & set(self._paths)
        if not self._followers:
            for missing in errors:
                self._say_once(f"{missing}; waiting for it")

    def _note_short(self, error: OSError) -> None:
        """Note that rings may be there that cannot be opened now, as descriptors or memory are short."""
        self._is_short |= error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

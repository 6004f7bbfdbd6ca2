"""The loop of the watcher, which reads each ring once a second until its process has ended, and Prometheus metrics."""

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
from .follow import RingFollower, RingUpdate
from .triggers import Condition, Triggers
from .windows import WindowKeeper

_RECENT_NS = 60_000_000_000
_OWN_HOSTS = ("127.0.0.1", "localhost")
_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _RankNumbers(Counter[str]):
    """The nanoseconds of each part of the steps of one process, and the number and duration of the steps."""

    steps = total_ns = 0


class Metrics:
    """Serves `http://127.0.0.1:PORT/metrics`, 0 for a free port; raises OSError if another program has it."""

    def __init__(self, port: int) -> None:
        self._numbers: dict[RingFollower, _RankNumbers] = {}
        self._server = LocalServer(port, self._make_handler())
        self.port = self._server.server_port  # the actual port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add_update(self, follower: RingFollower, update: RingUpdate) -> None:
        """Count the steps of an update."""
        numbers = self._numbers.get(follower, _RankNumbers())
        for step in update.steps:
            numbers.steps += 1
            numbers.total_ns += step.end_ns - step.start_ns
            numbers.update(step.parts)
        self._numbers = {**self._numbers, follower: numbers}  # the server's thread may iterate over the previous one

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Return the current metrics in OpenMetrics text format."""
        entries = [(_labels(follower), follower, numbers) for follower, numbers in self._numbers.items()]
        lines = _family("modtrace_steps", "counter", "Training steps that have ended.")
        lines += [f"modtrace_steps_total{{{labels}}} {numbers.steps}" for labels, _, numbers in entries]
        lines += _family(
            "modtrace_step_seconds", "summary", "Time of a step; quantiles are of the last minute, 256 steps at most."
        )
        for labels, follower, numbers in entries:
            start_ns = follower.last_ns - _RECENT_NS
            durations = [step.end_ns - step.start_ns for step in list(follower.last_steps) if step.end_ns >= start_ns]
            quantiles = {0.5: median(durations), 0.95: nearest_rank(durations, 0.95)} if durations else {}
            for quantile, ns in quantiles.items():
                lines.append(f'modtrace_step_seconds{{{labels},quantile="{quantile}"}} {ns / 1e9:.9f}')
            lines.append(f"modtrace_step_seconds_count{{{labels}}} {numbers.steps}")
            lines.append(f"modtrace_step_seconds_sum{{{labels}}} {numbers.total_ns / 1e9:.9f}")
        lines += _family(
            "modtrace_part_seconds", "counter", "Time of all steps by part; the parts add up to the steps."
        )
        for labels, _, numbers in entries:
            for part, ns in list(numbers.items()):
                escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                lines.append(f'modtrace_part_seconds_total{{{labels},part="{escaped}"}} {ns / 1e9:.9f}')
        lines += _family("modtrace_quiet_seconds", "gauge", "Time since the last event.")
        lines += [f"modtrace_quiet_seconds{{{labels}}} {f.quiet_ns / 1e9:.3f}" for labels, f, _ in entries]
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


class UpdateSink(Protocol):
    """A consumer of the updates of all rings."""

    def add_update(self, follower: RingFollower, update: RingUpdate, /) -> object:
        """Consume the new events of a ring."""

    def close(self) -> object:
        """Finish, after the last update of all rings."""


class Watcher:
    """Watches the rings of a job.

    Args:
        paths: ring files, folders and patterns. New rings in folders are found; a named file is followed until its
            process has ended, even if the file is renamed.
        conditions: conditions under which windows are kept.
        keeper: keeps the windows.
        say: prints a line for the user.
        sinks: consumers of the updates.
        waits: whether to wait for a ring if there is none; False for the ring of a recording, which exists already.
    """

    def __init__(
        self,
        paths: Sequence[str],
        conditions: Sequence[Condition],
        keeper: WindowKeeper,
        say: Callable[[str], None],
        sinks: Sequence[UpdateSink] = (),
        *,
        waits: bool = True,
    ) -> None:
        self._paths, self._conditions, self._keeper, self._say = paths, conditions, keeper, say
        self._sinks, self._waits = sinks, waits
        self._followers: dict[tuple[int, int], tuple[RingFollower, Triggers]] = {}
        self._named_paths: set[str] = set()
        self._printed_lines: set[str] = set()
        self._lacks_resources = False

    def run(self, every_s: float) -> bool:
        """Poll until all processes have ended or KeyboardInterrupt; return whether all rings were read to the end."""
        try:
            while self.poll():
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
        unread = [follower for follower, _ in self._followers.values() if follower.is_unread]
        for follower in unread:
            self._say(f"{follower.path}: the end of the ring could not be read")
        self._say(f"ended: {self._keeper.kept} kept")
        return not unread

    def poll(self) -> bool:
        """Read each ring once; return whether to continue: a process runs, or rings are awaited."""
        self._find()
        for follower, triggers in self._followers.values():
            if follower.state == "ended":
                continue
            try:
                update = follower.update()
            except RingError as error:
                self._say_once(str(error))
                if follower.is_lost(error):
                    follower.state, follower.analysis = "ended", None
                continue
            for trigger in triggers.judge(follower, update):
                self._keeper.add(follower, trigger)
            for sink in self._sinks:
                sink.add_update(follower, update)
        self._keeper.save_ready(self._readable())
        if not self._followers:
            return self._waits or self._lacks_resources
        return self._lacks_resources or any(follower.state != "ended" for follower, _ in self._followers.values())

    def _readable(self) -> list[RingFollower]:
        return [follower for follower, _ in self._followers.values() if follower.analysis is not None]

    def _find(self) -> None:
        self._lacks_resources = False
        try:
            rings, _, errors = find_rings(self._paths)
        except OSError as error:
            self._check_resources(error)
            rings, errors = [], [str(error)]
        for path in rings:
            if path in self._named_paths:
                continue
            try:
                status = os.stat(path)
                if (status.st_dev, status.st_ino) not in self._followers:
                    follower = RingFollower(path)
                    self._followers[status.st_dev, status.st_ino] = follower, Triggers(self._conditions)
                    self._printed_lines.clear()
            except OSError as error:
                self._check_resources(error)
                errors.append(f"{path}: {error.strerror or error}")
            else:
                self._named_paths |= {path} & set(self._paths)
        if not self._followers:
            for missing in errors:
                self._say_once(f"{missing}; waiting for it")

    def _check_resources(self, error: OSError) -> None:
        """Record that there may be rings that cannot be opened now for lack of descriptors or memory."""
        self._lacks_resources |= error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

    def _say_once(self, line: str) -> None:
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self._say(line)

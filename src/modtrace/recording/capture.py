"""Writes the events of a recording: chooses the engine, makes ring, engine and sampler, and handles their errors.

The header has versions and hardware, nothing that names a person, a machine or a script.
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
from typing import Literal, NamedTuple

import torch
from torch import nn

from .._errors import EngineError, RecordingError
from .._interrupts import raised_by_handler
from .._ranks import host_hash, rank_in
from .._version import __version__
from ..record_options import EngineName
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

# Loads the native engine if it is built. Now, and not when a recording begins: torch holds a lock while the engine
# gives it a callback, and a child that is forked meanwhile would wait for that lock for ever.
if hasattr(os, "fork"):
    why_unavailable()


class CaptureOptions(NamedTuple):
    """Arguments of `record`, which documents and checks them: what is recorded, and into which ring."""

    engine: EngineName
    capacity: int
    host_name: bool
    role: str | None
    model: weakref.ref[nn.Module] | str | None
    events: EngineOptions  # what the engine records; its `model` is the one above
    sampler: Sampler
    stacks_on_signal: int | None
    keep: int
    workers: bool


class Capture:
    """Writes events from `start` to `stop`; both can be called again where an interrupt came in between.

    Args:
        ring: a file behind the ring, or None.
        options: what is recorded.
        first_step: the number of its first step; None if it is one of several parts.

    Raises:
        RecordingError: the signal for stacks cannot be listened to.
        RingError: the ring's file cannot be made or its space not be reserved.
        EngineError: the native engine is asked for and is not built.
    """

    def __init__(self, ring: str | None, options: CaptureOptions, first_step: int | None) -> None:
        kind, stacks_signal = choose_engine(options.engine), options.stacks_on_signal
        metadata = recording_metadata(kind, options.capacity, options.host_name)
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
        # What writes the events.
        self.engine = make_engine(kind, self.ring, self._on_error, options.events._replace(model=model))
        self._sampler = options.sampler
        self._step_notes = StepNotes(self.ring.names, self.engine, self._on_error)
        self._clocks = JobClocks(self.ring.names)
        self._failed = False
        self.started = False  # whether `start` was called

    def start(self) -> None:
        """Begin to write events."""
        self.started = True
        self._sampler.start(self.engine, self.ring.names, self._on_error)
        self.engine.start()
        self._clocks.start()

    def stop(self) -> None:
        """End, and restore what of torch was wrapped; the ring stays readable."""
        self.note_libraries()
        if self.started and not self._failed:
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
        """Note what is loaded now: a recording that began before the script did knows none of its libraries."""
        self.ring.metadata = {**self.ring.metadata, "libraries": _libraries()}

    def note_optimizer(self, description: Mapping[str, object]) -> None:
        """Write into the ring what `describe_optimizer` returned."""
        self.ring.names.note({"kind": "optimizer", **description})

    def write_mark(self, kind: Kind, text: str | None, value: int) -> None:
        """Write one event of this thread, with a text or with no name."""
        if not self._failed:
            try:
                self.engine.write_event(kind, NO_NAME if text is None else self.ring.names.text(text), value)
                if kind in (Kind.STEP, Kind.OPTIMIZER_STEP):
                    self._step_notes.after_step(value, "step" if kind is Kind.STEP else "optimizer")
            except Exception as error:
                self._on_error(error)

    def reader(self, running: bool) -> tuple[Callable[..., RingSnapshot], range]:
        """Return what reads the events so far, or some serial numbers without some kinds, and their serial numbers."""
        if running:
            self.note_libraries()
        self.engine.finish_notes()
        serials = self.ring.serials()
        records = list(self.ring.names.records)  # those that the events so far need, and no later ones

        def read(part: range | None = None, without: Collection[Kind] = ()) -> RingSnapshot:
            snapshot = self.ring.read(part, without)
            if running:
                snapshot = snapshot._replace(writer="running", known_pid=True)
            return snapshot if part is None else snapshot._replace(records=records)

        return read, serials

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if names started at no module of it; else None."""
        return self.engine.module_names.unmatched_model() if self.started else None

    def after_fork(self) -> None:
        """End in a forked child: the ring and its file are the parent's."""
        self._failed = True
        self.engine.after_fork()
        self._sampler.stop()
        self._clocks.after_fork()

    def _on_error(self, error: BaseException) -> None:
        """Stop recording after an error inside modtrace, and log it; called from within the user's own calls.

        An interrupt, or what the handler of a signal raised while our code ran, is the user's: it is raised.
        """
        if not isinstance(error, Exception) or raised_by_handler(error):
            raise error
        if self._failed or isinstance(error, RecursionError):
            # If the user's code has used the stack up, a call is not recorded, and the recording goes on.
            return
        self._failed = True
        self.stop()
        self._report(error)

    def _report(self, error: BaseException) -> None:
        _log.error(
            "the recording stopped after an error inside modtrace; the training goes on", exc_info=error, stacklevel=4
        )


def choose_engine(wanted: EngineName) -> Literal["native", "python"]:
    """Return the engine to use where `wanted` is asked for; "auto" takes the native one where it can be had."""
    if wanted != "auto":
        return wanted
    reason = why_unavailable()
    if reason is None:
        return "native"
    warn_once(f"the Python engine records, not the native one (exact, and a fifth of the cost): {reason}")
    return "python"


def make_engine(
    kind: Literal["native", "python"], ring: Ring, on_error: OnError, options: EngineOptions
) -> NativeEngine | PythonEngine:
    """Return an engine that was not started.

    Raises EngineError if the native engine is asked for and cannot be had, or FLOPs are, which it alone counts.
    """
    if kind == "native":
        return NativeEngine(ring, on_error, options)
    if options.flops:
        raise EngineError("flops needs the native engine; `modtrace build` makes it, `modtrace doctor` says what lacks")
    for option in options.native_only:
        warn_without(option, "the Python engine has none; `modtrace doctor` says why the native one is not used")
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
"""Libraries whose versions are noted where they are loaded."""


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
    """Return the hardware and the libraries that are loaded; takes less than a millisecond and starts no GPU."""
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
    """Return names and versions of the libraries that are loaded."""
    loaded = ((name, getattr(sys.modules[name], "__version__", None)) for name in _LIBRARIES if name in sys.modules)
    return ", ".join(f"{name} {version}" for name, version in loaded if isinstance(version, str))


def _gpus() -> str | None:
    """Return number and model of the NVIDIA GPUs (`8 × NVIDIA A100-SXM4-80GB`), from their driver."""
    models = [_first_match(path, r"Model:\s*(.+)") for path in sorted(_NVIDIA_GPUS.glob("*/information"))]
    return f"{len(models)} × {models[0]}" if models and models[0] else None


def _first_match(path: Path, pattern: str) -> str | None:
    """Return what a pattern finds in the first bytes of a file; None if it finds nothing or the file is missing."""
    try:
        with path.open(encoding="utf-8") as file:
            match = re.search(pattern, file.read(_HEAD_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    return match[1].strip()[:_MAX_TEXT] if match else None

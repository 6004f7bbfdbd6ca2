"""A replay of every allocation of a thread, as torch's legacy profiler reports it: what each call kept and took.

It shares nothing with the engine: torch's allocator reports to the profiler, and hooks mark where calls begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

__all__ = ["Replay", "ReplayedCall", "mark", "replayed"]

_PREFIX = "replay "


class ReplayedCall(NamedTuple):
    """The memory of one call of a module, in bytes."""

    module_class: str
    retained: int
    peak: int


@dataclass
class Replay:
    """Bytes are of blocks that were allocated while it ran.

    Attributes:
        calls: in the order of their begins.
        live: what was held after each allocation and each free, from 0 on.
        marks: by text, what was held at each `mark`.
    """

    calls: list[ReplayedCall] = field(default_factory=list)
    live: list[int] = field(default_factory=lambda: [0])
    marks: dict[str, list[int]] = field(default_factory=dict)


def mark(text: str) -> None:
    """Note what is held here."""
    with _RecordFunctionFast(f"{_PREFIX}{text}"):
        pass


@contextmanager
def replayed(model: nn.Module) -> Iterator[Replay]:
    """Replay what this thread allocates in the block; the result is filled in behind it."""
    replay, handles = Replay(), []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(_on_enter))
        handles.append(module.register_forward_hook(_on_exit, always_call=True))
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        yield replay
    finally:
        threads = _disable_profiler_legacy()
        for handle in handles:
            handle.remove()
    _replay(replay, [event for thread in threads for event in thread])


def _on_enter(module: nn.Module, _inputs: Any) -> None:
    mark(f"enter {type(module).__name__}")


def _on_exit(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    mark("exit")


def _replay(replay: Replay, events: list[Any]) -> None:
    calls: list[ReplayedCall | None] = []
    open_calls: list[tuple[int, str, int, int]] = []  # place in calls, class, position in live, live
    for event in events:
        if event.kind() == "memory_alloc":
            replay.live.append(replay.live[-1] + event.cpu_memory_usage())
        elif event.kind() == "push" and event.name().startswith(_PREFIX):
            what, _, module_class = event.name().removeprefix(_PREFIX).partition(" ")
            live = replay.live[-1]
            if what == "enter":
                open_calls.append((len(calls), module_class, len(replay.live) - 1, live))
                calls.append(None)
            elif what == "exit":
                place, begun, since, before = open_calls.pop()
                calls[place] = ReplayedCall(begun, live - before, max(replay.live[since:]) - before)
            else:
                replay.marks.setdefault(what, []).append(live)
    replay.calls = [call for call in calls if call is not None]

"""What is noted in few steps: operators that run where no module does, hooks, and what makes a program slow unseen."""

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from ..ring import NameTable
from ..timeline.contents import place_in_lists
from .event_sink import OnError
from .line_gaps import LineGaps
from .native.engine import NativeEngine
from .portable.engine import PortableEngine
from .unseen import skip_all, unseen_by_modes

_MAX_OPERATORS, _MAX_MODULES = 8, 32
"""How many are noted, the longest operators and the first modules."""
_MAX_NS = 30_000_000_000
"""How long operators are counted: that costs up to a tenth of a step, and what is longer is more than a step."""
_PLACES = "outside", "in_passes"


class StepNotes:
    """Looks at the steps 1, 2, 4, 8 …, so that it costs nothing in the others, and notes the sums after each."""

    def __init__(self, names: NameTable, engine: NativeEngine | PortableEngine, on_error: OnError) -> None:
        self._names, self._engine, self._on_error = names, engine, on_error
        self._modules, self._native = engine.module_names, getattr(engine, "native", None)
        self._last: int | None = None
        self._ended = self._looked = 0
        self._thread: int | None = None
        self._totals: dict[str, dict[str, list[int]]] = {place: {} for place in _PLACES}
        self._settings: dict[str, int] = {}
        self._resident: list[tuple[int, int]] = []
        self._noted: Mapping[str, object] = {}
        self._gaps = LineGaps()
        if self._native is not None:
            self._native.limit_outside(_MAX_NS)

    @skip_all
    def after_step(self, number: int, ended_by: str) -> None:
        """Look at the next step, or note what there was in this, which `ended_by` says; several optimizers may."""
        if number == self._last or self._thread not in (None, threading.get_ident()):
            return
        self._last = number
        try:
            if self._thread is not None:
                self._note(ended_by)
            self._ended += 1
            if self._ended & (self._ended - 1) == 0:
                self._thread = threading.get_ident()
                with contextlib.suppress(OSError):
                    self._resident.append((self._ended, _resident_bytes()))
                self._engine.on_boundary = self._gaps
                if self._native is not None:
                    self._native.begin_outside(self._gaps)
                self._gaps.begin(ended_by)
        except Exception as error:
            self._thread = None
            self._on_error(error)

    @skip_all
    def finish(self) -> None:
        """Note what modules are like where no step has ended."""
        try:
            if self._ended == 0:
                self._write()
        except Exception as error:
            self._on_error(error)

    def _note(self, ended_by: str) -> None:
        self._thread = self._engine.on_boundary = None
        self._gaps.end(ended_by)
        if self._native is not None:
            if (counted := self._native.end_outside()) is None:
                self._write()
                return
            for place, operators in zip(_PLACES, counted, strict=True):
                for name, calls, ns in operators:
                    total = self._totals[place].setdefault(name.removeprefix("aten::"), [0, 0])
                    total[0] += calls
                    total[1] += ns
        self._looked += 1
        on = {
            "anomaly detection": torch.is_anomaly_enabled(),
            "torch.profiler": torch._C._autograd._profiler_enabled(),
        }
        for setting in (name for name, is_on in on.items() if is_on):
            self._settings[setting] = self._settings.get(setting, 0) + 1
        operators = {place: _longest(totals) for place, totals in self._totals.items()}
        noted = {"operators": operators, "settings": self._settings, "resident": self._resident}
        self._noted = noted | {"gaps": self._gaps.count()}
        self._write()

    def _write(self) -> None:
        notes = json.dumps({**self._noted, **self._look_at_modules()})
        self._names.note({"kind": "steps", "steps": self._looked, "notes": notes})

    def _look_at_modules(self) -> dict[str, Any]:
        """Return which modules have hooks, parameters of float64, or other sizes than others there, and which drop."""
        hooks, doubles, drop, of_gradients = dict[str, int](), list[str](), list[str](), 0
        modules = dict(self._modules.called())
        sizes, known = dict[str, list[int]](), dict[int, int]()
        with unseen_by_modes():
            for fqn, module in modules.items():
                # Not all that is called like a module has this, as what was scripted.
                with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                    if count := len(module._forward_hooks) + len(module._forward_pre_hooks):
                        hooks[fqn] = count
                    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
                        drop.append(fqn)
                    own = [one for one in [*module._parameters.values()] if one is not None]
                    if any(one.dtype == torch.float64 for one in own):
                        doubles.append(fqn)
                    for each in (one._backward_hooks for one in own), (one._post_accumulate_grad_hooks for one in own):
                        of_gradients += sum(len(hooked or ()) for hooked in each)
                    if (place := place_in_lists(fqn, modules)) != fqn:
                        around = modules.get(fqn.rpartition(".")[0], module)
                        sizes.setdefault(place, []).append(_size(module, known) or _size(around, known))
        kept = dict([*hooks.items()][:_MAX_MODULES])
        # Modules of which most have one size are alike: the others may be what is wrong.
        unlike = [place for place, each in sizes.items() if 2 * max(map(each.count, each)) <= len(each) > 2]
        unlike.sort(key=lambda place: place.count("."))
        some = {"doubles": doubles[:_MAX_MODULES], "drop": drop[:_MAX_MODULES], "unlike": unlike[:_MAX_MODULES]}
        return {"hooks": kept, **some, "gradient_hooks": of_gradients}


def _size(module: torch.nn.Module, known: dict[int, int]) -> int:
    """Return how many values a module's parameters have, and those of all inside it, shared ones each time."""
    if id(module) not in known:
        known[id(module)] = 0  # it may hold itself
        own = [one for one in module._parameters.values() if one is not None]
        inner = [one for one in module._modules.values() if one is not None]
        known[id(module)] = sum(one.numel() for one in own) + sum(_size(one, known) for one in inner)
    return known[id(module)]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _longest(totals: Mapping[str, Sequence[int]]) -> list[tuple[str, int, int]]:
    rows = [(name, calls, ns) for name, (calls, ns) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])[:_MAX_OPERATORS]

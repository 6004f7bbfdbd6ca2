"""Notes of few steps, taken while recording: operators, hooks, settings and lines that spans do not show."""

import contextlib
import itertools
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..ring import NameTable
from ..timeline.contents import FLOAT64, place_in_lists
from .event_sink import OnError
from .line_gaps import LineGaps
from .native.engine import NativeEngine
from .optimizer_steps import ids_of_parameters
from .python.engine import PythonEngine
from .python.operators import OperatorCounts
from .sampling import ResidentMemory, RunDelay
from .unseen import skip_all, unseen_by_modes

_MAX_OPERATORS, _MAX_MODULES = 8, 32
"""How many are noted, the longest operators and the first modules."""
_MAX_NS = 30_000_000_000
"""How long operators are counted: that costs up to a tenth of a step, and what is longer is more than a step."""
_BRIEF_NS = 2_000_000_000
"""How long a step lasts at most for the Python engine to count operators between spans: torch notes them until then."""
_PLACES = {-1: "outside", -2: "in_passes", -3: "in_optimizers"}
"""What engines call where no module's operators run."""
_MAX_INSIDE, _MAX_KINDS = 64, 5
"""How many modules are noted with operators, and how many of these each has, the longest."""
_LEAST_DELAY_NS, _MAX_DELAYS = 1_000_000, 64
"""How long a thread has to wait for a processor in a step for that to be noted, and of how many steps, the longest."""
_SLOW, _MAX_SLOW = 2.0, 4
"""How many times as long as the shortest a step lasts for the one as far on to be looked at, and how many are: what
comes each fifth step is in none of the others. It is only seen there between which lines time passes."""
_LEAVES_WITHIN_S = 1.0
"""How long the end waits at most for a thread that notes a step."""
LOOPS = 1_000
"""Rounds of an empty loop that tell how quick Python is here."""
_LARGEST = 80
"""Percent of the values of all parameters that a module has itself for it to be noted."""
_UNITS = {"forward": 0, "backward": 1}
"""What are steps where nothing else ends any: passes, else calls."""


class StepNotes:
    """Looks at the steps 1, 2, 4, 8 …, so that it costs nothing in the others, and notes the sums after each."""

    def __init__(self, names: NameTable, engine: NativeEngine | PythonEngine, on_error: OnError) -> None:
        self._names, self._engine, self._on_error = names, engine, on_error
        self._modules, self._ended_ns = engine.module_names, 0
        self._operators: Any = engine.native if isinstance(engine, NativeEngine) else engine.operators
        self._run_delay, self._resident_bytes = RunDelay(), ResidentMemory()
        self._record: dict[str, object] | None = None
        self._thread: int | None = None
        self._in_use, self._longest_unit = threading.RLock(), -1
        self._begin_anew(-1)
        engine.on_end = self.after_step
        if isinstance(engine, NativeEngine):
            engine.native.limit_outside(_MAX_NS)

    def _begin_anew(self, unit: int) -> None:
        """Forget what was noted, as steps are of this unit."""
        if self._thread is not None:
            self._operators.end_outside()
        self._thread = self._engine.on_boundary = None
        self._unit = unit
        self._last: int | None = None
        self._ended = self._looked = 0
        self._totals: dict[int | str, dict[str, list[int]]] = {place: {} for place in _PLACES}
        self._lengths: dict[str, list[tuple[int, int]]] = {}
        self._settings: dict[str, int] = {}
        self._untrained: dict[str, int] = {}
        self._resident: list[tuple[int, int]] = []
        self._loops_ns: list[int] = []
        self._noted: Mapping[str, object] = {}
        self._looks_of_modules: Mapping[str, object] = {}
        self._delays: list[tuple[int, int]] = []
        self._waited_ns = 0
        self._gaps, self._slow_gaps = LineGaps(self._note_inputs), LineGaps()
        self._in_step: dict[int, str] = {}
        self._inputs: dict[str, list[tuple[int, str]]] = {}
        self._noted_slow: Sequence[object] = ()
        self._looked_slow = self._slow_step = 0
        self._due_step, self._shortest_ns = -1, sys.maxsize

    @skip_all
    def after_step(self, number: int, ended_by: str) -> None:
        """Look at the next step, or note what there was in this, which `ended_by` says; several optimizers may.

        Calls and passes are steps where nothing else ends any: what was noted of them before that is forgotten.
        A step that ends while another thread is in here is not counted, as no thread waits for another; those of what
        is forgotten by then come in no more.
        """
        unit = _UNITS.get(ended_by, len(_UNITS))
        self._longest_unit = max(self._longest_unit, unit)
        if unit < self._longest_unit or self._in_use._is_owned():  # type: ignore[attr-defined]  # in a signal's handler
            return
        try:
            if not self._in_use.acquire(blocking=False):
                return
            if unit > self._unit:
                self._begin_anew(unit)
            if unit < self._unit or number == self._last or self._thread not in (None, threading.get_ident()):
                return
            self._last, now = number, time.monotonic_ns()
            step_ns, self._ended_ns = now - self._ended_ns, now
            waited_ns = self._run_delay()
            if ended_by in _UNITS:
                self._waited_ns += waited_ns
            elif waited_ns >= _LEAST_DELAY_NS:
                self._delays = sorted([*self._delays, (waited_ns, number)], reverse=True)[:_MAX_DELAYS]
            if self._thread is None:
                self._foresee(step_ns, ended_by)
            elif _is_looked_at(self._ended):
                self._note(ended_by)
            else:
                self._note_slow(step_ns, ended_by)
            self._ended = number if ended_by in _UNITS else self._ended + 1
            if _is_looked_at(self._ended):
                self._thread = threading.get_ident()
                if held := self._resident_bytes():
                    self._resident.append((self._ended, held))
                self._engine.on_boundary = self._gaps
                if isinstance(self._operators, OperatorCounts):
                    self._operators.is_whole = ended_by not in _UNITS and step_ns <= _BRIEF_NS
                self._operators.begin_outside(self._gaps)
                self._gaps.begin(ended_by)
            elif self._due_step == self._ended:
                self._looked_slow += 1
                self._thread = threading.get_ident()
                self._engine.on_boundary = self._slow_gaps
                if not isinstance(self._operators, OperatorCounts):  # the native engine tells boundaries so
                    self._operators.begin_outside(self._slow_gaps)
                self._slow_gaps.begin(ended_by)
        except Exception as error:
            self._thread = None
            self._on_error(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let others in; also where an exception of a signal's handler comes right after this thread came in."""
        if self._in_use._is_owned():  # type: ignore[attr-defined]
            self._in_use.release()

    def close(self) -> None:
        """Close what it reads from, unless a thread still does; no step is looked at any more."""
        if self._in_use.acquire(blocking=False):
            self._run_delay.close()
            self._resident_bytes.close()

    @skip_all
    def finish(self) -> None:
        """Note, last of all, the slow steps since the last look, and what modules are like where no step has ended.

        This thread stays in, so that no other notes anything after it.
        """
        if self._in_use._is_owned():  # type: ignore[attr-defined]  # in a signal's handler
            return
        try:
            if not self._in_use.acquire(timeout=_LEAVES_WITHIN_S):
                return
            if not self._looks_of_modules:  # those of the last look may be gone by now
                self._looks_of_modules = self._look_at_modules()
            if self._unit in _UNITS.values():
                self._waited_ns += self._run_delay()
            self._write()
        except Exception as error:
            self._on_error(error)

    def _foresee(self, step_ns: int, ended_by: str) -> None:
        """If the step that ends is slow, take the one as far on as it was from the last slow one for the next."""
        if ended_by in _UNITS or not self._ended:  # there it began with the recording
            return
        self._shortest_ns = min(self._shortest_ns, step_ns)
        if step_ns >= _SLOW * self._shortest_ns and self._looked_slow < _MAX_SLOW:
            self._due_step, self._slow_step = 2 * self._ended - self._slow_step, self._ended

    def _note_slow(self, step_ns: int, ended_by: str) -> None:
        self._thread = self._engine.on_boundary = None
        self._slow_gaps.end(ended_by)
        if not isinstance(self._operators, OperatorCounts):
            self._operators.end_outside()
        if step_ns >= _SLOW * self._shortest_ns:
            self._noted_slow = self._slow_gaps.count()
        self._foresee(step_ns, ended_by)

    def _note(self, ended_by: str) -> None:
        self._thread = self._engine.on_boundary = None
        self._gaps.end(ended_by)
        if (counted := self._operators.end_outside()) is None:
            self._looks_of_modules = self._look_at_modules()
            self._write()
            return
        for place, name, calls, ns in counted:
            where = place if place in _PLACES else self._modules.fqn(place)
            total = self._totals.setdefault(where, {}).setdefault(name.removeprefix("aten::"), [0, 0])
            total[0] += calls
            total[1] += ns
        self._looked += 1
        on = {
            "anomaly detection": torch.is_anomaly_enabled(),
            "torch.profiler": torch._C._autograd._profiler_enabled(),
        }
        for setting in (name for name, is_on in on.items() if is_on):
            self._settings[setting] = self._settings.get(setting, 0) + 1
        operators = {name: _longest(self._totals[place], _MAX_OPERATORS) for place, name in _PLACES.items()}
        self._loops_ns.append(_loops_ns())
        noted = {"operators": operators, "settings": self._settings, "resident": self._resident}
        noted |= {"loops_ns": min(self._loops_ns)}
        noted |= {"inside": self._operators_inside(), "lengthen": self._look_at_lengths(), "inputs": self._add_inputs()}
        self._noted = noted | {"gaps": self._gaps.count()}
        self._looks_of_modules = self._look_at_modules()
        self._write()

    def _write(self) -> None:
        delays = [(number, waited_ns) for waited_ns, number in self._delays]
        of_all = {"delays": delays, "waited_ns": self._waited_ns, "slow_gaps": self._noted_slow}
        notes = json.dumps({**self._noted, **self._looks_of_modules, **of_all})
        record = {"kind": "steps", "steps": self._looked, "notes": notes}
        self._names.note(record)
        if self._record is not None:
            self._names.forget(self._record)
        self._record = record

    def _note_inputs(self, module: object, inputs: tuple[Any, ...]) -> None:
        """Note the shapes of what the first call of a module in a step gets, if it is in no other."""
        if id(module) not in self._in_step and len(self._in_step) < _MAX_OPERATORS:
            with unseen_by_modes():
                self._in_step[id(module)] = _shapes(inputs)

    def _add_inputs(self) -> dict[str, list[tuple[int, str]]]:
        """Return the shapes of what modules got in the steps that were looked at, with how many ended before."""
        for fqn, module in self._modules.called():
            if (shapes := self._in_step.get(id(module))) and (fqn in self._inputs or len(self._inputs) < _MAX_MODULES):
                self._inputs.setdefault(fqn, []).append((self._ended, shapes))
        self._in_step.clear()
        return self._inputs

    def _operators_inside(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return all operators together, without a name, all of float64, and the longest, of the longest modules."""
        inside = list[tuple[int, str, list[tuple[str, int, int]]]]()
        for fqn, totals in self._totals.items():
            if isinstance(fqn, str):
                calls, ns = (sum(each) for each in zip(*totals.values(), strict=True))
                rows = [("", calls, ns)]
                if doubles := [total for name, total in totals.items() if name.endswith(FLOAT64)]:
                    rows.append((FLOAT64, sum(count for count, _ in doubles), sum(took for _, took in doubles)))
                inside.append((-ns, fqn, [*rows, *_longest(totals, _MAX_KINDS)]))
        return {fqn: operators for _, fqn, operators in sorted(inside)[:_MAX_INSIDE]}

    def _look_at_lengths(self) -> dict[str, list[tuple[int, int]]]:
        """Return how long lists and the like of modules and of the program are, of those that grew until each look."""
        holders = {fqn: vars(module) for fqn, module in self._modules.called() if hasattr(module, "__dict__")}
        main = sys.modules.get("__main__")
        holders |= {"__main__": vars(main)} if main is not None else {}
        for fqn, names in holders.items():
            for name, value in [*names.items()]:
                if type(value) in (list, dict, deque):
                    own = (
                        self._lengths.setdefault(f"{fqn}.{name}", [])
                        if self._looked == 1
                        else (self._lengths.get(f"{fqn}.{name}", []))
                    )
                    own.append((self._ended + 1, len(value)))
        self._lengths = {
            name: own
            for name, own in self._lengths.items()
            if len(own) == self._looked and (len(own) == 1 or own[-1][1] > own[-2][1])
        }
        return {} if self._looked == 1 else dict([*self._lengths.items()][:_MAX_OPERATORS])

    def _look_at_modules(self) -> dict[str, Any]:
        """Return which modules have hooks, parameters of float64, or other sizes than others there, and which drop."""
        hooks, doubles, tables, drop, of_gradients = dict[str, int](), list[str](), list[str](), list[str](), 0
        before, self._untrained, trained, is_any_trained = self._untrained, {}, ids_of_parameters(), False
        modules = dict(self._modules.called())
        sizes, known, values, in_float64 = dict[str, dict[str, int]](), dict[int, int](), dict[str, int](), 0
        with unseen_by_modes():
            for fqn, module in modules.items():
                # Not all that is called like a module has this, as what was scripted.
                with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                    if count := len(module._forward_hooks) + len(module._forward_pre_hooks):
                        hooks[fqn] = count
                    if module.training and (
                        module.p > 0
                        if isinstance(module, _DropoutNd)
                        else isinstance(module, _BatchNorm) and module.track_running_stats
                    ):
                        drop.append(fqn)
                    own = [one for one in [*module._parameters.values()] if one is not None]
                    if any(one.dtype == torch.float64 for one in own):
                        doubles.append(fqn)
                    elif any(map(_is_double, [*module._buffers.values(), *vars(module).values()])):
                        tables.append(fqn)
                    # Their gradients are not asked for: another thread's backward pass may be writing them.
                    given = [one for one in own if one.requires_grad and one.is_leaf]
                    is_any_trained |= not (is_untrained := trained.isdisjoint(map(id, given)))
                    if given and is_untrained:
                        self._untrained[fqn] = sum(one._version for one in given)
                    for each in (one._backward_hooks for one in own), (one._post_accumulate_grad_hooks for one in own):
                        of_gradients += sum(len(hooked or ()) for hooked in each)
                    if (place := place_in_lists(fqn, modules)) != fqn:
                        around = modules.get(fqn.rpartition(".")[0], module)
                        sizes.setdefault(place, {})[fqn] = _size(module, known) or _size(around, known)
                    values[fqn] = sum(one.numel() for one in own)
                    in_float64 += sum(one.numel() for one in own if one.dtype == torch.float64)
        kept = dict([*hooks.items()][:_MAX_MODULES])
        # Modules of which most have one size are alike: the others may be what is wrong.
        most = {place: Counter(each.values()).most_common(1)[0] for place, each in sizes.items()}
        unlike = [place for place, each in sizes.items() if 2 * most[place][1] <= len(each) > 2]
        percent = {
            fqn: 100 * size // most[place][0]
            for place, each in sizes.items()
            for fqn, size in each.items()
            if size != most[place][0] > 0 and place not in unlike and known[id(modules[fqn])]
        }
        unlike.sort(key=lambda place: place.count("."))
        # Nothing has written these since the last look either. Where none is known, optimizers have copies.
        untrained = [fqn for fqn, version in self._untrained.items() if is_any_trained and before.get(fqn) == version]
        some = {"doubles": doubles, "tables": tables, "drop": drop, "unlike": unlike}
        some = {name: fqns[:_MAX_MODULES] for name, fqns in some.items()} | {"untrained": untrained[:_MAX_INSIDE]}
        some["casts"] = self._look_at_casts(modules)
        whole = max(sum(values.values()), 1)
        largest = {fqn: 100 * count // whole for fqn, count in values.items() if 100 * count >= _LARGEST * whole}
        looked = {"hooks": kept, **some, "gradient_hooks": of_gradients, "largest": largest}
        looked["size_percent"] = dict([*percent.items()][:_MAX_MODULES])
        return looked | {"parameters": sum(values.values()), "float64_parameters": in_float64}

    def _look_at_casts(self, modules: Mapping[str, torch.nn.Module]) -> list[str]:
        """Return the modules around those that were called without gradients after nodes were made, outermost first."""
        without = self._engine.reruns.called_without_graph()
        names = [fqn.split(".") for fqn, module in modules.items() if id(module) in without]
        around = {".".join(each[:depth]) for each in names for depth in range(1, len(each))}
        return sorted(around, key=lambda fqn: (fqn.count("."), fqn))[:_MAX_INSIDE]


def _is_looked_at(ended: int) -> bool:
    """Whether the step after so many is, one of each power of two."""
    return ended & (ended - 1) == 0


def _size(module: torch.nn.Module, known: dict[int, int]) -> int:
    """Return how many values a module's parameters have, and those of all inside it, shared ones each time."""
    if id(module) not in known:
        known[id(module)] = 0  # it may hold itself
        own = [one for one in module._parameters.values() if one is not None]
        inner = [one for one in module._modules.values() if one is not None]
        known[id(module)] = sum(one.numel() for one in own) + sum(_size(one, known) for one in inner)
    return known[id(module)]


def _is_double(value: object) -> bool:
    """Whether this is a tensor of float64 that makes others be so: one without dimensions does not."""
    return type(value) is torch.Tensor and value.dtype == torch.float64 and value.dim() > 0


def _shapes(values: Sequence[object]) -> str:
    """Return the shapes and dtypes of tensors, also of those in lists and dictionaries, but for classes of users.

    And to what autocast casts them there, if it is on.
    """
    inner: list[object] = []
    for value in values[:_MAX_OPERATORS]:
        held: Any = value if type(value) in (tuple, list, dict) else [value]
        inner += itertools.islice(held.values() if type(held) is dict else held, _MAX_OPERATORS)
    tensors = [one for one in inner if type(one) is torch.Tensor]
    texts = [f"{_name(one.dtype)}{list(one.shape)}" for one in tensors[:_MAX_OPERATORS]]
    device = tensors[0].device.type if tensors else "cpu"
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        texts.append(f"autocast to {_name(torch.get_autocast_dtype(device))}")
    return ", ".join(texts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _loops_ns() -> int:
    """Return what Python takes for `LOOPS`, in nanoseconds."""
    began = time.monotonic_ns()
    for _ in range(LOOPS):
        pass
    return time.monotonic_ns() - began


def _longest(totals: Mapping[str, Sequence[int]], limit: int) -> list[tuple[str, int, int]]:
    rows = [(name, calls, ns) for name, (calls, ns) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])[:limit]

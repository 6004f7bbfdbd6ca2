"""Notes on a few sampled steps, taken while recording: operators, hooks, settings and lines that spans do not show."""

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

from .._interrupts import without_errors_of_users
from ..ring import NameTable
from ..timeline.contents import FLOAT64, MIN_CALLS_IN_STEP, is_sampled_step, place_in_lists
from .event_sink import OnError
from .line_gaps import LineGaps
from .native.engine import NativeEngine
from .optimizer_steps import ids_of_parameters
from .python.engine import PythonEngine
from .python.operators import OperatorCounts
from .sampling import RepeatedCalls, ResidentMemory, RunDelay, dtype_name, shape_text
from .unseen import attribute_of, skip_all, unseen_by_modes

_MAX_OPERATORS, _MAX_MODULES = 8, 32
"""Maximum number of operators (the longest) and of modules (the first) in one list of the notes."""
_MAX_NS = 30_000_000_000
"""Maximum time for which operators of a step are counted: counting costs up to a tenth of that time."""
_MAX_SHORT_STEP_NS = 2_000_000_000
"""Maximum duration of a step in which the Python engine counts operators between spans: torch buffers them."""
_CONTEXT_BY_ID = {-1: "outside", -2: "in_passes", -3: "in_optimizers"}
"""Contexts outside all modules in which operators run, by the ids that the engines use."""
_MAX_OPERATOR_MODULES, _MAX_MODULE_OPERATORS = 64, 5
"""Maximum number of modules with operators in the notes, and of operators for each; the longest are noted."""
_MIN_DELAY_NS, _MAX_DELAYS = 1_000_000, 64
"""Minimum time of a step in which its thread waited for a CPU, and maximum number of such steps in the notes."""
_SLOW_RATIO, _MAX_SLOW_STEPS = 2.0, 4
"""A step that lasts `_SLOW_RATIO` times the shortest schedules a sample of the step at the same distance ahead. Only
the lines of such steps are noted, of at most `_MAX_SLOW_STEPS`. So a delay in each fifth step is found."""
_MAX_FINISH_WAIT_S = 1.0
"""Maximum time that `finish` waits for a thread that writes notes."""
LOOPS = 1_000
"""Rounds of the empty loop that measures the speed of Python here."""
_MIN_PERCENT = 80
"""Minimum share of all parameter values that a module holds itself for the notes to name it."""
_Lengths = dict[str, list[tuple[int, int]]]
"""Numbers of values, each with the number of the step that had it, by the name of what has them."""
_UNITS = {"forward": 0, "backward": 1}
"""Events that end a step if no optimizer and no mark does: backward passes, or else calls. Higher numbers win."""


class StepNotes:
    """Samples the steps 1, 2, 4, 8 … and writes the sums after each; other steps cost nothing."""

    def __init__(self, names: NameTable, engine: NativeEngine | PythonEngine, on_error: OnError) -> None:
        self._names, self._engine, self._on_error = names, engine, on_error
        self._modules, self._ended_ns = engine.module_names, 0
        self._operators: Any = engine.native if isinstance(engine, NativeEngine) else engine.operators
        self._read_run_delay, self._read_resident_bytes = RunDelay(), ResidentMemory()
        self._record: dict[str, object] | None = None
        self._thread: int | None = None
        self._in_use, self._longest_unit = threading.RLock(), -1
        self._restart(-1)
        engine.on_end = self.after_step
        if isinstance(engine, NativeEngine):
            engine.native.limit_outside(_MAX_NS)

    def _restart(self, unit: int) -> None:
        """Forget all samples: from now on steps are of this unit."""
        if self._thread is not None:
            self._operators.end_outside()
        self._thread = self._engine.on_boundary = None
        self._unit = unit
        self._last_number: int | None = None
        self._ended = self._sample_count = 0
        self._totals: dict[int | str, dict[str, list[int]]] = {context_id: {} for context_id in _CONTEXT_BY_ID}
        self._lengths, self._tensor_lengths = _Lengths(), _Lengths()
        self._settings: dict[str, int] = {}
        self._untrained_versions: dict[str, int] = {}
        self._resident_samples: list[tuple[int, int]] = []
        self._loops_ns: list[int] = []
        self._operator_notes: Mapping[str, object] = {}
        self._module_notes: Mapping[str, object] = {}
        self._delays: list[tuple[int, int]] = []
        self._waited_ns = 0
        self._sampling_ns: list[tuple[int, int]] = []
        self._repeated_calls, self._same_inputs = RepeatedCalls(), dict[str, int]()
        repeated_calls = self._repeated_calls
        self._gaps = LineGaps(self._note_shapes, repeated_calls.note, repeated_calls.forget_inputs)
        self._slow_gaps = LineGaps()
        self._shapes_by_module: dict[int, str] = {}
        self._later_shapes_by_module: dict[int, tuple[int, str]] = {}
        self._inputs: dict[str, list[tuple[int, str]]] = {}
        self._changing_inputs: dict[str, list[tuple[int, str, str]]] = {}
        self._slow_gap_rows: Sequence[object] = ()
        self._slow_sample_count = self._slow_step = 0
        self._due_step, self._shortest_ns = -1, sys.maxsize

    @skip_all
    def after_step(self, number: int, ended_by: str) -> None:
        """Finish the sample of step `number`, and start one if the next step is sampled; optimizers may share a step.

        Calls and passes count as steps only until `ended_by` is something else: then their samples are forgotten.
        A step that ends while another thread runs this method is not counted, since no thread waits for another.
        """
        unit = _UNITS.get(ended_by, len(_UNITS))
        self._longest_unit = max(self._longest_unit, unit)
        if unit < self._longest_unit or self._in_use._is_owned():  # type: ignore[attr-defined]  # in a signal's handler
            return
        try:
            if not self._in_use.acquire(blocking=False):
                return
            if unit > self._unit:
                self._restart(unit)
            if unit < self._unit or number == self._last_number or self._thread not in (None, threading.get_ident()):
                return
            self._last_number, now = number, time.monotonic_ns()
            step_ns, self._ended_ns = now - self._ended_ns, now
            waited_ns = self._read_run_delay()
            if ended_by in _UNITS:
                self._waited_ns += waited_ns
            elif waited_ns >= _MIN_DELAY_NS:
                self._delays = sorted([*self._delays, (waited_ns, number)], reverse=True)[:_MAX_DELAYS]
            if self._thread is None:
                self._schedule_slow_sample(step_ns, ended_by)
            elif is_sampled_step(self._ended):
                self._note(ended_by)
                self._sampling_ns.append((number, time.monotonic_ns() - now))
            else:
                self._note_slow(step_ns, ended_by)
            self._ended = number if ended_by in _UNITS else self._ended + 1
            if is_sampled_step(self._ended):
                self._thread = threading.get_ident()
                if resident_bytes := self._read_resident_bytes():
                    self._resident_samples.append((self._ended, resident_bytes))
                self._repeated_calls.begin()
                self._engine.on_boundary = self._gaps
                if isinstance(self._operators, OperatorCounts):
                    self._operators.counts_gaps = ended_by not in _UNITS and step_ns <= _MAX_SHORT_STEP_NS
                self._operators.begin_outside(self._gaps)
                self._gaps.begin(ended_by)
            elif self._due_step == self._ended:
                self._slow_sample_count += 1
                self._thread = threading.get_ident()
                self._engine.on_boundary = self._slow_gaps
                if not isinstance(self._operators, OperatorCounts):  # so the native engine reports boundaries
                    self._operators.begin_outside(self._slow_gaps)
                self._slow_gaps.begin(ended_by)
        except Exception as error:
            self._thread = None
            self._on_error(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Release the lock, if this thread holds it: a signal's handler may have raised just after it was acquired."""
        if self._in_use._is_owned():  # type: ignore[attr-defined]
            self._in_use.release()

    def close(self) -> None:
        """Close the files in `/proc`, unless a thread still reads them; no step is sampled any more."""
        if self._in_use.acquire(blocking=False):
            self._read_run_delay.close()
            self._read_resident_bytes.close()

    @skip_all
    def finish(self) -> None:
        """Write the last notes: slow steps since the last sample, and the modules if no step has ended.

        This thread keeps the lock, so that no other thread writes notes after it.
        """
        if self._in_use._is_owned():  # type: ignore[attr-defined]  # in a signal's handler
            return
        try:
            if not self._in_use.acquire(timeout=_MAX_FINISH_WAIT_S):
                return
            if not self._module_notes:  # else keep the notes of the last sample: the modules may be gone by now
                self._module_notes = self._describe_modules()
            if self._unit in _UNITS.values():
                self._waited_ns += self._read_run_delay()
            self._write()
        except Exception as error:
            self._on_error(error)

    def _schedule_slow_sample(self, step_ns: int, ended_by: str) -> None:
        """If the step that ends is slow, sample the step that follows it at the distance of the last two slow steps."""
        if ended_by in _UNITS or not self._ended:  # the first step started with the recording
            return
        self._shortest_ns = min(self._shortest_ns, step_ns)
        if step_ns >= _SLOW_RATIO * self._shortest_ns and self._slow_sample_count < _MAX_SLOW_STEPS:
            self._due_step, self._slow_step = 2 * self._ended - self._slow_step, self._ended

    def _note_slow(self, step_ns: int, ended_by: str) -> None:
        self._thread = self._engine.on_boundary = None
        self._slow_gaps.end(ended_by)
        if not isinstance(self._operators, OperatorCounts):
            self._operators.end_outside()
        if step_ns >= _SLOW_RATIO * self._shortest_ns:
            self._slow_gap_rows = self._slow_gaps.count()
        self._schedule_slow_sample(step_ns, ended_by)

    def _note(self, ended_by: str) -> None:
        self._thread = self._engine.on_boundary = None
        self._gaps.end(ended_by)
        repeated = self._repeated_calls.end()
        if (counted := self._operators.end_outside()) is None:
            self._module_notes = self._describe_modules()
            self._write()
            return
        for context_id, name, calls, ns in counted:
            key = context_id if context_id in _CONTEXT_BY_ID else self._modules.fqn(context_id)
            total = self._totals.setdefault(key, {}).setdefault(name.removeprefix("aten::"), [0, 0])
            total[0] += calls
            total[1] += ns
        self._sample_count += 1
        self._add_repeated(repeated)
        settings = {
            "anomaly detection": torch.is_anomaly_enabled(),
            "torch.profiler": torch._C._autograd._profiler_enabled(),
        }
        for setting in (name for name, is_on in settings.items() if is_on):
            self._settings[setting] = self._settings.get(setting, 0) + 1
        self._loops_ns.append(_loops_ns())
        self._note_lengths()
        operators = {n: _longest_operators(self._totals[k], _MAX_OPERATORS) for k, n in _CONTEXT_BY_ID.items()}
        if isinstance(self._operators, OperatorCounts) and not (self._operators.counts_gaps or operators["outside"]):
            del operators["outside"]  # none was counted, which does not mean that none ran
        self._operator_notes = {
            "operators": operators,
            "settings": self._settings,
            "resident": self._resident_samples,
            "loops_ns": min(self._loops_ns),
            "inside": self._operators_by_module(),
            "lengthen": self._first_lengths(self._lengths),
            "tensors_lengthen": self._first_lengths(self._tensor_lengths),
            "inputs": self._add_shapes(),
            "changing_inputs": self._changing_inputs,
            "same_inputs": self._same_inputs,
            "gaps": self._gaps.count(),
        }
        self._module_notes = self._describe_modules()
        self._write()

    def _write(self) -> None:
        delays = [(number, waited_ns) for waited_ns, number in self._delays]
        step_notes = {
            "delays": delays,
            "waited_ns": self._waited_ns,
            "sampling_ns": self._sampling_ns,
            "slow_gaps": self._slow_gap_rows,
        }
        notes = json.dumps({**self._operator_notes, **self._module_notes, **step_notes})
        record = {"kind": "steps", "steps": self._sample_count, "notes": notes}
        self._names.note(record)
        if self._record is not None:
            self._names.forget(self._record)
        self._record = record

    def _note_shapes(self, module: object, inputs: tuple[Any, ...]) -> None:
        """Note the shapes of the inputs of a module's first and last call in a step, if outermost: see `LineGaps`."""
        module_id, shapes_by_module = id(module), self._shapes_by_module
        if module_id in shapes_by_module or len(shapes_by_module) < _MAX_OPERATORS:
            with unseen_by_modes():
                shapes = _shapes(inputs)
            if shapes_by_module.setdefault(module_id, shapes) is not shapes:
                calls, _ = self._later_shapes_by_module.get(module_id, (1, ""))
                self._later_shapes_by_module[module_id] = calls + 1, shapes

    def _add_shapes(self) -> dict[str, list[tuple[int, str]]]:
        """Return the shapes of inputs in all sampled steps, each with the number of steps that ended before."""
        for fqn, module in self._modules.called():
            if (shapes := self._shapes_by_module.get(id(module))) and (
                fqn in self._inputs or len(self._inputs) < _MAX_MODULES
            ):
                self._inputs.setdefault(fqn, []).append((self._ended, shapes))
                calls, last_shapes = self._later_shapes_by_module.get(id(module), (1, shapes))
                if calls >= MIN_CALLS_IN_STEP and last_shapes != shapes:
                    self._changing_inputs.setdefault(fqn, []).append((calls, shapes, last_shapes))
        self._shapes_by_module.clear()
        self._later_shapes_by_module.clear()
        return self._inputs

    def _add_repeated(self, repeated: Mapping[int, int]) -> None:
        """Add the number of repeated calls in a sampled step, by module."""
        for fqn, module in self._modules.called() if repeated else ():
            count = repeated.get(id(module), 0)
            if count and (fqn in self._same_inputs or len(self._same_inputs) < _MAX_MODULES):
                self._same_inputs[fqn] = self._same_inputs.get(fqn, 0) + count

    def _operators_by_module(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return rows of the longest modules: all operators (named ""), those on float64, and the longest ones."""
        inside = list[tuple[int, str, list[tuple[str, int, int]]]]()
        for fqn, totals in self._totals.items():
            if isinstance(fqn, str):
                calls, ns = map(sum, zip(*totals.values(), strict=True))
                rows = [("", calls, ns)]
                if doubles := [total for name, total in totals.items() if name.endswith(FLOAT64)]:
                    double_calls, double_ns = map(sum, zip(*doubles, strict=True))
                    rows.append((FLOAT64, double_calls, double_ns))
                inside.append((-ns, fqn, [*rows, *_longest_operators(totals, _MAX_MODULE_OPERATORS)]))
        return {fqn: operators for _, fqn, operators in sorted(inside)[:_MAX_OPERATOR_MODULES]}

    def _note_lengths(self) -> None:
        """Note the lengths of containers and tensors of modules and the program that grew before every sample."""
        holders = {fqn: attribute_of(module, "__dict__") or {} for fqn, module in self._modules.called()}
        main = sys.modules.get("__main__")
        holders |= {"__main__": vars(main)} if main is not None else {}
        for fqn, attributes in holders.items():
            for name, value in [*attributes.items()]:
                if type(name) is not str:  # code of the user would turn it into text
                    continue
                is_tensor = type(value) is torch.Tensor
                lengths_by_name = self._tensor_lengths if is_tensor else self._lengths
                if is_tensor or type(value) in (list, dict, deque):
                    if self._sample_count == 1:
                        lengths_by_name[f"{fqn}.{name}"] = []
                    if (lengths := lengths_by_name.get(f"{fqn}.{name}")) is not None:
                        with unseen_by_modes():
                            lengths.append((self._ended + 1, value.numel() if is_tensor else len(value)))
        self._lengths, self._tensor_lengths = map(self._growing, (self._lengths, self._tensor_lengths))

    def _growing(self, lengths_by_name: _Lengths) -> _Lengths:
        """Return the lengths of what has grown since the last sample."""
        return {
            name: lengths
            for name, lengths in lengths_by_name.items()
            if len(lengths) == self._sample_count and (len(lengths) == 1 or lengths[-1][1] > lengths[-2][1])
        }

    def _first_lengths(self, lengths_by_name: _Lengths) -> _Lengths:
        return {} if self._sample_count == 1 else dict([*lengths_by_name.items()][:_MAX_OPERATORS])

    def _describe_modules(self) -> dict[str, Any]:
        """Return the modules with hooks, float64 tensors, dropout, unusual sizes, or parameters that nothing trains."""
        hooks, doubles, tables, drop = dict[str, int](), list[str](), list[str](), list[str]()
        last_versions, self._untrained_versions = self._untrained_versions, {}
        trained_ids, is_any_trained = ids_of_parameters(), False
        modules = dict(self._modules.called())
        sizes, known_sizes, values = dict[str, dict[str, int]](), dict[int, int](), dict[str, int]()
        gradient_hooks = float64_values = 0
        with unseen_by_modes():
            for fqn, module in modules.items():
                # Some modules, such as scripted ones, lack these attributes.
                # `isinstance` would read the `__class__` of the object.
                with without_errors_of_users():
                    module_class = type(module)
                    if count := len(attribute_of(module, "_forward_hooks")) + len(
                        attribute_of(module, "_forward_pre_hooks")
                    ):
                        hooks[fqn] = count
                    if attribute_of(module, "training") and (
                        attribute_of(module, "p") > 0
                        if issubclass(module_class, _DropoutNd)
                        else issubclass(module_class, _BatchNorm) and attribute_of(module, "track_running_stats")
                    ):
                        drop.append(fqn)
                    parameters = [
                        value for value in [*attribute_of(module, "_parameters").values()] if value is not None
                    ]
                    if any(parameter.dtype == torch.float64 for parameter in parameters):
                        doubles.append(fqn)
                    elif any(
                        map(
                            _is_double,
                            [*attribute_of(module, "_buffers").values(), *attribute_of(module, "__dict__").values()],
                        )
                    ):
                        tables.append(fqn)
                    # Gradients are not read: another thread's backward pass may be writing them.
                    trainable = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
                    is_any_trained |= not (is_untrained := trained_ids.isdisjoint(map(id, trainable)))
                    if trainable and is_untrained:
                        self._untrained_versions[fqn] = sum(parameter._version for parameter in trainable)
                    for parameter in parameters:
                        gradient_hooks += len(parameter._backward_hooks or ())
                        gradient_hooks += len(parameter._post_accumulate_grad_hooks or ())
                        float64_values += parameter.numel() if parameter.dtype == torch.float64 else 0
                    if (pattern := place_in_lists(fqn, modules)) != fqn:
                        parent = modules.get(fqn.rpartition(".")[0], module)
                        sizes.setdefault(pattern, {})[fqn] = _size(module, known_sizes) or _size(parent, known_sizes)
                    values[fqn] = sum(parameter.numel() for parameter in parameters)
        # Modules at like places are alike if most have one size: another size may be the fault.
        size_counts = {pattern: Counter(by_fqn.values()).most_common(1)[0] for pattern, by_fqn in sizes.items()}
        unlike = [pattern for pattern, by_fqn in sizes.items() if 2 * size_counts[pattern][1] <= len(by_fqn) > 2]
        percent = {
            fqn: 100 * size // size_counts[pattern][0]
            for pattern, by_fqn in sizes.items()
            for fqn, size in by_fqn.items()
            if size != size_counts[pattern][0] > 0 and pattern not in unlike and known_sizes[id(modules[fqn])]
        }
        unlike.sort(key=lambda pattern: pattern.count("."))
        # No code has written these since the last sample. If no parameter is known, optimizers hold copies.
        versions = self._untrained_versions.items() if is_any_trained else ()
        untrained = [fqn for fqn, version in versions if last_versions.get(fqn) == version]
        fqn_lists = {"doubles": doubles, "tables": tables, "drop": drop, "unlike": unlike}
        total = max(sum(values.values()), 1)
        return {
            "hooks": dict([*hooks.items()][:_MAX_MODULES]),
            **{key: fqns[:_MAX_MODULES] for key, fqns in fqn_lists.items()},
            "untrained": untrained[:_MAX_OPERATOR_MODULES],
            "casts": self._find_casting_modules(modules),
            "gradient_hooks": gradient_hooks,
            "largest": {fqn: 100 * n // total for fqn, n in values.items() if 100 * n >= _MIN_PERCENT * total},
            "size_percent": dict([*percent.items()][:_MAX_MODULES]),
            "parameters": sum(values.values()),
            "float64_parameters": float64_values,
        }

    def _find_casting_modules(self, modules: Mapping[str, torch.nn.Module]) -> list[str]:
        """Return the parents of modules that were called without gradients after a node was made, outermost first."""
        module_ids = self._engine.reruns.called_without_graph()
        paths = [fqn.split(".") for fqn, module in modules.items() if id(module) in module_ids]
        parents = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}
        return sorted(parents, key=lambda fqn: (fqn.count("."), fqn))[:_MAX_OPERATOR_MODULES]


def _size(module: torch.nn.Module, known_sizes: dict[int, int]) -> int:
    """Return the number of values in the parameters of a module and its inner modules; shared ones count each time."""
    if id(module) not in known_sizes:
        known_sizes[id(module)] = 0  # it may hold itself
        size = sum(
            parameter.numel() for parameter in attribute_of(module, "_parameters").values() if parameter is not None
        )
        size += sum(
            _size(inner, known_sizes) for inner in attribute_of(module, "_modules").values() if inner is not None
        )
        known_sizes[id(module)] = size
    return known_sizes[id(module)]


def _is_double(value: object) -> bool:
    """Return whether a value is a float64 tensor that promotes its results: one without dimensions does not."""
    return type(value) is torch.Tensor and value.dtype == torch.float64 and value.dim() > 0


def _shapes(values: Sequence[object]) -> str:
    """Return the dtypes and shapes of tensors, also in plain lists and dicts, and the dtype of an active autocast."""
    items: list[object] = []
    for value in values[:_MAX_OPERATORS]:
        container: Any = value if type(value) in (tuple, list, dict) else [value]
        items += itertools.islice(container.values() if type(container) is dict else container, _MAX_OPERATORS)
    tensors = [item for item in items if type(item) is torch.Tensor]
    texts = [shape_text(tensor) for tensor in tensors[:_MAX_OPERATORS]]
    device = tensors[0].device.type if tensors else "cpu"
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        texts.append(f"autocast to {dtype_name(torch.get_autocast_dtype(device))}")
    return ", ".join(texts)


def _loops_ns() -> int:
    """Return the duration of `LOOPS` rounds of an empty loop, in ns."""
    start_ns = time.monotonic_ns()
    for _ in range(LOOPS):
        pass
    return time.monotonic_ns() - start_ns


def _longest_operators(totals: Mapping[str, Sequence[int]], limit: int) -> list[tuple[str, int, int]]:
    rows = [(name, calls, ns) for name, (calls, ns) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])[:limit]

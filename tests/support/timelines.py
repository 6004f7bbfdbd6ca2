"""Timelines without a recording: a GPT-2 at work, and whatever hypothesis draws."""

from __future__ import annotations

import numpy as np

from modtrace.timeline import BACKWARD, FORWARD, Columns, Mark, Name, Process, Stats, Timeline, Track
from modtrace.timeline._columns import in_start_order

__all__ = ["gpt2_timeline"]

EPOCH = 1_755_000_000_123_456_789


def gpt2_timeline(spans: int, layers: int = 12, seed: int = 0) -> Timeline:
    """At least `spans` spans of training steps of a GPT-2: module names as the real one has, µs-scale random times."""
    names, parents = _gpt2(layers)
    modules = len(names)
    steps = -(-spans // (2 * modules))
    random = np.random.default_rng(seed)
    first = _pass(parents, [*range(modules)])
    # Backward visits the modules in the mirrored order, and takes about twice as long.
    mirrored = _pass(parents, _mirrored(parents))
    parts = []
    clock = EPOCH
    for step in range(steps):
        for phase, order, scale in ((FORWARD, first, 1), (BACKWARD, mirrored, 2)):
            gaps = random.integers(2_000, 24_000 * scale, len(order))
            moments = clock + np.cumsum(gaps)
            clock = int(moments[-1]) + 50_000
            enter, leave = np.empty(modules, np.int64), np.empty(modules, np.int64)
            kinds = np.array([kind for kind, _ in order])
            which = np.array([module for _, module in order])
            enter[which[kinds == 0]] = moments[kinds == 0]
            leave[which[kinds == 1]] = moments[kinds == 1]
            parts.append((enter, leave, phase, step))
    depth = np.zeros(modules, np.int32)
    for module in range(1, modules):
        depth[module] = depth[parents[module]] + 1
    repeat = len(parts)
    offset = np.repeat(np.arange(repeat), modules) * modules
    parent = np.tile(np.array(parents), repeat)
    step = np.repeat([part[3] for part in parts], modules)
    phase = np.repeat([part[2] for part in parts], modules)
    columns = Columns.of(
        start=np.concatenate([part[0] for part in parts]),
        end=np.concatenate([part[1] for part in parts]),
        name=np.tile(np.arange(modules), repeat),
        phase=phase,
        track=phase == BACKWARD,
        depth=np.tile(depth, repeat),
        parent=np.where(parent < 0, -1, parent + offset),
        call=step,
        step=step,
        link=step * modules + np.tile(np.arange(modules), repeat),
        complete=np.ones(repeat * modules, bool),
    )
    process = Process(48213, 0)
    return Timeline(
        columns=in_start_order(columns),
        names=names,
        tracks=[Track(kind, "MainThread", 48213, process) for kind in ("forward", "backward")],
        stats=Stats(recorded=4 * repeat * modules),
        marks=[Mark(int(parts[2 * step + 1][1].max()) + 1_000, "step", f"step {step}") for step in range(steps)],
        facts={"engine": "native", "torch": "2.13.0"},
    )


def _gpt2(layers: int) -> tuple[list[Name], list[int]]:
    """The modules of a GPT-2 in the order in which they are called, and where in it their callers are."""
    names: list[Name] = []
    parents: list[int] = []

    def add(parent: int, path: str, module_class: str) -> int:
        fqn = f"{names[parent].fqn}.{path}" if parent >= 0 else module_class
        names.append(Name(f"{path}: {module_class}" if parent >= 0 else module_class, fqn, module_class))
        parents.append(parent)
        return len(names) - 1

    model = add(-1, "", "GPT2LMHeadModel")
    body = add(model, "transformer", "GPT2Model")
    for path, module_class in (("wte", "Embedding"), ("wpe", "Embedding"), ("drop", "Dropout")):
        add(body, path, module_class)
    for layer in range(layers):
        block = add(body, f"h.{layer}", "GPT2Block")
        add(block, "ln_1", "LayerNorm")
        attention = add(block, "attn", "GPT2Attention")
        for path, module_class in (
            ("c_attn", "Conv1D"),
            ("attn_dropout", "Dropout"),
            ("c_proj", "Conv1D"),
            ("resid_dropout", "Dropout"),
        ):
            add(attention, path, module_class)
        add(block, "ln_2", "LayerNorm")
        mlp = add(block, "mlp", "GPT2MLP")
        for path, module_class in (
            ("c_fc", "Conv1D"),
            ("act", "NewGELUActivation"),
            ("c_proj", "Conv1D"),
            ("dropout", "Dropout"),
        ):
            add(mlp, path, module_class)
    add(body, "ln_f", "LayerNorm")
    add(model, "lm_head", "Linear")
    return names, parents


def _mirrored(parents: list[int]) -> list[int]:
    """The pre-order in which every module's children come the other way around."""
    children: dict[int, list[int]] = {}
    for module, parent in enumerate(parents):
        children.setdefault(parent, []).append(module)
    order = []
    stack = [0]
    while stack:
        module = stack.pop()
        order.append(module)
        stack.extend(children.get(module, []))
    return order


def _pass(parents: list[int], order: list[int]) -> list[tuple[int, int]]:
    """Enter (0) and exit (1) of every module, when they are entered in `order`."""
    events: list[tuple[int, int]] = []
    stack: list[int] = []
    for module in order:
        while stack and stack[-1] != parents[module]:
            events.append((1, stack.pop()))
        events.append((0, module))
        stack.append(module)
    events.extend((1, module) for module in reversed(stack))
    return events

"""Records small models as they are and with changes put into them: one process, one recording of 30 steps per change.

`python _recorded_changes.py ARCHITECTURE NUMBER FOLDER` is one process; it writes FOLDER/CHANGE.pftrace for each
change, in an order that its number decides. Sides of a comparison are taken from different processes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tests.support.injected_changes import Slowness, called_twice, recomputed, renamed, slowed
from tests.support.models import ARCHITECTURES

import modtrace
from modtrace.compare.samples import take_samples

STEPS, CALIBRATION_STEPS, WARM_UP_STEPS = 30, 15, 3
FACTORS = (0.02, 0.05, 0.10, 0.20, 0.50)
SWAPPED = 0.2
UNCHANGED = ("base0", "base1", "base2")


class Places(NamedTuple):
    """Where changes are put into a model; paths below it.

    Attributes:
        slow: three modules that become slower.
        twice: a module that is called twice, and the one that calls it.
        recompute: a module that runs again in backward.
        rename: a module, a child of it, and the child's other name.
        swap: two modules that change their speed.
    """

    slow: tuple[str, str, str]
    twice: tuple[str, str]
    recompute: str
    rename: tuple[str, str, str]
    swap: tuple[str, str]


PLACES = {
    "GPT": Places(
        ("h.1.mlp.0", "h.2.attn.c_attn", "h.0.ln_1"),
        ("h.3.mlp", "h.3"),
        "h.1.mlp",
        ("h.2", "attn", "attention"),
        ("h.0.mlp.2", "h.3.attn.c_proj"),
    ),
    "ResNet": Places(
        ("layer1.0.conv2", "layer2.0.bn1", "layer2.1.conv1"),
        ("layer1.1.conv1", "layer1.1"),
        "layer2.1",
        ("layer2.0", "conv1", "first"),
        ("layer1.1.conv2", "layer2.0.conv2"),
    ),
    "Mamba": Places(
        ("layers.0.mixer.in_proj", "layers.1.mixer.conv1d", "layers.0.mixer.out_proj"),
        ("layers.1.mixer.x_proj", "layers.1.mixer"),
        "layers.1.mixer",
        ("layers.0.mixer", "x_proj", "selective"),
        ("layers.1.mixer.in_proj", "layers.0.norm"),
    ),
}


class Slow(NamedTuple):
    """A module that becomes slower in one phase."""

    factor: float
    phase: str
    path: str

    @property
    def name(self) -> str:
        return f"slow_{round(100 * self.factor)}_{self.phase}_{self.path}"


def slow_changes(places: Places) -> list[Slow]:
    """Two of the three modules become 10 % slower, one by each other factor, in forward and in backward."""
    changes = []
    for number, factor in enumerate(FACTORS):
        for turn, phase in enumerate(("forward", "backward")):
            paths = (places.slow[turn], places.slow[2]) if factor == 0.1 else (places.slow[(number + turn) % 3],)
            changes += [Slow(factor, phase, path) for path in paths]
    return changes


def record(architecture: str, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = ARCHITECTURES[architecture]()
    places = PLACES[architecture]
    slowness = {path: Slowness() for path in dict.fromkeys((*places.slow, *places.swap))}
    for path, of_module in slowness.items():
        slowed(model.get_submodule(path), of_module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def recorded(steps: int) -> modtrace.Timeline:
        with modtrace.record(model=model) as recording:
            for _ in range(steps):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                recording.step()
        return recording.timeline()

    recorded(WARM_UP_STEPS)
    scale = calibrate(slowness, recorded, type(model).__name__)
    slow = {change.name: change for change in slow_changes(places)}
    changes = [*UNCHANGED, "twice", "recompute", "rename", "swap_a", "swap_b", *slow]
    random.Random(number).shuffle(changes)
    folder.mkdir(parents=True, exist_ok=True)
    for change in changes:
        for of_module in slowness.values():
            of_module.forward = of_module.backward = 0.0
        if change in slow:
            _, phase, path = slow[change]
            setattr(slowness[path], phase, slow[change].factor * scale[path, phase])
        elif change.startswith("swap"):
            path = places.swap[change == "swap_b"]
            slowness[path].forward = SWAPPED * scale[path, "forward"]
        with structure(change, model, places):
            recorded(STEPS).save(folder / f"{change}.pftrace")


def calibrate(slowness: dict[str, Slowness], recorded: object, root: str) -> dict[tuple[str, str], float]:
    """Return by what its own time must be multiplied so that 10 % of it are 10 % of the module's span."""
    for of_module in slowness.values():
        of_module.forward_ns.clear()
        of_module.backward_ns.clear()
    assert callable(recorded)
    self_ns = take_samples(recorded(CALIBRATION_STEPS)).self_ns
    return {
        (path, phase): float(np.quantile(self_ns[f"{root}.{path}", phase], 0.25) / np.quantile(own_ns, 0.25))
        for path, of_module in slowness.items()
        for phase, own_ns in (("forward", of_module.forward_ns), ("backward", of_module.backward_ns))
    }


@contextlib.contextmanager
def structure(change: str, model: torch.nn.Module, places: Places) -> Iterator[None]:
    """Change what is called, while the block runs."""
    find = model.get_submodule
    with contextlib.ExitStack() as changed:
        if change == "twice":
            changed.enter_context(called_twice(find(places.twice[0]), find(places.twice[1])))
        elif change == "recompute":
            changed.enter_context(recomputed(find(places.recompute)))
        elif change == "rename":
            parent, old, new = places.rename
            changed.enter_context(renamed(find(parent), old, new))
        yield


if __name__ == "__main__":
    record(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

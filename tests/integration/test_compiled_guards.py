"""Guards of torch.compile at each call of compiled code: a recording adds none, apart from a few by name."""

from __future__ import annotations

import json

import pytest
import torch
from torch.torch_version import TorchVersion

from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked

COUNT = """
import json, sys, torch, modtrace
from torch import nn
from torch._dynamo.utils import counters

model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
hooked = nn.Linear(4, 4)
hooked.register_forward_hook(lambda *_: None)
optimizer = torch.optim.SGD([*model.parameters()], 0.1)

def clip():
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)

def switch():
    model.eval()
    model.zero_grad()
    return model(x)

def guards_of(function):
    torch._dynamo.reset()
    counters.clear()
    guards = []

    def keep(entries):
        guards.extend(entry.guard_type for entry in entries)
        return [True] * len(entries)

    torch.compile(function, backend="eager", options={"guard_filter_fn": keep})()
    return len(guards), str(counters)

STEPS = {
    "forward": lambda: model(x),
    "hooked": lambda: hooked(x),
    "clip": clip,
    "step": lambda: optimizer.step(),
    "switch": switch,
}
for function in STEPS.values():
    guards_of(function)
alone = {name: guards_of(function) for name, function in STEPS.items()}
with modtrace.record(engine=sys.argv[1]):
    during = {name: guards_of(function) for name, function in STEPS.items()}
assert {name: counted for name, (_, counted) in alone.items()} == {name: c for name, (_, c) in during.items()}
print(json.dumps({name: during[name][0] - alone[name][0] for name in STEPS}))
"""


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.9", reason="torch 2.8 asks optimizers for what they lack")
def test_code_compiled_in_a_recording_has_the_same_guards_as_without(engine: EngineName) -> None:
    more = json.loads(run_forked("-W", "ignore", "-c", COUNT, engine).stdout)

    assert (more.pop("forward"), more.pop("step")) == (0, 0)
    # The limits that the README of recording/ names; no guards on a torch that guards less.
    limits = {"hooked": 5 * (engine == "python"), "clip": 4, "switch": 5}
    assert all(more[name] <= limit for name, limit in limits.items()), more

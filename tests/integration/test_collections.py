"""Garbage collections run at any allocation, and dying objects can call a model of their own."""

from __future__ import annotations

from tests.support.python_process import run_python, users_environment

_COLLECT_EVERYWHERE = """
import gc
import threading
import torch
from torch import nn
import modtrace

class Leaf(nn.Module):
    def forward(self, x):
        return x * 2

class Nest(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

def nested(depth):
    model = Leaf()
    for _ in range(depth):
        model = Nest(model)
    return model

class Dies:
    running = False
    called = 0

    def __init__(self, model):
        self.cycle, self.model = self, model

    def __del__(self):
        if not Dies.running:
            Dies.running = True
            # Deep enough that the stack of open calls moves.
            self.model(torch.ones(1))
            Dies.called += 1
            Dies.running = False

class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        gc.disable()
        Dies(nested(70))
        # The next tuple is not one of those that Python keeps for reuse, so to make it collects.
        kept = [(index, index) for index in range(3000)]
        inner = self.inner
        gc.enable()
        return inner(x)

with modtrace.record(engine="native") as recording:
    gc.set_threshold(1)
    # Each on a thread of its own, whose stack has yet to grow.
    for _ in range(10):
        thread = threading.Thread(target=Outer(nested(9)), args=[torch.ones(1)])
        thread.start()
        thread.join()
    gc.set_threshold(700)
timeline = recording.timeline()
assert Dies.called >= 10, Dies.called
assert all(span.complete for span in timeline.spans)
outer = [span for span in timeline.spans if span.fqn == "Outer"]
print(len(outer), sorted(span.call for span in outer) == list(range(10)))
"""


def test_models_called_while_garbage_is_collected_leave_the_recording_sound(native_engine: None) -> None:
    # The allocator overwrites freed memory, so that code that reads it fails.
    done = run_python("-c", _COLLECT_EVERYWHERE, env=users_environment(MALLOC_PERTURB_="165"))

    assert done.stdout.split() == ["10", "True"]

"""Imports torch by `importlib.util.LazyLoader`: it runs when its first attribute is asked for."""

import importlib.util
import sys
from types import ModuleType

import truth


def import_lazily(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


torch = import_lazily("torch")
assert "torch.nn" not in sys.modules
assert torch.tensor(1) == 1

from small_training import train  # noqa: E402

train(steps=3)
truth.report()

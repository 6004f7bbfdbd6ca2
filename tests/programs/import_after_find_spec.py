"""Asks whether torch is installed before it imports it, as transformers does."""

import importlib.util

import truth

assert importlib.util.find_spec("torch") is not None
assert importlib.util.find_spec("torch") is not None

import torch  # noqa: E402, F401
from small_training import train  # noqa: E402

train(steps=3)
truth.report()

"""Imports transformers, which asks whether torch is there, and then torch."""

import transformers

assert transformers.is_torch_available()

import truth  # noqa: E402
from small_training import train  # noqa: E402

train(steps=3)
truth.report()

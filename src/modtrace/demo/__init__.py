"""A small GPT and a few steps of its training: what `modtrace demo` records, and what the benchmarks measure."""

from .gpt import GPT, batches, make_optimizer, train_step

__all__ = ["GPT", "batches", "make_optimizer", "train_step"]

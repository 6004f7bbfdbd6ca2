"""`generate` of transformers: one step with its calls inside, prefill and decode as stopwatches in the program say.

One stopwatch is around what is recorded and one inside of it, so that what they say holds at any pace of the machine.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from typing import Any

import pytest
import torch

import modtrace
from modtrace.record_options import EngineName

from .trainers import import_torchvision

pytestmark = pytest.mark.filterwarnings("default")
_REQUESTS, _TOKENS = 3, 20


def test_three_generates_are_three_steps_of_twenty_calls(engine: EngineName) -> None:
    pytest.importorskip("transformers")
    import_torchvision()
    from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

    calls_ns: list[int] = []
    forwards_ns: list[int] = []

    class Model(LlamaForCausalLM):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().__call__(*args, **kwargs)
            calls_ns.append(time.perf_counter_ns() - begin)
            return result

        @functools.wraps(LlamaForCausalLM.forward)  # `generate` looks at its parameters
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().forward(*args, **kwargs)
            forwards_ns.append(time.perf_counter_ns() - begin)
            return result

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Model(LlamaConfig(vocab_size=32, num_key_value_heads=2, **size)).eval()
    prompt = torch.arange(256).reshape(1, -1) % 32

    def generate() -> Any:
        return model.generate(prompt, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, pad_token_id=0)

    plain, signature = generate(), inspect.signature(GenerationMixin.generate)
    calls_ns.clear()
    forwards_ns.clear()
    generates_ns = []
    with modtrace.record(engine=engine) as recording:
        for _ in range(_REQUESTS):
            begin = time.perf_counter_ns()
            tokens = generate()
            generates_ns.append(time.perf_counter_ns() - begin)
    whole, prefill, decode = recording.timeline().summary().units

    assert torch.equal(tokens, plain)
    assert inspect.signature(GenerationMixin.generate) == signature
    assert len(calls_ns) == _REQUESTS * _TOKENS
    assert (whole.unit, whole.measured, whole.calls) == ("generate", _REQUESTS, len(calls_ns))
    assert (prefill.stage, prefill.measured) == ("prefill", _REQUESTS)
    assert (decode.stage, decode.measured) == ("decode", len(calls_ns) - _REQUESTS)

    def of_each_stage(times_ns: list[int]) -> tuple[int, int]:
        later = [ns for index, ns in enumerate(times_ns) if index % _TOKENS]
        return int(statistics.median(times_ns[::_TOKENS])), int(statistics.median(later))

    requests = range(0, len(calls_ns), _TOKENS)
    inside = int(statistics.median(sum(calls_ns[first : first + _TOKENS]) for first in requests))
    assert inside <= whole.p50_ns <= int(statistics.median(generates_ns))
    for unit, least, most in zip((prefill, decode), of_each_stage(forwards_ns), of_each_stage(calls_ns), strict=True):
        assert least <= unit.p50_ns <= most

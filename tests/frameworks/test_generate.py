"""`generate` of transformers: one step with its calls inside, prefill and decode as a stopwatch in the program says."""

from __future__ import annotations

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


def agrees(recorded_ns: int, watched_ns: int) -> bool:
    """Whether a time is as a stopwatch around it says, within 2 % or 50 µs."""
    return 0 <= watched_ns - recorded_ns <= max(0.02 * watched_ns, 50_000)


def test_three_generates_are_three_steps_of_twenty_calls(engine: EngineName) -> None:
    pytest.importorskip("transformers")
    import_torchvision()
    from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

    calls_ns: list[int] = []

    class Model(LlamaForCausalLM):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().__call__(*args, **kwargs)
            calls_ns.append(time.perf_counter_ns() - begin)
            return result

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Model(LlamaConfig(vocab_size=32, num_key_value_heads=2, **size)).eval()
    prompt = torch.arange(256).reshape(1, -1) % 32

    def generate() -> Any:
        return model.generate(prompt, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, pad_token_id=0)

    plain, signature = generate(), inspect.signature(GenerationMixin.generate)
    calls_ns.clear()
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
    assert agrees(whole.p50_ns, int(statistics.median(generates_ns)))
    assert agrees(prefill.p50_ns, int(statistics.median(calls_ns[::_TOKENS])))
    later = [ns for index, ns in enumerate(calls_ns) if index % _TOKENS]
    assert agrees(decode.p50_ns, int(statistics.median(later)))

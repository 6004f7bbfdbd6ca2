"""Functions compiled by torch.compile stay compiled on other threads too while the native engine calls Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.track.naming.module_names import ModuleNames
from modtrace.track.unseen import skip_frame
from tests.support.python_process import HANGS_AFTER_S


@pytest.mark.usefixtures("native_engine")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_function_goes_on_compiled_while_another_thread_asks_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    within, asked = threading.Event(), threading.Event()
    meets = False

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            parts.append(threading.current_thread().name)
            return graph.forward(*arguments)

        return run

    @skip_frame  # `torch.compiler.disable` turns the compiler off for the functions that it calls
    def meet() -> None:
        if meets:
            within.set()
            assert asked.wait(HANGS_AFTER_S)

    @torch.compile(backend=backend)
    def function(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        meet()
        torch._dynamo.graph_break()
        return x * 3

    x = torch.ones(2)
    for _ in range(2):
        parts.clear()
        function(x)
    assert len(parts) == 2
    thread = threading.Thread(target=function, args=(x,), name="compiled")
    resolve = ModuleNames.resolve

    def resolve_meanwhile(self: ModuleNames, module: nn.Module, open_calls: Sequence[Any]) -> int:
        if isinstance(module, nn.Identity):
            asked.set()
            thread.join()
        return resolve(self, module, open_calls)

    monkeypatch.setattr(ModuleNames, "resolve", resolve_meanwhile)
    parts.clear()
    meets = True
    with modtrace.record(engine="native"):
        thread.start()
        assert within.wait(HANGS_AFTER_S)
        nn.Identity()(x)

    assert parts == ["compiled", "compiled"]

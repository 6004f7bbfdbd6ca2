"""Modules are named without running the user's code, and without waiting forever for a thread that runs it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.ring import NameTable, Record
from modtrace.track.naming import modules
from modtrace.track.naming.modules import named_modules
from tests.support.renamed_net import Block, Names, Net


def test_a_named_modules_of_the_users_is_not_asked() -> None:
    asked = []

    class Own(Net):
        def named_modules(self, *arguments: Any, **options: Any) -> Any:
            asked.append(arguments)
            return super().named_modules(*arguments, **options)

    net: nn.Module = Own()
    assert isinstance(net, Net)

    assert Names()(net, net.fc(1))[1] == "Own.h.1.fc"
    assert asked == []


def test_a_thread_does_not_wait_for_one_that_walks_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net, names = Net(), Names()
    done, entered = threading.Event(), threading.Event()

    def walk(*arguments: Any) -> Iterator[tuple[str, nn.Module]]:
        if threading.current_thread() is thread:
            # As in a finalizer that the garbage collector runs there.
            entered.set()
            assert done.wait(60)
        return named_modules(*arguments)

    monkeypatch.setattr(modules, "named_modules", walk)
    thread = threading.Thread(target=lambda: names(net, net.fc(1)))
    thread.start()
    assert entered.wait(60)
    fqns = [names(net, net.fc(0))[1]]
    # A walk is due at the 1st, 2nd, 4th … time, and while another one is under way.
    net.h.append(Block())
    fqns.append(names(net, net.fc(2))[1])
    done.set()
    thread.join()

    assert fqns == ["Net.h.0.fc", "Net.h.2.fc"]


def test_a_thread_does_not_wait_for_one_that_adds_a_name_and_waits_for_it() -> None:
    done, entered = threading.Event(), threading.Event()

    def sink(record: Record) -> None:
        if record["kind"] == "name" and threading.current_thread() is thread:
            entered.set()
            assert done.wait(60)

    table, ids = NameTable(sink), []
    thread = threading.Thread(target=lambda: ids.append(table.name("fc", "Net.fc", "Linear")))
    thread.start()
    assert entered.wait(60)
    ids += [table.name("fc", "Net.fc", "Linear"), table.name("h", "Net.h", "Block"), table.name("h", "Net.h", "Block")]
    done.set()
    thread.join()

    # The first to note it counts.
    assert ids == [1, 2, 2, 1]
    assert [(record["id"], record["fqn"]) for record in table.records] == [(1, "Net.fc"), (2, "Net.h"), (0, "Net.fc")]


def test_modules_are_named_while_another_thread_imports_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._dynamo.eval_frame", "torch._dynamo.compiled_autograd"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    with modtrace.record(engine="python") as recording:
        nn.ReLU()(torch.ones(1, requires_grad=True)).backward()

    assert [(span.phase, span.fqn) for span in recording.timeline().spans] == [
        ("forward", "ReLU"),
        ("backward", "ReLU"),
    ]

"""Several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn

from .case import Step, case
from .modules import Exp, Net, Scale, leaf


def _on_a_thread(name: str, work: Step) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class _Meet(nn.Module):
    """Waits, in forward and in backward, for the other thread."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(30)
        x = x.exp()
        x.register_hook(lambda _: (self.barrier.wait(30), None)[1])
        return x


@case(
    """
    forward:
      Left
        Left.a
        Left.meet
        Left.b
    backward:
      Left
        Left.b
        Left.meet
        Left.a
    forward @worker:
      Right
        Right.a
        Right.meet
        Right.b
    backward @worker:
      Right
        Right.b
        Right.meet
        Right.a
    """
)
def two_models_on_two_threads() -> Step:
    """Two models run forward and backward at the same time, and meet inside."""

    class Left(nn.Module):
        def __init__(self, barrier: threading.Barrier) -> None:
            super().__init__()
            self.a, self.meet, self.b = Scale(), _Meet(barrier), Scale()

        def forward(self, x: Tensor) -> Any:
            return self.b(self.meet(self.a(x)))

    class Right(Left):
        pass

    barrier = threading.Barrier(2)
    left, right = Left(barrier), Right(barrier)

    def step() -> None:
        worker = threading.Thread(target=lambda: right(leaf()).sum().backward(), name="worker")
        worker.start()
        left(leaf()).sum().backward()
        worker.join()

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward @worker:
      Net
        Net.b
        Net.a
    """
)
def backward_on_another_thread() -> Step:
    """Backward is called on a thread that never ran forward."""
    net = Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Scale())

    def step() -> None:
        loss = net(leaf()).sum()
        _on_a_thread("worker", loss.backward)

    return step


@case(
    """
    forward:
      Net
        Net.a
    forward @worker:
      Net #1
        Net.a #1
    backward:
      Net #1
        Net.a #1
      Net
        Net.a
    """,
)
def two_forwards_and_one_backward() -> Step:
    """One model on two threads in turn; each call's backward runs on the first thread."""
    net = Net(lambda self, x: self.a(x), a=Scale())

    def step() -> None:
        losses = [net(leaf()).sum()]
        _on_a_thread("worker", lambda: losses.append(net(leaf()).sum()))
        losses[1].backward()
        losses[0].backward()

    return step


@case(
    """
    forward:
      Net
        Net.last
    forward @worker_0:
      Net.branch
        Net.branch.a
    backward:
      Net
        Net.last
      Net.branch
        Net.branch.a
    """
)
def a_branch_on_a_pool() -> Step:
    """A forward runs an inner module on a thread pool: its name is below the caller's, in backward too."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Exp()

        def forward(self, x: Tensor) -> Any:
            return self.a(x)

    def body(self: Any, x: Tensor) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
            x = pool.submit(self.branch, x).result()
        return self.last(x)

    net = Net(body, branch=Branch(), last=Scale())
    return lambda: net(leaf()).sum().backward()

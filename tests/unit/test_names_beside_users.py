"""Names are found without code of the user's, and without waiting for good for a thread in which that runs."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from tests.unit.test_names import Names, Net


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


def test_a_thread_does_not_wait_for_good_for_one_that_walks_and_waits_for_it() -> None:
    net, names = Net(), Names()
    done, entered = threading.Event(), threading.Event()

    def walk() -> None:
        # As in a finalizer that the garbage collector runs there.
        entered.set()
        assert done.wait(60)

    thread = threading.Thread(target=lambda: names.names._walking.run(walk))
    thread.start()
    assert entered.wait(60)
    found = names(net, net.fc(0))[1]
    names.names.forget_dead()
    done.set()
    thread.join()

    assert found == "Net.h.0.fc"

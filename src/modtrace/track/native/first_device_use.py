"""What waits until the process uses its device; until then nothing asks for that.

How many devices there are, CUDA tells by starting its driver, and children that are forked after that cannot use CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ..._exclusive import Exclusive
from ..device_choice import say_no_device_times

__all__ = ["begin_at_first_use", "forget_waiting"]

_exclusive = Exclusive()
# At most one: there is one recording at a time, and `forget_waiting` is called when it ends.
_waiting: list[Callable[[], None]] = []


def begin_at_first_use(device_module: ModuleType, begin: Callable[[], None]) -> None:
    """Call `begin` once torch initializes a device: at once where it has, or where that cannot be told.

    What `begin` raises later is logged, as torch's initialization would fail by it.

    Args:
        device_module: of torch, such as `torch.cuda`.
        begin: is called once, in any thread.
    """
    if not hasattr(device_module, "_lazy_call") or device_module.is_initialized():
        begin()
        return
    _exclusive.run(lambda: _waiting.append(begin))
    device_module._lazy_call(_begin_waiting)


def forget_waiting() -> bool:
    """Forget what waits; return whether there was something."""
    found = []

    def forget() -> None:
        found.extend(_waiting)
        _waiting.clear()

    _exclusive.run(forget)
    return bool(found)


def _begin_waiting() -> None:
    def begin() -> None:
        if not _waiting:
            return
        try:
            _waiting.pop()()
        except Exception as error:
            say_no_device_times(str(error))

    _exclusive.run(begin)

"""Startup code of each Python that tests start: no full garbage collection runs automatically, and none at exit.

They are a third of the processor time of a process that imports torch. Young ones come as they do for users, and whole
ones where a program asks for them. What is about collections, or the interpreter's end, has `users_environment`.
"""

import atexit
import gc
import sys

young, middle, _ = gc.get_threshold()
gc.set_threshold(young, middle, 1_000_000)


@atexit.register
def collect_nothing() -> None:
    # Torch 2.15 imports triton, whose bindings print at the end what of theirs was not collected.
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()

"""Imports torch in a thread, which trains; the main thread has waited for it, and trains on."""

import threading

import truth


def work() -> None:
    from small_training import train

    train(steps=3)


thread = threading.Thread(target=work, name="trainer")
thread.start()
thread.join()

from small_training import train  # noqa: E402

train(steps=2)
truth.report()

"""Imports torch inside a function, on its second call."""

import sys

import truth


def main(*, training: bool) -> None:
    if training:
        from small_training import train

        train(steps=3)


main(training=False)
assert "torch" not in sys.modules
main(training=True)
truth.report()

"""The loop of `timed_loop` with two processes that load, started anew in each epoch."""

from timed_loop import train

if __name__ == "__main__":
    train(workers=2)

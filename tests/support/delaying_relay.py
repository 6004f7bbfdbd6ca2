"""A TCP relay on loopback that holds back what comes from one side, as a network with an asymmetric way does.

Run as `-m tests.support.delaying_relay` it is the other end instead: a `PingServer` of its own process, which
prints its port and its token, until its standard input ends.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from modtrace.track.job_clocks import PingServer

__all__ = ["delaying_relay"]


@contextmanager
def delaying_relay(port: int, there_s: float, back_s: float) -> Iterator[tuple[str, int]]:
    """Relay one connection to a port of loopback.

    Args:
        port: where to.
        there_s: what comes from the client is held back by this to twice this, seconds.
        back_s: the same of what comes back.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(("127.0.0.1", port)) as server:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                back = threading.Thread(target=_pump, args=(server, client, back_s))
                back.start()
                _pump(client, server, there_s)
                server.shutdown(socket.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join()


def _pump(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    for one in (source, target):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := source.recv(1 << 10):
        if delay_s:
            time.sleep(delay_s * random.uniform(1, 2))
        try:
            target.sendall(data)
        except OSError:
            return


if __name__ == "__main__":
    server = PingServer("127.0.0.1")
    print(server.address[1], server.token, flush=True)
    sys.stdin.read()
    server.close()

"""The server of `modtrace view`, over real sockets: who gets the trace, and when it ends."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modtrace import ModtraceError
from modtrace.view import server as view_server
from modtrace.view.server import Page, TraceServer, handover_page, has_browser

TRACE = bytes(range(256)) * 40_000
PAGE = Page(b"<!doctype html><p>page", "default-src 'none'")
OWN = "Sec-Fetch-Site: same-origin"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TraceServer]:
    (tmp_path / "trace.pftrace").write_bytes(TRACE)
    (tmp_path / "other").write_text("secret")
    with TraceServer(PAGE, tmp_path / "trace.pftrace") as running:
        yield running


def exchange(server: TraceServer, request: str) -> tuple[int, str, bytes]:
    """Send a request as it is; the status, the headers and the body of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request.encode("latin-1"))
        answer = b""
        while part := connection.recv(1 << 20):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d+)", head)
    return int(status[1]) if status else 0, head.decode("latin-1"), body


def ask(server: TraceServer, path: str, *headers: str, method: str = "GET", host: str | None = None) -> int:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{server.port}'}", *headers, "", ""]
    return exchange(server, "\r\n".join(lines))[0]


def test_the_page_gets_the_whole_trace(server: TraceServer) -> None:
    status, head, body = exchange(
        server, f"GET {server.path}trace HTTP/1.1\r\nHost: localhost:{server.port}\r\n{OWN}\r\n\r\n"
    )

    assert (status, body) == (200, TRACE)
    assert f"Content-Length: {len(TRACE)}" in head
    assert "Cache-Control: no-store" in head
    assert "Access-Control" not in head
    assert server.wait(10)


def test_the_url_for_a_command_line_leads_to_the_page_once(server: TraceServer) -> None:
    request = f"GET {server.launch_path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    assert server.path.strip("/") not in server.launch_url
    assert ask(server, f"{server.launch_path}/trace", OWN) == 404
    assert ask(server, server.launch_path, host="evil.example") == 403

    status, head, _ = exchange(server, request)
    assert status == 303
    assert f"Location: {server.path}\r\n" in head

    assert [exchange(server, request)[0] for _ in range(3)] == [410, 410, 410]
    assert exchange(server, request)[1].find(server.path) == -1
    assert ask(server, server.path) == 200


@pytest.mark.parametrize("path", ["/", "launch_path", "path"])
def test_a_request_of_http_0_9_is_refused(server: TraceServer, path: str) -> None:
    asked = f"GET {getattr(server, path, path)}\r\n\r\n"

    status, head, body = exchange(server, asked)

    assert status == 0  # its answers have no status line
    assert "Error code: 403" in head + body.decode()
    assert PAGE.body not in body
    assert ask(server, server.path) == 200


def test_only_one_of_many_browsers_at_once_gets_the_page(server: TraceServer) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, server.launch_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [303, *[410] * 15]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="it takes two users")
@pytest.mark.parametrize("sender", ["127.0.0.1", "127.0.0.2"])
def test_another_user_does_not_get_to_the_page_and_does_not_use_up_the_url(server: TraceServer, sender: str) -> None:
    program = f"""
import encodings.idna, os, socket
os.setgid(65534); os.setuid(65534)
with socket.create_connection(("127.0.0.1", {server.port}), 10, ("{sender}", 0)) as connection:
    connection.sendall(b"GET {server.launch_path} HTTP/1.1\\r\\nHost: 127.0.0.1:{server.port}\\r\\n\\r\\n")
    print(connection.makefile("rb").readline())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("b'HTTP/1.0 403 another user")
    assert ask(server, server.launch_path) == 303


def test_idle_connections_end_and_the_page_and_the_trace_still_come(server: TraceServer) -> None:
    page = socket.create_connection(("127.0.0.1", server.port), 10)
    page.sendall(f"GET {server.path}open HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{OWN}\r\n\r\n".encode())
    assert page.recv(15) == b"HTTP/1.0 200 OK"
    before = len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(100)]
    assert ask(server, f"{server.path}trace", OWN) == 200
    assert [connection.recv(1) for connection in idle[:60]] == [b""] * 60
    assert len(os.listdir("/proc/self/fd")) - before < 100 + 40
    assert server._open_pages == 1
    for connection in (*idle, page):
        connection.close()


def test_the_page_is_served_with_its_policy(server: TraceServer) -> None:
    status, head, body = exchange(server, f"GET {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n")

    assert (status, body) == (200, PAGE.body)
    assert "Content-Security-Policy: default-src 'none'" in head
    assert "Referrer-Policy: no-referrer" in head
    assert "Python" not in head
    assert not server.wait(0)


def test_a_page_without_a_trace_is_all_there_is() -> None:
    with TraceServer(PAGE) as server:
        assert ask(server, f"{server.path}trace", OWN) == 404
        assert not server.wait(0)
        assert ask(server, server.path) == 200
        assert server.wait(10)


@pytest.mark.parametrize(
    "headers",
    [
        ["Origin: https://evil.example", "Sec-Fetch-Site: cross-site"],
        ["Origin: https://ui.perfetto.dev", "Sec-Fetch-Site: cross-site"],
        ["Origin: null", OWN],
        ["Origin: http://127.0.0.1:1", "Sec-Fetch-Site: same-site"],
        [OWN, "Origin: https://evil.example"],
        ["Sec-Fetch-Site: cross-site"],
        ["Sec-Fetch-Site: same-site"],
        ["Sec-Fetch-Site: none"],
        [OWN, "Sec-Fetch-Site: cross-site"],
        [],
    ],
)
def test_another_origin_gets_no_trace(server: TraceServer, headers: list[str]) -> None:
    assert ask(server, f"{server.path}trace", *headers) == 403
    assert not server.wait(0)


def test_another_origin_gets_no_page(server: TraceServer) -> None:
    assert ask(server, server.path, "Origin: https://evil.example") == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:1",
        "127.0.0.1:{port}.evil.example",
        "127.0.0.1:{port}\r\nHost: evil.example",
        "evil.example\r\nHost: 127.0.0.1:{port}",
        "127.0.0.1:{port}\r\nHost: 127.0.0.1:{port}",
        "127.0.0.1:{port}, evil.example",
        "[::1]:{port}",
        "0.0.0.0:{port}",
        "user@127.0.0.1:{port}",
    ],
)
def test_another_host_is_refused(server: TraceServer, host: str) -> None:
    assert ask(server, server.path, host=host.format(port=server.port)) == 403
    assert ask(server, f"{server.path}trace", OWN, host=host.format(port=server.port)) == 403
    assert not server.wait(0)


@pytest.mark.parametrize("version", [" HTTP/1.1", " HTTP/1.0", ""])
def test_no_host_is_refused(server: TraceServer, version: str) -> None:
    answer = exchange(server, f"GET {server.path}{version}\r\n\r\n")

    assert PAGE.body not in answer[1].encode() + answer[2]
    assert "403" in answer[1] or answer[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/trace",
        "/favicon.ico",
        "{path}other",
        "{path}../other",
        "{path}%2e%2e/other",
        "{path}..%2fother",
        "{path}trace/../../other",
        "{path}trace/",
        "{path}trace?",
        "{path}trace%00",
        "{path}/trace",
        "/{path}trace",
        "{path}./trace",
        "//etc/passwd",
        "/../../../../etc/passwd",
        "http://127.0.0.1{path}trace",
        "{upper}trace",
        "{short}/trace",
        "*",
    ],
)
def test_another_path_is_not_there(server: TraceServer, path: str) -> None:
    asked = path.format(path=server.path, upper=server.path.swapcase(), short=server.path[:-2])

    # http.server takes leading slashes together, which leads nowhere else.
    expected = 200 if asked.lstrip("/") == f"{server.path}trace".lstrip("/") else 404
    assert ask(server, asked, OWN) == expected


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "get"])
def test_another_method_is_refused(server: TraceServer, method: str) -> None:
    assert ask(server, f"{server.path}trace", OWN, "Content-Length: 0", method=method) == 501
    assert not server.wait(0)


def test_a_request_that_is_no_http_is_refused(server: TraceServer) -> None:
    for request in ("\x16\x03\x01\x02\n\n", f"GET {server.path} HTTP/9.9\r\n\r\n", f"GET {server.path} x y\r\n\r\n"):
        status, head, body = exchange(server, request)
        assert status != 200
        assert PAGE.body not in head.encode() + body
    assert ask(server, server.path, *(f"X-{number}: x" for number in range(200))) == 431
    assert ask(server, "/" + "x" * 70_000) == 414


def test_the_path_cannot_be_guessed(server: TraceServer, tmp_path: Path) -> None:
    with TraceServer(PAGE, tmp_path / "trace.pftrace") as other:
        assert other.path != server.path
    assert len(server.path) == 34  # 24 random bytes


def test_a_transfer_that_breaks_off_does_not_end_it(server: TraceServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(
            f"GET {server.path}trace HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{OWN}\r\n\r\n".encode()
        )
        assert connection.recv(100)
        assert len(TRACE) > 8 << 20  # more than the kernel takes at once
    assert not server.wait(0.2)

    assert ask(server, f"{server.path}trace", OWN) == 200
    assert server.wait(10)


def test_it_ends_after_a_time_without_a_visitor(server: TraceServer) -> None:
    begun = time.monotonic()

    assert not server.wait(0.1)

    assert time.monotonic() - begun >= 0.1


class Clock:
    """A clock that a test moves, in the place of the module `time`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._read = threading.Condition()
        self._reads = 0

    def monotonic(self) -> float:
        with self._read:
            self._reads += 1
            self._read.notify_all()
            return self._now

    def move(self, seconds: float) -> None:
        """Let time pass, until whoever waits has seen it."""
        self.move_on(seconds)
        with self._read:
            seen = self._reads + 3
            assert self._read.wait_for(lambda: self._reads >= seen, 60)

    def move_on(self, seconds: float) -> None:
        """Let time pass for who waits no longer then."""
        with self._read:
            self._now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(view_server, "time", clock)
    monkeypatch.setattr(view_server, "_POLL_INTERVAL_S", 0.01)
    return clock


def opened(server: TraceServer) -> socket.socket:
    """The connection by which a page says that it is open."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(f"GET {server.path}open HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{OWN}\r\n\r\n".encode())
    assert connection.recv(1000).startswith(b"HTTP/1.0 200")
    return connection


def test_it_serves_as_long_as_the_page_is_open(server: TraceServer, clock: Clock) -> None:
    page = opened(server)
    assert ask(server, f"{server.path}trace", OWN) == 200
    assert server.wait(10)
    waiting = threading.Thread(target=server.wait_until_left, args=(2.0,))
    waiting.start()

    def stays(pages: int) -> None:
        while server._open_pages != pages:
            clock.move(0)
        for _ in range(5):
            clock.move(1)

    stays(1)
    # A reload: the old page's connection goes, the new page fetches everything again.
    page.close()
    page = opened(server)
    assert ask(server, f"{server.path}trace", OWN) == 200
    stays(1)
    assert waiting.is_alive()

    page.close()
    while server._open_pages:
        clock.move(0)
    clock.move(1.9)
    assert waiting.is_alive()
    clock.move_on(0.2)
    waiting.join()


def test_a_page_that_cannot_say_that_it_is_open_counts_by_its_deliveries(clock: Clock) -> None:
    with TraceServer(PAGE) as server:
        assert ask(server, server.path) == 200
        waiting = threading.Thread(target=server.wait_until_left, args=(1.0,))
        waiting.start()
        clock.move(0.5)
        assert ask(server, server.path) == 200
        clock.move(0)
        clock.move(0.9)
        assert waiting.is_alive()
        clock.move_on(0.2)
        waiting.join()


def test_another_origin_cannot_hold_it_open(server: TraceServer) -> None:
    assert ask(server, f"{server.path}open", "Sec-Fetch-Site: cross-site") == 403
    assert ask(server, f"{server.path}open") == 403


def test_a_port_that_is_taken_is_an_error(server: TraceServer) -> None:
    with pytest.raises(ModtraceError, match=f"cannot serve at port {server.port}: Address already in use"):
        TraceServer(PAGE, port=server.port)


def test_it_listens_to_this_machine_only(server: TraceServer) -> None:
    addresses = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((str(address), server.port), timeout=5):  # noqa: PT011
            pass
    assert server._server.server_address == ("127.0.0.1", server.port)


def test_an_absent_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModtraceError, match=r"cannot serve .*absent: No such file"):
        TraceServer(PAGE, tmp_path / "absent")


def test_a_hostile_title_stays_text() -> None:
    title = "</script><img src=x onerror=alert(1)>\u2028<!--__NONCE__"
    page = handover_page("trace", title, "https://ui.perfetto.dev")

    assert page.body.count(b"</script>") == 2
    assert b"<img" not in page.body
    assert b"<!--" not in page.body
    assert page.policy is not None
    assert "frame-src https://ui.perfetto.dev;" in page.policy


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, "linux", False),
        ({"SSH_TTY": "/dev/pts/0"}, "darwin", False),
        ({"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22", "BROWSER": "code-helper"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({"BROWSER": ""}, "linux", False),
        ({}, "darwin", True),
        ({}, "win32", True),
    ],
)
def test_whether_a_browser_shows_up(environ: dict[str, str], platform: str, expected: bool) -> None:
    assert has_browser(environ, platform) is expected

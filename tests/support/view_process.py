"""`modtrace view` in a process of its own, as a test asks it for its page."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request

__all__ = ["see_page"]


def see_page(server: subprocess.Popen[str]) -> str:
    """Fetch the page from where a server says it is, and end it by Ctrl-C; return what it said."""
    assert server.stdout is not None
    said = ""
    with server, server.stdout as lines:
        for line in lines:
            said += line
            if line.startswith("Serving until"):
                break
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\S*", said)
        with urllib.request.urlopen(url) as page:
            assert page.status == 200
            assert b"<html" in page.read()
        server.send_signal(signal.SIGINT)
    return said

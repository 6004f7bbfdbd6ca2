"""A stock Firefox, headless, driven by the viewer's puppeteer-core over WebDriver BiDi."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Firefox", "firefox", "missing"]

NAMES = ("firefox-esr", "firefox")
DRIVER = Path(__file__).parents[2] / "viewer/drive-firefox.mjs"


def _executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing() -> str | None:
    """Why there is no Firefox to test with, or None where there is one."""
    if shutil.which("node") is None:
        return "node is not installed"
    return None if _executable() else f"none of {', '.join(NAMES)} is installed"


class Firefox:
    """One page of 1600 × 900 CSS pixels."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, command: str, *parameters: object) -> Any:
        """Send one of the driver's commands and return its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([command, *parameters]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the driver of Firefox has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["result"]

    def settle(self) -> None:
        """Wait until what was asked for is drawn: two frames."""
        self("evaluate", "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(null))))")


@contextmanager
def firefox() -> Iterator[Firefox]:
    """Run Firefox for the block."""
    executable = _executable()
    assert executable is not None
    with subprocess.Popen(
        ["node", str(DRIVER), executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Firefox(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

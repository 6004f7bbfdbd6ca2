"""The progress bar: on a terminal, for what takes long; else nothing."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

import pytest

from modtrace import load
from tests.support.python_process import run_python, start_python
from tests.support.timelines import gpt2_timeline

SAVE = """
import sys
from modtrace.write import written_parts
from tests.support.timelines import gpt2_timeline
written_parts.BAR_DELAY_S = float(sys.argv[2])
gpt2_timeline(20_000).save(sys.argv[1])
"""


def on_a_terminal(*arguments: str) -> str:
    """Run the save with a terminal for stderr, and return what it drew there."""
    ours, theirs = pty.openpty()
    process = start_python("-c", SAVE, *arguments, stdout=None, stderr=theirs)
    os.close(theirs)
    drawn = b""
    try:
        while part := os.read(ours, 4096):
            drawn += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return drawn.decode()


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_long_save_shows_how_far_it_is(tmp_path: Path, suffix: str) -> None:
    drawn = on_a_terminal(str(tmp_path / f"trace{suffix}"), "0")
    assert f"writing trace{suffix}" in drawn
    assert "100%" in drawn


def test_a_short_save_shows_nothing(tmp_path: Path) -> None:
    assert on_a_terminal(str(tmp_path / "trace.json"), "60") == ""


def test_without_a_terminal_nothing_is_shown(tmp_path: Path) -> None:
    done = run_python("-c", SAVE, tmp_path / "trace.json", "0")
    assert (done.stdout, done.stderr) == ("", "")


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), closed_stream()], ids=["none", "no isatty", "closed"])
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_save_needs_no_stream_to_show_it_on(
    tmp_path: Path, suffix: str, stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    timeline = gpt2_timeline(100)
    timeline.save(tmp_path / f"trace{suffix}")
    assert len(load(tmp_path / f"trace{suffix}").spans) == len(timeline.spans)

"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os

import pytest

from tests.support import trace_processor as engine


@pytest.fixture(scope="session")
def trace_processor() -> type[engine.TraceProcessor]:
    """`TraceProcessor`, whose `open(path_or_bytes)` loads a trace; without one it skips, in CI it fails."""
    reason = engine.missing()
    if reason is not None and os.environ.get("CI") != "true":
        pytest.skip(reason)
    return engine.TraceProcessor

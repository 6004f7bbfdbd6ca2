"""Fixtures: a browser, the Perfetto UI (one per test file), operators on one thread, and no earlier compilations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from modtrace.track.compiled_graphs import GRAPHS_MODULE
from tests.support import perfetto_ui
from tests.support.browser import chromium, missing, require

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running Chromium."""
    require(missing())
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def ui() -> Iterator[str]:
    """The origin from which the real Perfetto UI is served."""
    require(perfetto_ui.missing())
    with perfetto_ui.perfetto_ui() as origin:
        yield origin


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots, `MODTRACE_SCREENSHOTS`, if it is set."""
    chosen = os.environ.get("MODTRACE_SCREENSHOTS")
    path = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run operators only on the thread that calls them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile find no earlier results, neither in this process nor in a cache of files."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def passed_graphs() -> None:
    """Skip if torch does not pass on the graphs that it compiles, such as torch 2.8."""
    if find_spec(GRAPHS_MODULE) is None:
        pytest.skip(f"torch {torch.__version__} does not pass on its graphs")

"""A browser for all tests here, and pages in it that are checked for things they must never do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from modtrace import Timeline
from modtrace.write.html import write_html
from tests.support import firefox as stock_firefox
from tests.support.browser import Profiles, Visit, chromium, missing, require
from tests.support.viewer_page import Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    require(missing())
    with chromium() as running:
        yield running


@pytest.fixture(scope="package")
def profiles(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    return Profiles(browser, tmp_path_factory.mktemp("profiles"))


@pytest.fixture
def open_page(profiles: Profiles, tmp_path: Path) -> Iterator[Open]:
    """Opens a timeline's page and waits until it is drawn; it may load nothing and report no error."""
    with ExitStack() as stack:
        visits: list[tuple[Visit, str]] = []

        def opened(timeline: Timeline, **options: Any) -> Visit:
            path = tmp_path / f"{len(visits)}.html"
            write_html(timeline, path)
            seen = stack.enter_context(profiles.visit(**options))
            visits.append((seen, path.as_uri()))
            seen.page.goto(path.as_uri())
            seen.page.wait_for_selector("html[data-ready]", state="attached")
            return seen

        yield opened
        for seen, url in visits:
            assert seen.problems == []
            assert set(seen.requests) == {url}


@pytest.fixture(scope="package")
def packages() -> Path:
    """The viewer's installed npm packages."""
    if shutil.which("npm") is None:
        require("npm is not installed")
    done = subprocess.run([ROOT / "scripts/viewer", "--install"], capture_output=True, text=True, check=False)
    if done.returncode:
        require(f"npm ci failed: {done.stderr}")
    return ROOT / "viewer/node_modules"


@pytest.fixture(scope="module")
def firefox(packages: Path) -> Iterator[stock_firefox.Firefox]:
    """A running Firefox."""
    require(stock_firefox.missing())
    assert packages.exists()
    with stock_firefox.firefox() as driver:
        yield driver

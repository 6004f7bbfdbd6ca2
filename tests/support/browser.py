"""A real browser: the system's Chromium, headless, driven by playwright; what it complains about and asks for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, BrowserType, Page

__all__ = ["Profiles", "Visit", "browser_command", "chromium", "count_frames", "launch", "missing", "require", "visit"]

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
)
_SIZE: dict[str, Any] = {"viewport": {"width": 1600, "height": 900}}


def _executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing() -> str | None:
    """Why there is no browser to test with, or None where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if _executable() else f"none of {', '.join(NAMES)} is installed"


def require(reason: str | None) -> None:
    """Skip the test for `reason`, if there is one; in CI nothing may be missing, and it fails."""
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium for the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        try:
            yield browser
        finally:
            browser.close()


def launch(kind: BrowserType, **options: Any) -> Browser:
    """Start another browser of the kind of one that runs (`browser.browser_type`); `options` are playwright's."""
    return kind.launch(executable_path=_executable(), args=list(ARGUMENTS), **options)


def browser_command() -> list[str]:
    """The system's Chromium without a window, as a command."""
    return [_executable() or "chromium", "--headless", "--hide-scrollbars", *ARGUMENTS]


@dataclass
class Visit:
    """A page, and what happened on it: console errors and warnings, uncaught errors, requests, dialogs."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def visit(browser: Browser, **options: Any) -> Iterator[Visit]:
    """Open a blank page of its own profile; `options` are playwright's for a context."""
    context = browser.new_context(**_SIZE | options)
    try:
        yield _watch(context.new_page())
    finally:
        context.close()


class Profiles:
    """Profiles of a browser, each of which keeps a page open: so others of its files need no process of their own.

    Args:
        browser: runs.
        folder: where the file of that page is made.
    """

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser = browser
        self._blank = folder / "blank.html"
        self._blank.touch()
        self._kept: dict[str, tuple[BrowserContext, Page]] = {}

    @contextmanager
    def visit(self, **options: Any) -> Iterator[Visit]:
        """Open a blank page as the function `visit` does; what pages store is gone in the end."""
        chosen = json.dumps(options, sort_keys=True)
        if chosen not in self._kept:
            context = self._browser.new_context(**_SIZE | options)
            self._kept[chosen] = context, context.new_page()
            self._kept[chosen][1].goto(self._blank.as_uri())
        context, kept = self._kept[chosen]
        try:
            yield _watch(context.new_page())
        finally:
            for page in context.pages:
                if page is not kept:
                    page.close()
            kept.evaluate("localStorage.clear()")


def _watch(page: Page) -> Visit:
    seen = Visit(page)

    def complain(message: Any) -> None:
        if message.type in ("error", "warning"):
            seen.problems.append(f"{message.type}: {message.text}")

    def dismiss(dialog: Any) -> None:
        seen.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", complain)
    page.on("pageerror", lambda error: seen.problems.append(f"uncaught: {error}"))
    page.on("dialog", dismiss)
    page.on("request", lambda request: seen.requests.append(request.url))
    return seen


_FRAMES = """milliseconds => new Promise(done => {
    const begin = performance.now();
    let frames = 0;
    const count = now => {
        frames++;
        if (now - begin < milliseconds) requestAnimationFrame(count);
        else done(frames * 1000 / (now - begin));
    };
    requestAnimationFrame(count);
})"""


def count_frames(page: Page, milliseconds: int) -> float:
    """Frames per second that the page draws over a time."""
    return float(page.evaluate(_FRAMES, milliseconds))

"""Pictures of the page, for people to look at: written to the folder `MODTRACE_SCREENSHOTS`, which CI keeps.

Only faults that a program can see are checked here: no control is cut off, and the page reports no error.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline, load
from modtrace.timeline import BACKWARD
from modtrace.timeline.slices import DTYPES, Slices, sort_by_start
from modtrace.write.html import write_html
from tests.support.browser import Visit, visit
from tests.support.compared_runs import recording
from tests.support.cost_timelines import with_flops
from tests.support.firefox import Firefox
from tests.support.gpt_timeline import gpt_timeline
from tests.support.models import ARCHITECTURES
from tests.support.synthetic_profile import synthetic
from tests.support.viewer_page import cut_off, position_of, settle
from tests.support.viewer_positions import numbered_timeline

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TRACE = Path(__file__).parents[2] / "data/kineto/a100-ddp-rank0.json.gz"
PHONE = {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 2, "has_touch": True}
DARK = {"color_scheme": "dark"}

Look = Callable[["Page"], None]


def threads(count: int) -> Timeline:
    """Threads of one process, each with the steps of a GPT, a little later than the one before."""
    one = gpt_timeline(3, 4)
    first, parts, tracks = 0, [], []
    for thread in range(count):
        columns = one.columns
        later = {field: getattr(columns, field) + thread * 150_000 for field in ("start", "end")}
        parent = np.where(columns.parent < 0, -1, columns.parent + first)
        fields = {field: getattr(columns, field) for field in DTYPES}
        parts.append(Slices(**(fields | later | {"track": columns.track + np.int32(2 * thread), "parent": parent})))
        tracks += [track._replace(thread=f"worker {thread}", tid=thread) for track in one.tracks]
        first += len(columns)
    columns = Slices.of(None, **{field: np.concatenate([getattr(part, field) for part in parts]) for field in DTYPES})
    return Timeline(sort_by_start(columns), one.names, tracks, one.stats, one.marks)


def llama() -> Timeline:
    """Steps of a checkpointed Llama, recorded here and now."""
    workload = ARCHITECTURES["Llama, checkpointed"]()
    with modtrace.record(engine="python") as rec:
        for _ in range(4):
            workload.loss().backward()
            rec.step()
    return rec.timeline()


def merged(folder: Path) -> Timeline:
    """A trace of torch.profiler of an A100, with modules laid over it."""
    out = folder / "merged.json"
    modtrace.merge(TRACE, synthetic(TRACE), out)
    return load(out)


def scroll(page: Page) -> None:
    page.mouse.move(600, 500)
    page.mouse.wheel(0, 700)


def hover(page: Page) -> None:
    page.mouse.move(700, 400)


def select(page: Page) -> None:
    page.keyboard.press("]")
    page.get_by_role("searchbox").fill("phase:recompute")
    page.keyboard.press("Enter")


def steps(page: Page) -> None:
    page.get_by_role("tab", name="Steps").click()
    settle(page)


def two_steps(page: Page) -> None:
    steps(page)
    page.get_by_role("button", name="Compare step").click()
    page.get_by_role("tab", name="Changes").wait_for()


def calls(page: Page) -> None:
    page.get_by_role("button", name="GPT2LMHeadModel.transformer.h.0.mlp", exact=True).click()


def flame(page: Page) -> None:
    page.get_by_role("tab", name="Flame graph").click()


def sandwich(page: Page) -> None:
    calls(page)
    flame(page)


def recording_tab(page: Page) -> None:
    page.get_by_role("tab", name="Recording").click()


def retained(page: Page) -> None:
    page.get_by_role("button", name="Retained").click()
    page.mouse.move(*position_of(page, "counter 0", 0, 1010))


def help_dialog(page: Page) -> None:
    page.keyboard.press("?")


def nothing(page: Page) -> None:
    """Show the page as it opens."""


PICTURES: dict[str, tuple[Callable[[Path], Timeline], Look, dict[str, Any]]] = {
    "first-screen": (lambda _: gpt_timeline(6, 6), nothing, {}),
    "ranks": (lambda _: gpt_timeline(6, 4, ranks=4), scroll, {}),
    "12-threads-scrolled": (lambda _: threads(12), scroll, {}),
    "250-levels": (lambda _: numbered_timeline(1, 250).timeline, scroll, {}),
    "1.1-million-spans": (lambda _: gpt_timeline(4000, 12), hover, {}),
    "llama-checkpointed": (lambda _: llama(), select, {}),
    "merged-gpu": (merged, nothing, {}),
    "calls-of-a-module": (lambda _: gpt_timeline(6, 6), calls, {}),
    "flame-graph": (lambda _: gpt_timeline(6, 6), flame, {}),
    "sandwich": (lambda _: gpt_timeline(6, 6), sandwich, {}),
    "steps": (lambda _: gpt_timeline(6, 6), steps, {}),
    "recording": (lambda _: llama(), recording_tab, {}),
    "memory": (lambda _: with_flops(), retained, {}),
    "phone-memory": (lambda _: with_flops(), retained, PHONE),
    "help": (lambda _: gpt_timeline(6, 6), help_dialog, {}),
    "two-steps": (lambda _: noisy(), two_steps, {}),
    "dark": (lambda _: gpt_timeline(6, 6, ranks=2), nothing, DARK),
    "dark-two-steps": (lambda _: noisy(), two_steps, DARK),
    "phone": (lambda _: gpt_timeline(6, 6), nothing, PHONE),
    "phone-two-steps": (lambda _: noisy(), two_steps, PHONE),
}


def noisy() -> Timeline:
    """Steps in which every call takes another time; in one of them, a module's backward is much longer."""
    return recording(0, {("Net.h.3", BACKWARD): 1.0}, steps=6)


def take(seen: Visit, page_file: Path, look: Look, picture: Path) -> None:
    page = seen.page
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    settle(page)
    look(page)
    settle(page)
    page.screenshot(path=picture)
    assert cut_off(page) == []
    assert seen.problems == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "1.1-million-spans" else ()) for name in PICTURES]
)
def test_picture_of_the_page_has_nothing_cut_off(browser: Browser, pictures: Path, tmp_path: Path, name: str) -> None:
    make, look, options = PICTURES[name]
    write_html(make(tmp_path), tmp_path / "t.html")
    with visit(browser, **options) as seen:
        take(seen, tmp_path / "t.html", look, pictures / f"{name}.png")


@pytest.mark.parametrize(("name", "options"), [("diff", {}), ("diff-dark", DARK)])
def test_picture_of_a_diff_has_nothing_cut_off(
    browser: Browser, pictures: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    changed = {("Net.h.3", BACKWARD): 1.5, ("Net.h.5", BACKWARD): 0.6}
    modtrace.diff(recording(0), recording(1, changed, recompute=("Net.h.1",))).save(tmp_path / "d.html")
    with visit(browser, **options) as seen:
        take(seen, tmp_path / "d.html", nothing, pictures / f"{name}.png")


@pytest.mark.full
def test_picture_in_firefox(firefox: Firefox, pictures: Path, tmp_path: Path) -> None:
    write_html(gpt_timeline(6, 6, ranks=2), tmp_path / "t.html")
    firefox("goto", (tmp_path / "t.html").as_uri())
    firefox("wait", "document.documentElement.dataset.ready !== undefined")
    firefox.settle()
    (pictures / "firefox.png").write_bytes(base64.b64decode(firefox("screenshot")))
    assert firefox("errors") == []

"""Zoom, pan and steps by keys, wheel, pointer and touch: the spot under the pointer stays there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modtrace.timeline import Mark
from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.viewer_page import (
    FORWARD,
    LEVEL_PX,
    US,
    Open,
    details,
    one_step,
    position_of,
    table,
    viewport,
)


def test_keys_wasd_zoom_and_pan(open_page: Open) -> None:
    page = open_page(one_step()).page

    def after(key: str) -> tuple[float, float]:
        page.keyboard.press(key)
        return viewport(page)

    start, end = viewport(page)
    closer = after("w")
    assert start < closer[0] < closer[1] < end
    right = after("d")
    assert right[0] > closer[0]
    assert right[1] - right[0] == pytest.approx(closer[1] - closer[0])
    assert after("a")[0] < right[0]
    wider = after("s")
    assert wider[1] - wider[0] > closer[1] - closer[0]
    assert after("0") == (start, end)


def test_keys_typed_in_the_search_do_not_move_the_viewport(open_page: Open) -> None:
    page = open_page(one_step()).page
    before = viewport(page)
    page.keyboard.press("/")
    page.keyboard.type("wasd")

    assert page.get_by_role("searchbox").input_value() == "wasd"
    assert viewport(page) == before


@pytest.mark.parametrize("modifier", ["Control", None], ids=["with Ctrl", "where all is in sight"])
def test_wheel_at_a_time_zooms_and_keeps_it_in_place(open_page: Open, modifier: str | None) -> None:
    page = open_page(one_step()).page
    start, end = viewport(page)
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    # A pointer's position is in whole pixels.
    part = 500 / box["width"]
    page.mouse.move(box["x"] + 500, box["y"] + 100)
    if modifier:
        page.keyboard.down(modifier)
    page.mouse.wheel(0, -200)
    closer = viewport(page)

    assert closer[1] - closer[0] < 0.7 * (end - start)
    pixel = (closer[1] - closer[0]) / box["width"]
    assert closer[0] + part * (closer[1] - closer[0]) == pytest.approx(start + part * (end - start), abs=pixel)
    page.mouse.wheel(0, 200)
    assert viewport(page) == pytest.approx((start, end), abs=1e-6 * (end - start))


def test_wheel_sideways_pans(open_page: Open) -> None:
    page = open_page(one_step()).page
    start, end = viewport(page)
    page.mouse.move(*position_of(page, FORWARD, 1, 700 * US))
    page.mouse.wheel(200, 0)
    moved = viewport(page)

    box = page.locator("#timeline").bounding_box()
    assert box is not None
    assert moved[0] - start == pytest.approx(200 / box["width"] * (end - start))
    assert moved[1] - moved[0] == pytest.approx(end - start)


def test_wheel_over_more_rows_than_fit_scrolls(open_page: Open) -> None:
    page = open_page(gpt_timeline(1, 1, ranks=8)).page
    before = viewport(page)
    page.mouse.move(*position_of(page, FORWARD, 1, 0))
    page.mouse.wheel(0, 150)
    page.wait_for_function("() => document.querySelector('.scroller').scrollTop === 150")

    assert viewport(page) == before


def test_drag_sideways_pans_with_the_pointer(open_page: Open) -> None:
    page = open_page(one_step()).page
    start, end = viewport(page)
    x, y = position_of(page, FORWARD, 1, 700 * US)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y)
    page.mouse.move(x - 150, y)
    page.mouse.up()

    assert position_of(page, FORWARD, 1, 700 * US)[0] == pytest.approx(x - 150, abs=1)
    moved = viewport(page)
    assert moved[1] - moved[0] == pytest.approx(end - start)
    assert page.locator("#details dl").count() == 0, "a drag is no click"


def test_pinch_with_two_fingers_keeps_the_time_under_each(open_page: Open) -> None:
    page = open_page(one_step(), has_touch=True).page
    touch = page.context.new_cdp_session(page)
    start, end = viewport(page)
    left, y = position_of(page, FORWARD, 1, 600 * US)
    right, _ = position_of(page, FORWARD, 1, 900 * US)

    def put(kind: str, *fingers: float) -> None:
        points = [{"x": x, "y": y, "id": number} for number, x in enumerate(fingers)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    put("touchStart", left)
    put("touchStart", left, right)
    for part in (0.25, 0.5, 0.75, 1):
        put("touchMove", left - 150 * part, right + 250 * part)
    closer = viewport(page)
    assert closer[1] - closer[0] == pytest.approx((end - start) * (right - left) / (right - left + 400), rel=0.01)
    assert position_of(page, FORWARD, 1, 600 * US)[0] == pytest.approx(left - 150, abs=1)
    assert position_of(page, FORWARD, 1, 900 * US)[0] == pytest.approx(right + 250, abs=1)

    # Fingers at one place or past each other do not zoom, and the finger that is left does not move the view either.
    put("touchMove", right + 250, right + 250)
    put("touchMove", right + 300, left)
    put("touchEnd", right + 300)
    put("touchMove", right - 100)
    put("touchEnd")
    assert viewport(page) == closer
    assert page.locator("#details dl").count() == 0, "a pinch is no click"


def test_touch_with_one_finger_pans_and_selects(open_page: Open) -> None:
    page = open_page(one_step(), has_touch=True).page
    touch = page.context.new_cdp_session(page)
    start, end = viewport(page)
    x, y = position_of(page, FORWARD, 1, 700 * US)
    for kind, points in (
        ("touchStart", [{"x": x, "y": y}]),
        ("touchMove", [{"x": x - 60, "y": y}]),
        ("touchMove", [{"x": x - 150, "y": y}]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    moved = viewport(page)
    assert moved[1] - moved[0] == pytest.approx(end - start)
    assert position_of(page, FORWARD, 1, 700 * US)[0] == pytest.approx(x - 150, abs=1)

    page.touchscreen.tap(*position_of(page, FORWARD, 1, 700 * US))
    page.locator("#details dl").wait_for()
    assert details(page)["Duration"] == "400 µs"


def test_double_click_on_a_span_zooms_to_it(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.mouse.dblclick(*position_of(page, FORWARD, 1, 700 * US))
    start, end = viewport(page)

    assert 480 * US < start < 500 * US
    assert 900 * US < end < 920 * US


def test_step_keys_go_through_the_steps(open_page: Open) -> None:
    timeline = gpt_timeline(4, 2)
    ends = [0, *(mark.time_ns - BASE for mark in timeline.marks)]
    page = open_page(timeline).page
    steps = page.get_by_role("group", name="Training steps")
    assert "4 steps" in steps.inner_text()

    seen = []
    for _ in range(5):
        page.keyboard.press("]")
        start, end = viewport(page)
        seen.append(
            next(i for i in range(4) if abs(start - ends[i]) < 0.1 * ends[1] and abs(end - ends[i + 1]) < 0.1 * ends[1])
        )
    assert seen == [0, 1, 2, 3, 3]
    assert "step 3 · 4 of 4" in steps.inner_text()
    assert steps.get_by_role("button", name="Next step").is_disabled()
    page.keyboard.press("[")
    assert "step 2 · 3 of 4" in steps.inner_text()

    page.keyboard.press("0")
    assert "4 steps" in steps.inner_text()
    steps.get_by_role("button", name="Previous step").click()
    assert "step 3 · 4 of 4" in steps.inner_text(), "from all steps back to the last"


def test_steps_marked_before_the_first_span_and_twice_are_counted_once(open_page: Open) -> None:
    timeline = gpt_timeline(3, 1)
    marks = [Mark(BASE, "step", "step 0"), *(timeline.marks[0]._replace(text=f"step {i}") for i in (1, 2))]
    page = open_page(replace(timeline, marks=marks)).page
    steps = page.get_by_role("group", name="Training steps")
    assert "2 steps" in steps.inner_text()

    page.keyboard.press("]")
    assert "step 1 · 1 of 2" in steps.inner_text()
    start, end = viewport(page)
    length = marks[1].time_ns - BASE
    assert (start, end) == pytest.approx((0, length), abs=0.05 * length)
    page.keyboard.press("]")
    assert "step 1, not ended · 2 of 2" in steps.inner_text()


def test_steps_in_which_no_module_runs_are_no_steps(open_page: Open) -> None:
    timeline = gpt_timeline(3, 1)
    last = timeline.marks[-1].time_ns
    empty = [Mark(last + us * US, "step", f"step {i}") for i, us in enumerate((1, 2, 3), start=3)]
    page = open_page(replace(timeline, marks=[*timeline.marks, *empty])).page
    steps = page.get_by_role("group", name="Training steps")
    assert "3 steps" in steps.inner_text()
    for index in (0, 1, 2, 2):
        page.keyboard.press("]")
        assert f"step {index} · {index + 1} of 3" in steps.inner_text()
    page.get_by_role("tab", name="Steps").click()
    assert list(table(page)) == ["step 0", "step 1", "step 2"]


def test_click_in_the_overview_moves_the_viewport(open_page: Open) -> None:
    page = open_page(gpt_timeline(10, 2)).page
    page.keyboard.press("]")
    start, end = viewport(page)
    overview = page.locator(".overview").bounding_box()
    assert overview is not None
    page.mouse.click(overview["x"] + 0.9 * overview["width"], overview["y"] + 20)
    moved = viewport(page)

    length = gpt_timeline(10, 2).marks[-1].time_ns - BASE
    assert (moved[0] + moved[1]) / 2 == pytest.approx(0.9 * length, rel=0.01)
    assert moved[1] - moved[0] == pytest.approx(end - start)


def test_click_on_a_label_folds_its_row(open_page: Open) -> None:
    page = open_page(one_step()).page
    track = page.get_by_role("button", name="forward · MainThread")
    tall = page.locator("[data-row='track 0']").bounding_box()
    track.click()
    short = page.locator("[data-row='track 0']").bounding_box()
    assert tall is not None
    assert short is not None
    assert tall["height"] - short["height"] == LEVEL_PX
    assert track.get_attribute("aria-expanded") == "false"

    page.get_by_role("button", name="rank 0 · python").click()
    assert page.locator("[data-row]").count() == 1


def test_keys_after_a_search_move_the_viewport_and_go_through_the_matches(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.keyboard.press("/")
    page.keyboard.type("h.")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator(".match-count").inner_text().startswith("2 of ")
    page.keyboard.press("Shift+Enter")
    assert page.locator(".match-count").inner_text().startswith("1 of ")

    start, end = viewport(page)
    page.keyboard.press("w")
    closer = viewport(page)
    assert closer[1] - closer[0] < end - start
    assert page.get_by_role("searchbox").input_value() == "h."
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.get_by_role("searchbox").input_value() == ""

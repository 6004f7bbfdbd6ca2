"""Merged traces in the real Perfetto UI: the places of the rows, and screenshots in `MODTRACE_SCREENSHOTS`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import modtrace
from tests.support import perfetto_ui
from tests.support.browser import visit
from tests.support.kineto import GPU_TRACES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Frame

ALEXNET = GPU_TRACES[0]
PROCESS, THREAD = "python3.10 2869224", "thread 2869224 (python3.10)"

_ROWS = """() => {
    const row = node => [node.name, node.collapsed, node.children.map(row)];
    return app.trace.workspace.children.map(row);
}"""


def rows(frame: Frame) -> list[tuple[str, bool, Any]]:
    """The rows of the UI: name, whether it is folded, and the rows inside."""
    return [(name, folded, inside) for name, folded, inside in frame.evaluate(_ROWS)]


def group(siblings: list[Any], name: str) -> tuple[bool, list[Any]]:
    (only,) = (row for row in siblings if row[0] == name)
    return only[1], only[2]


def names(siblings: list[Any]) -> list[str]:
    return [name.strip() for name, _, _ in siblings]


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize("suffix", [".pftrace", pytest.param(".json", marks=pytest.mark.full)])
def test_rows_of_modules_are_above_their_threads(
    browser: Browser, ui: str, tmp_path: Path, pictures: Path, suffix: str
) -> None:
    trace = tmp_path / f"merged{suffix}"
    modtrace.merge(ALEXNET, None, trace)

    with visit(browser, viewport={"width": 1600, "height": 1000}) as seen:
        frame = perfetto_ui.hand_over(seen.page, trace, "merged", ui)
        frame.evaluate("async () => { await waitForPerfettoIdle(); }")
        seen.page.screenshot(path=pictures / f"perfetto-merged{suffix}.png")
        top = rows(frame)

    if suffix == ".pftrace":
        # modtrace's own layout: one group for the process, in it the thread, its modules above its operators.
        folded, inside = group(top, PROCESS)
        assert not folded
        _, thread = group(inside, f"{THREAD} 2869224")
        assert names(thread) == ["modules (2869224)", f"{THREAD} 2869224"]
        assert names(thread[0][2]) == [f"forward · {THREAD} (2869224)"]
        _, device = group(top, "GPU 0")
        assert names(device) == [
            *("modules · stream 7", "stream 7", "7 · overlapping slices"),
            *("Device 0", "modules · stream 20", "stream 20"),
        ]
    else:
        # In JSON each row is a group, and this version of the UI sorts them by their ids, the main thread first.
        folded, inside = group(top, PROCESS)
        assert not folded
        assert names(inside)[0] == f"{THREAD} 2869224"
        assert names(inside)[1].startswith(f"forward · {THREAD}")

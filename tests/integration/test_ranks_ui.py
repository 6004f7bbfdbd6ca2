"""A trace of all ranks as people view it: the real Perfetto UI, modtrace's own page, and the page of late ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from modtrace.cli.group import group as commands
from tests.support import perfetto_ui
from tests.support.browser import visit
from tests.support.rank_rings import HOSTS, write_ring

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four ranks on three hosts, with the same process id."""
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(4):
        write_ring(folder, rank, clock=HOSTS[rank], pings=2 if rank in (1, 2) else 0)
    return folder


def write(run: Path, *arguments: str) -> Path:
    out = run.parent / arguments[-1]
    done = CliRunner().invoke(commands, ["ranks", arguments[0], str(run), "-o", str(out)])
    assert done.exit_code == 0, done.output
    return out


@pytest.mark.parametrize("suffix", ["pftrace", pytest.param("json", marks=pytest.mark.full)])
def test_the_real_ui_draws_a_process_per_rank_and_arrows_between_them(
    browser: Browser, ui: str, run: Path, suffix: str
) -> None:
    trace = write(run, "timeline", f"all.{suffix}")

    with visit(browser) as seen:
        drawn = perfetto_ui.hand_over(seen.page, trace, "all ranks", ui)

        def ask(sql: str) -> int:
            return perfetto_ui.query_number(drawn, f"select count(*) as n from {sql}")

        assert ask("stats where severity in ('error', 'data_loss') and value > 0") == 0
        assert ask("process where name like 'rank % · python%'") == 4
        # Three arrows between the ranks' calls of each of 20 collectives, and one to rank 0's call, at the end of Net.
        assert ask("flow") == 20 * 3 + 20
        assert ask("slice where name = 'Net'") == 80


def test_our_page_shows_a_group_per_rank(browser: Browser, run: Path) -> None:
    page = write(run, "timeline", "all.html")

    with visit(browser) as seen:
        seen.page.goto(page.as_uri())
        seen.page.get_by_role("tab", name="Modules").click()
        seen.page.wait_for_function("() => document.body.innerText.includes('Net')", timeout=60_000)
        text = seen.page.inner_text("body")
        assert "rank 0 · python" in text
        assert all(f"rank {rank} · python ±" in text for rank in (1, 2, 3))


def test_the_page_of_who_is_late_draws_its_picture(browser: Browser, run: Path) -> None:
    page = write(run, "slow", "late.html")

    with visit(browser) as seen:
        seen.page.goto(page.as_uri())
        size = seen.page.evaluate("() => { const i = document.images[0]; return [i.naturalWidth, i.naturalHeight]; }")
        assert size == [20, 4]
        assert "4 ranks, 20 steps" in seen.page.inner_text("body")

"""`modtrace demo` as a user starts it: its output, its trace, its model, and the sample in the README."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import modtrace
from modtrace._files import next_step_hint, share_hint
from modtrace.checking import check
from modtrace.demo import GPT, batches, make_optimizer, train_step
from modtrace.write.html import write_html
from tests.support.browser import browser_command
from tests.support.forked_python import run_forked
from tests.support.gpt_timeline import gpt_timeline
from tests.support.python_process import python_environment, run_python
from tests.support.screenshots import colors_in
from tests.support.trace_processor import TraceProcessor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STEPS = 20


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The trace that `modtrace demo` wrote, and its output."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_forked("-m", "modtrace", "demo", cwd=folder, env=python_environment(COLUMNS="120"))
    return folder / "demo.json", done.stdout


def modules_called() -> list[str]:
    return ["GPT", *(f"GPT.{name}" for name, module in GPT().named_modules() if name not in ("", "blocks"))]


def test_it_prints_a_table_and_how_to_open_the_trace(demo: tuple[Path, str]) -> None:
    _, printed = demo
    lines = [line.rstrip() for line in printed.splitlines()]

    assert f"{STEPS}/{STEPS} loss" in lines[0]
    # The fields of a table's row: module, class, calls, share and nine times.
    (header,) = (number for number, line in enumerate(lines) if line.startswith("module (in GPT)"))
    rows = [line.split() for line in lines[header + 1 : header + 17]]
    assert all(len(row) == 13 and row[2] == str(STEPS) for row in rows)
    assert any(line.startswith(f"{STEPS} whole steps, median ") for line in lines)
    assert f"{len(modules_called()) - 16} more modules" in lines
    assert lines[-1].startswith("Next: ")
    assert lines[-1].endswith("modtrace view demo.json, or drop demo.json onto https://ui.perfetto.dev")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("demo.json", "summary demo.json; to see it, modtrace view demo.json, or drop demo.json onto"),
        ("a/b.pftrace", "summary a/b.pftrace; to see it, modtrace view a/b.pftrace, or drop a/b.pftrace onto"),
        ("my b.json.gz", "summary 'my b.json.gz'; to see it, modtrace view 'my b.json.gz', or drop my b.json.gz onto"),
        ("b.pftrace.gz", "summary b.pftrace.gz; to see it, modtrace view b.pftrace.gz, or drop b.pftrace.gz onto"),
    ],
)
def test_the_next_step_is_to_read_a_trace_and_to_see_it(path: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/modtrace")
    assert next_step_hint(path) == f"Next: modtrace {line} https://ui.perfetto.dev"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("demo.HTML", "Next: open demo.HTML in a browser; it needs no network"),
        ("demo.zip", "Next: modtrace view demo.zip, or attach it to a bug report"),
        ("run.modtrace", "Next: modtrace summary run.modtrace; to see it, modtrace view run.modtrace"),
    ],
)
def test_the_next_step_is_true_for_the_format(path: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/modtrace")
    assert next_step_hint(path) == line


def test_it_says_how_to_give_a_recording_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/modtrace")
    assert share_hint("a/my demo.json") == "To give it to others: modtrace report 'a/my demo.json' -o 'my demo.zip'"
    assert share_hint("run.modtrace") == "To give it to others: modtrace report run.modtrace -o run.zip"
    assert share_hint("r.0.pftrace.gz") == "To give it to others: modtrace report r.0.pftrace.gz -o r.0.zip"
    assert share_hint("Bug.ZIP").startswith("To show it to others, give them Bug.ZIP: they open the viewer.html in it")


def test_the_next_step_names_the_command_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert next_step_hint("demo.json").startswith(f"Next: {tmp_path}/python -m modtrace summary demo.json; to")
    (tmp_path / "modtrace").touch()
    assert next_step_hint("demo.json").startswith(f"Next: {tmp_path}/modtrace summary demo.json; to")


def test_the_readme_shows_what_summary_prints(demo: tuple[Path, str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme[readme.index("part of a step") :].partition("```")[0]  # below the findings
    printed = modtrace.load(demo[0]).summary().tables["parts"].to("text")

    # Times differ from run to run; the parts of a step of the demo do not, apart from garbage collections.
    lines = [line.split("  ", 1) for line in shown.splitlines() if "  " in line]
    heading, *rows = ([part, *cells.split()] for part, cells in lines)
    parts = [line.split("  ")[0] for line in printed.splitlines()]
    assert heading[1:] == ["median", "ms", "p95", "%"]
    assert parts[0] == heading[0] == "part of a step"
    printed_parts = parts[1 : parts.index("other") + 1]
    assert [row[0] for row in rows if row[0] != "gc"] == [part for part in printed_parts if part != "gc"]


def test_the_trace_has_each_call_of_each_module(demo: tuple[Path, str]) -> None:
    timeline = modtrace.load(demo[0])

    rows = {row.fqn: row for row in timeline.summary().rows}
    assert sorted(rows) == sorted(modules_called())
    assert {row.calls for row in rows.values()} == {STEPS}
    # Embeddings too: their weights have gradients.
    assert [fqn for fqn, row in rows.items() if row.backward_ns == 0] == []
    assert timeline.stats.overwritten == 0
    assert all(span.complete for span in timeline.spans)


def test_the_trace_is_sound(demo: tuple[Path, str], trace_processor: type[TraceProcessor]) -> None:
    assert check(demo[0]).faults == []
    trace = trace_processor.open(demo[0])
    assert trace.import_problems() == {}
    forward = trace.query(
        "select count() as slices from slice join thread_track on slice.track_id = thread_track.id"
        " where slice.category = 'forward'"
    )
    assert forward == [{"slices": STEPS * len(modules_called())}]


def test_the_model_is_a_causal_language_model_with_a_tied_head() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=2, context=8).eval()
    tokens = torch.arange(8).unsqueeze(0)

    logits = model(tokens)
    other = tokens.clone()
    other[0, 5:] = 77
    with torch.no_grad():
        changed = model(other)

    assert logits.shape == (1, 8, 256)
    assert model.head.weight is model.token_embedding.weight
    torch.testing.assert_close(changed[0, :5], logits[0, :5])
    assert not torch.allclose(changed[0, 5:], logits[0, 5:])


def test_the_model_learns() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=2)
    optimizer = make_optimizer(model)

    losses = [train_step(model, optimizer, *batch) for batch in itertools.islice(batches(), 30)]

    # Guessing any byte is ln 256 = 5.5 nats.
    assert losses[0] > 5
    assert losses[-1] < 3.8


def test_batches_are_the_text_shifted_by_one() -> None:
    tokens, targets = next(batches(size=3, length=10))

    assert tokens.shape == targets.shape == (3, 10)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(next(batches(seed=5))[0], next(batches(seed=5))[0])
    assert not torch.equal(next(batches(seed=5))[0], next(batches(seed=6))[0])


def test_the_picture_shows_a_bar_for_each_step(tmp_path: Path, browser: Browser) -> None:
    write_html(gpt_timeline(STEPS, 1), tmp_path / "page.html")
    script = Path(__file__).parents[2] / "scripts/picture.py"
    run = [*browser_command(), f"--user-data-dir={tmp_path / 'profile'}"]

    run_python(script, tmp_path / "page.html", tmp_path / "page.png", *run)

    png = base64.b64encode((tmp_path / "page.png").read_bytes()).decode()
    left, end, near_the_bottom = 238, 1100, 103
    line = colors_in(browser, png, [(x, near_the_bottom) for x in range(left, end)])
    forward = line[4]
    assert max(forward) - min(forward) > 30
    assert sum(after == forward != before for before, after in itertools.pairwise(line)) == STEPS

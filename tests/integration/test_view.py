"""`modtrace view` in a real browser: the whole trace reaches the real Perfetto UI; and a timeline in a notebook."""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace import Timeline, load
from modtrace._files import share_hint
from modtrace.cli.group import group
from modtrace.read import FileKind, file_kind
from modtrace.timeline import Name
from modtrace.view.server import MAX_SPANS, TraceServer, ensure_viewable, handover_page, iframe_html
from tests.support import perfetto_ui
from tests.support.browser import visit
from tests.support.forked_python import run_forked
from tests.support.gpt_timeline import gpt_timeline
from tests.support.python_process import HANGS_AFTER_S, python_environment, start_python

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.mark.parametrize(
    "suffix",
    [".pftrace", ".json.gz", *(pytest.param(suffix, marks=pytest.mark.full) for suffix in (".pftrace.gz", ".json"))],
)
def test_the_real_ui_receives_the_trace_whole(browser: Browser, ui: str, tmp_path: Path, suffix: str) -> None:
    timeline = gpt_timeline(steps=5, layers=4)
    trace = tmp_path / f"gpt{suffix}"
    timeline.save(trace)

    with visit(browser) as seen:
        drawn = perfetto_ui.hand_over(seen.page, trace, "</script> gpt", ui)
        in_categories = "select count(*) as n from slice where category in ('forward', 'backward', 'recompute')"
        assert perfetto_ui.query_number(drawn, in_categories) == len(timeline.spans)
        assert perfetto_ui.query_number(drawn, "select count(*) as n from flow") == len(timeline.spans) / 2
        pinned = perfetto_ui.pinned_tracks(drawn)
        # For a thread in JSON, this version of the UI also pins the group, which has the same name.
        twice = 2 if "json" in suffix else 1
        assert [name.split(" ·")[0].rstrip("0123456789 ") for name in pinned] == [
            *["steps and marks"] * twice,
            *["forward", "backward"] * twice,
        ]
        assert all("MainThread" in name for name in pinned[twice:])
        # A slice's colour is drawn on both tracks: a page with only their names has few colours.
        assert len(set(colours(seen.page))) > 10
        assert seen.page.title() == "</script> gpt – modtrace"
        asked = [url for url in seen.requests if url.startswith("http://127.0.0.1") and not url.startswith(ui)]
        assert [re.sub(r"^http://127.0.0.1:\d+/[\w-]+/", "", url) for url in asked if ":9001/" not in url] == [
            "",
            "open",
            "trace",
        ]


def colours(page: Page) -> list[int]:
    """The picture's coarse colours in the area of the pinned tracks."""
    picture = page.screenshot(clip={"x": 260, "y": 170, "width": 1300, "height": 190}, type="png")
    reading = """async bytes => {
        const bitmap = await createImageBitmap(new Blob([new Uint8Array(bytes)], { type: "image/png" }));
        const canvas = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
        canvas.drawImage(bitmap, 0, 0);
        const { data } = canvas.getImageData(0, 0, bitmap.width, bitmap.height);
        const counts = new Map();
        for (let at = 0; at < data.length; at += 4) {
            const colour = data[at] >> 4 << 8 | data[at + 1] >> 4 << 4 | data[at + 2] >> 4;
            counts.set(colour, (counts.get(colour) ?? 0) + 1);
        }
        return [...counts].filter(([, count]) => count > 100).map(([colour]) => colour);
    }"""
    return list(page.evaluate(reading, list(picture)))


def test_a_profiler_trace_is_converted_and_drawn(
    browser: Browser, ui: str, gpu_traces: list[Path], tmp_path: Path
) -> None:
    source = gpu_traces[1]
    trace, notes = ensure_viewable(source, tmp_path)

    assert any("no nn.Module slices" in note for note in notes)
    with visit(browser) as seen:
        drawn = perfetto_ui.hand_over(seen.page, trace, source.name, ui)
        kernels = perfetto_ui.query_number(drawn, "select count(*) as n from slice where category = 'kernel'")
    assert kernels == gzip.decompress(source.read_bytes()).count(b'"cat": "kernel"')


def test_no_other_site_can_read_the_trace(browser: Browser, ui: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"secret")
    with TraceServer(handover_page("trace", "t", "https://ui.perfetto.dev"), tmp_path / "trace") as server:
        with visit(browser) as seen:
            seen.page.goto(f"{ui}/service_worker.js")
            reading = "url => fetch(url).then(answer => answer.text()).catch(error => error.name)"
            assert seen.page.evaluate(reading, f"{server.url}trace") == "TypeError"
            assert seen.page.evaluate(reading, server.url) == "TypeError"
            assert seen.page.evaluate(
                """url => new Promise(done => {
                    const frame = document.createElement("iframe");
                    frame.onload = () => done(frame.contentDocument === null);
                    frame.src = url;
                    document.body.append(frame);
                })""",
                server.url,
            )
            blocked = [problem for problem in seen.problems if "frame-ancestors" in problem]
            assert blocked
        assert not server.wait(0)


# The command.


def started(*arguments: str | Path, **environ: str) -> subprocess.Popen[str]:
    clean = {
        key: value
        for key, value in python_environment().items()
        if key not in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "SSH_TTY")
    }
    return start_python(
        *("-m", "modtrace", "view", *arguments),
        stderr=subprocess.PIPE,
        env=clean | {"PYTHONUNBUFFERED": "1"} | environ,
    )


def fetched(url: str, *headers: str) -> bytes:
    address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", url)
    assert address is not None
    with socket.create_connection(("127.0.0.1", int(address[1])), timeout=HANGS_AFTER_S) as connection:
        lines = [f"GET {address[2]} HTTP/1.1", f"Host: 127.0.0.1:{address[1]}", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        answer = b""
        while part := connection.recv(1 << 20):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], head
    return body


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.pftrace"
    gpt_timeline(steps=2, layers=2).save(path)
    return path


def test_without_a_browser_it_says_where_and_how(trace: Path) -> None:
    running = started(trace, SSH_CONNECTION="10.0.0.1 1 10.0.0.2 22", DISPLAY=":10")
    assert running.stdout is not None
    first, second, third, fourth = (running.stdout.readline() for _ in range(4))

    address = re.fullmatch(r"Open (http://127\.0\.0\.1:(\d+)/[\w-]{32}/)\n", first)
    assert address is not None
    assert second == "On another machine, first forward the port there (--port chooses it):\n"
    assert third == f"  ssh -L {address[2]}:127.0.0.1:{address[2]} {socket.gethostname()}\n"
    page = fetched(address[1])
    assert b"https://ui.perfetto.dev/#!/?" in page
    # Without it, the UI asks whether each pattern is for names or for paths.
    (commands,) = re.findall(r'startupCommands=([^"&]+)', page.decode())
    assert [command["args"][1] for command in json.loads(unquote(commands))] == ["name"] * 3
    assert running.poll() is None
    assert fetched(f"{address[1]}trace", "Sec-Fetch-Site: same-origin") == trace.read_bytes()
    assert fourth == "Serving until the page is closed, or Ctrl-C.\n"
    assert running.communicate(timeout=HANGS_AFTER_S) == ("", f"{share_hint(str(trace))}\n")
    assert running.returncode == 0


def test_it_opens_the_users_browser_and_ends_by_itself(trace: Path, tmp_path: Path) -> None:
    # A minimal browser: it takes the page and the trace.
    script = tmp_path / "browser"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys, urllib.request\n"
        "page = urllib.request.urlopen(sys.argv[1])\n"
        "page.read()\n"
        "asked = urllib.request.Request(page.geturl() + 'trace', headers={'Sec-Fetch-Site': 'same-origin'})\n"
        f"open({str(tmp_path / 'got')!r}, 'wb').write(urllib.request.urlopen(asked).read())\n"
    )
    script.chmod(0o755)

    out, err = started(trace, BROWSER=str(script)).communicate(timeout=HANGS_AFTER_S)

    assert re.fullmatch(
        r"Opening http://127\.0\.0\.1:\d+/[\w-]{32}/\nServing until the page is closed, or Ctrl-C\.\n", out
    )
    assert err == f"{share_hint(str(trace))}\n"
    assert (tmp_path / "got").read_bytes() == trace.read_bytes()


def test_a_browser_that_cannot_start(trace: Path) -> None:
    running = started(trace, BROWSER="/nonexistent/browser %s")
    assert running.stdout is not None
    # The browser starts beside the server, which meanwhile prints until when it serves.
    lines = [line for line in (running.stdout.readline() for _ in range(6)) if not line.startswith("Serving ")]
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=HANGS_AFTER_S)

    assert lines[1] == "No browser could be started.\n"
    assert lines[2].startswith("Open http://127.0.0.1:")
    assert lines[4].startswith("  ssh -L ")
    assert running.returncode == 1


def test_offline_serves_our_own_page(trace: Path, browser: Browser) -> None:
    running = started(trace, "--offline")
    assert running.stdout is not None
    url = running.stdout.readline().split()[1]
    with visit(browser) as seen:
        seen.page.goto(url)
        seen.page.wait_for_selector("html[data-ready]", state="attached")
        assert seen.problems == []
        assert [asked for asked in seen.requests if not asked.endswith("favicon.ico")] == [url]
        seen.page.reload()
        seen.page.wait_for_selector("html[data-ready]", state="attached")
    running.communicate(timeout=HANGS_AFTER_S)
    assert running.returncode == 0


def test_options_of_view_choose_port_browser_and_interface(trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = started(trace, "--port", str(port)).communicate(timeout=HANGS_AFTER_S)
    assert done == ("", f"modtrace: cannot serve at port {port}: Address already in use\n")

    ui = "http://perfetto.example:8080"
    arguments = ("--port", str(port), "--no-browser", "--keep", "--perfetto-url", f"{ui}/")
    running = started(trace, *arguments, BROWSER="/nonexistent/browser %s")
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(4)]
    url = lines[0].split()[1]
    assert url.startswith(f"http://127.0.0.1:{port}/")
    assert lines[3] == "Serving until Ctrl-C.\n"
    for _ in range(2):
        assert f"{ui}/#!/?".encode() in fetched(url)
        assert fetched(f"{url}trace", "Sec-Fetch-Site: same-origin") == trace.read_bytes()
    running.send_signal(signal.SIGINT)

    assert running.communicate(timeout=HANGS_AFTER_S) == ("", f"{share_hint(str(trace))}\n")
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perfetto-url", "ui.perfetto.dev"], "'ui.perfetto.dev' is not http(s)://host or http(s)://host:port."),
        (["--perfetto-url", "https://x; frame-src *"], "is not http(s)://host"),
        (["--perfetto-url", "https://x/path"], "is not http(s)://host"),
        (["--port", "0"], "0 is not in the range 1<=x<=65535."),
        (["--offline", "--perfetto-url", "https://x"], "give one of them."),
    ],
)
def test_options_of_view_are_checked(options: list[str], said: str) -> None:
    result = CliRunner().invoke(group, ["view", "absent", *options])

    assert result.exit_code == 2
    assert said in result.stderr


def test_view_of_a_file_that_is_no_trace_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("no trace")
    running = started(tmp_path / "x.txt")
    out, err = running.communicate(timeout=HANGS_AFTER_S)

    assert (out, running.returncode) == ("", 1)
    assert (
        err == f"modtrace: {tmp_path / 'x.txt'}: it is neither a ring file nor a trace in JSON or Perfetto's format\n"
    )


# Conversions on the way.


_RECORDED = """
import sys
from pathlib import Path

import modtrace
import torch
from torch.profiler import ProfilerActivity, profile

folder = Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
profiler.export_chrome_trace(str(folder / "profile.json"))
with modtrace.record(ring=folder / "run.ring", memory_interval=0) as recording:
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            recording.step()
    profiler.export_chrome_trace(str(folder / "within.json"))
recording.save(folder / "run.json")
modtrace.merge(folder / "within.json", folder / "run.ring", folder / "merged.json")
modtrace.merge(folder / "within.json", folder / "run.ring", folder / "merged.pftrace")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profiler's trace, and a ring and a profiler's trace of the same steps, merged.

    Made in its own process: torch remembers for good which call of a module its first profile saw.
    """
    folder = tmp_path_factory.mktemp("recorded")
    run_forked("-W", "ignore", "-c", _RECORDED, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("run.ring", FileKind.RING),
        ("run.json", FileKind.SAVED_JSON),
        ("profile.json", FileKind.PROFILE),
        ("merged.json", FileKind.MERGED_JSON),
        ("merged.pftrace", FileKind.MERGED_PERFETTO),
    ],
)
def test_every_kind_of_trace_is_known_and_gives_its_timeline(
    recorded: Path, name: str, kind: FileKind, tmp_path: Path
) -> None:
    path = recorded / name
    with path.open("rb") as plain, gzip.open(tmp_path / "packed.gz", "wb") as packed:
        if kind is not FileKind.RING:  # a ring is a memory mapping, never compressed
            shutil.copyfileobj(plain, packed)

    assert file_kind(path) is kind
    calls = [(span.module_class, span.call) for span in load(path).spans if span.phase == "forward"]
    assert calls == [(module, call) for call in range(3) for module in ("Sequential", "Linear", "ReLU", "Linear")]
    if kind is not FileKind.RING:
        assert file_kind(tmp_path / "packed.gz") is kind
        assert list(load(tmp_path / "packed.gz").spans) == list(load(path).spans)


def test_a_merged_trace_gives_the_same_timeline_in_both_formats(recorded: Path) -> None:
    ours, packets = load(recorded / "merged.json"), load(recorded / "merged.pftrace")

    # JSON's times are doubles of µs, and slices are moved by a nanosecond where they would not nest as such.
    assert [span._replace(end_ns=0) for span in ours.spans] == [span._replace(end_ns=0) for span in packets.spans]
    assert np.abs(ours.columns.end - packets.columns.end).max() <= 1
    assert [counter.name for counter in ours.counters] == [counter.name for counter in packets.counters]
    assert [np.array_equal(a.value, b.value) for a, b in zip(ours.counters, packets.counters, strict=True)] == [True]
    assert [mark.text for mark in ours.marks] == ["step 0", "step 1", "step 2"]
    assert list(ours.marks) == list(packets.marks)


def test_a_ring_is_drawn_as_packets(recorded: Path, tmp_path: Path) -> None:
    made, notes = ensure_viewable(recorded / "run.ring", tmp_path)

    assert notes == []
    assert list(modtrace.load(made).spans) == list(modtrace.load(recorded / "run.ring").spans)
    assert ensure_viewable(recorded / "run.json", tmp_path) == (recorded / "run.json", [])
    assert ensure_viewable(recorded / "merged.json", tmp_path) == (recorded / "merged.json", [])


# Notebooks.

HOSTILE = "</script><img src=x onerror=parent.document.title='ran'>\"' &amp;"


def test_a_notebook_shows_the_page_in_a_sandbox(browser: Browser) -> None:
    timeline = gpt_timeline(steps=1, layers=1)
    timeline = replace(timeline, names=[Name(HOSTILE, f"{HOSTILE}.{name.fqn}", HOSTILE) for name in timeline.names])
    shown = timeline._repr_html_()

    assert "<img" not in shown
    with visit(browser) as seen:
        seen.page.set_content(f"<title>notebook</title>{shown}")
        inner = seen.page.frames[1]
        inner.wait_for_selector("html[data-ready]", state="attached")
        assert seen.page.title() == "notebook"
        assert inner.evaluate("origin") == "null"
        assert seen.page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
        assert seen.problems == []


def test_a_notebook_shows_the_last_steps_of_a_long_timeline() -> None:
    timeline = gpt_timeline(steps=100, layers=24)
    per_step = len(timeline.spans) // 100
    fitting = MAX_SPANS // per_step
    assert 1 < fitting < 100

    shown = iframe_html(timeline)

    kept = f"{fitting * per_step:,} of {len(timeline.spans):,} spans: the last {fitting} steps of 100."
    assert shown.startswith(f"<p>{kept} To see the whole timeline: ")
    assert shown.count("<iframe") == 1
    assert len(shown) < 600_000


def test_a_notebook_describes_a_huge_timeline() -> None:
    timeline = gpt_timeline(steps=1, layers=1000)
    assert len(timeline.spans) > MAX_SPANS

    shown = iframe_html(timeline)

    assert "<iframe" not in shown
    assert html.unescape(shown) == (
        f"<p>{timeline!r} has too many spans in one step to be shown here. "
        'To see the whole timeline: timeline.save("timeline.html"), or .pftrace.</p>'
    )


def test_a_notebook_shows_an_empty_timeline(browser: Browser) -> None:
    with visit(browser) as seen:
        seen.page.set_content(Timeline(gpt_timeline(1, 1).columns.take(np.array([], np.int64)))._repr_html_())
        seen.page.frames[1].wait_for_selector("html[data-ready]", state="attached")
        assert seen.problems == []

"""A folder that another user can write to: whatever they put there, no other file is written, read out or removed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modtrace import Timeline
from modtrace._errors import ModtraceError
from modtrace._files import Folder, atomic_writer, work_folder
from modtrace.live.follow import RingFollower
from modtrace.live.triggers import parse_conditions
from modtrace.live.watch import UpdateSink, Watcher
from modtrace.live.whole_run import StepsFile, WholeRunWriter
from modtrace.live.windows import KeepLimits, KeptFolder, WindowKeeper, kept_folder
from modtrace.recording.kept_windows import KeptWindows, _start_watcher
from modtrace.recording.signals import write_stacks_on
from modtrace.ring import Ring, whole_run_path
from modtrace.track.native.library import why_distrusted
from tests.support.watched_training import Training

PLANT = """
import os, sys
if sys.argv[1] == "root":
    os.setgid(65534); os.setuid(65534)
for how, victim, place in zip(*[iter(sys.argv[2:])] * 3):
    os.makedirs(os.path.dirname(place), 0o777, exist_ok=True)
    if os.path.lexists(place):
        os.rename(place, f"{place}.away")
    if how == "link": os.symlink(victim, place)
    elif how == "dangling": os.symlink(f"{victim}.not-there", place)
    elif how == "hard": os.link(victim, place)
    elif how == "fifo": os.mkfifo(place, 0o666)
    elif how == "folder": os.symlink(os.path.dirname(victim), place)
    elif how == "own-folder": os.mkdir(place, 0o777)
"""
KINDS = ("link", "dangling", "hard", "fifo", "folder", "own-folder")


class Shared:
    """A folder in which another user plants things, and a folder elsewhere that must not change."""

    def __init__(self, root: Path) -> None:
        self.folder, self.elsewhere = root / "shared", root / "elsewhere"
        self.folder.mkdir()
        self.folder.chmod(0o2777)
        self.elsewhere.mkdir(0o755)
        for name in ("victim", "run.modtrace.stacks", "steps.jsonl", "watch.log", "lock"):
            (self.elsewhere / name).write_text(f"precious {name}")
        self._before = self._state()

    def plant(self, *planted: tuple[str, str]) -> None:
        """Plant links (kind and place in the folder), as another user if this one is root."""
        arguments = [
            word for how, place in planted for word in (how, str(self.elsewhere / "victim"), str(self.folder / place))
        ]
        if any(how == "hard" for how, _ in planted):  # the kernel may refuse these to others: then this user does it
            subprocess.run([sys.executable, "-c", PLANT, "self", *arguments], check=True)
        else:
            user = "root" if os.geteuid() == 0 else "self"
            subprocess.run([sys.executable, "-c", PLANT, user, *arguments], check=True)

    def _state(self) -> dict[str, tuple[object, ...]]:
        return {
            path.name: (path.lstat().st_mode, path.lstat().st_uid, path.lstat().st_ino, _digest(path))
            for path in sorted(self.elsewhere.iterdir())
        }

    def check(self) -> None:
        """Assert that nothing elsewhere has changed, and that others can read no file of this user in the folder."""
        assert self._state() == self._before
        for path in self.folder.rglob("*"):
            status = path.lstat()
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and path.name != "named.pftrace"
            if is_ours and not os.path.samestat(status, (self.elsewhere / "victim").stat()):
                assert stat.S_IMODE(status.st_mode) == 0o600, path


@pytest.fixture
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:  # pytest's folder is closed to other users
        os.chmod(root, 0o755)
        yield Shared(Path(root))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _trained(ring: Path, slow: int = 20) -> None:
    training = Training(ring)
    for number in range(30):
        training.step(head=300 if number == slow else 5)
    training.script.close()


def _watch(shared: Shared, path: Path, before_look: Callable[[], object] = lambda: None) -> None:
    lines: list[str] = []
    folder = KeptFolder(kept_folder(path))
    sinks: list[UpdateSink] = [StepsFile(folder, "steps.jsonl", lines.append), WholeRunWriter(lines.append, every_ns=0)]
    keeper = WindowKeeper(folder, KeepLimits(), lines.append)
    watcher = Watcher([str(path)], parse_conditions("step > 3x"), keeper, lines.append, sinks, waits=False)
    before_look()
    watcher.run(0)


def _attempt(function: Callable[[], object]) -> None:
    """Run a function that may be refused."""
    with contextlib.suppress(ModtraceError, OSError):
        function()


PLACES = (
    "run.modtrace",
    "run.1.modtrace",
    "run.modtrace.stacks",
    "run.modtrace.whole.json",
    "run.kept",
    "run.kept/steps.jsonl",
    "run.kept/steps.1.jsonl",
    "run.kept/watch.log",
    "run.kept/step20-step.pftrace",
    "kept",
    "kept/step20-step",
)


@pytest.mark.parametrize(("place", "how"), [*itertools.product(PLACES, KINDS)])
def test_links_that_were_put_there_before_are_not_followed(shared: Shared, place: str, how: str) -> None:
    ring = shared.folder / "run.modtrace"
    shared.plant((how, place))

    def record() -> None:
        made = Ring(64, ring, {"pid": os.getpid()})
        assert made.path is not None
        assert made.folder is not None
        write_stacks_on(12, made.path, made.folder)
        made.close()
        Ring(64, ring, {"pid": os.getpid()}, keep=0).close()

    _attempt(record)
    if not os.path.lexists(ring):
        _trained(ring)
    elif place != "run.modtrace":
        ring.unlink()
        _trained(ring)
    _watch(shared, ring)
    second = shared.folder / "other.modtrace"
    _trained(second)
    _watch(shared, shared.folder)
    shared.check()


@pytest.mark.parametrize("how", ["link", "dangling", "hard", "fifo", "folder"])
@pytest.mark.parametrize("place", ["run.kept", "run.modtrace.whole.json", "run.modtrace", ""])
def test_a_name_that_is_taken_away_while_the_watcher_runs_leads_nowhere(shared: Shared, place: str, how: str) -> None:
    inner = shared.folder / "job"
    inner.mkdir()
    inner.chmod(0o2777)
    ring = inner / "run.modtrace"
    _trained(ring)

    _watch(shared, ring, lambda: shared.plant((how, f"job/{place}".rstrip("/"))))

    shared.check()


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("place", ["run.kept", "run.kept/watch.log", "run.kept/watch.1.log"])
def test_the_log_of_a_watcher_is_written_to_no_file_of_others(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    commands: list[str] = []
    monkeypatch.setattr("modtrace.recording.kept_windows.run_without_child", commands.append)
    shared.plant((how, place))

    _attempt(lambda: _start_watcher("run.modtrace", Folder(shared.folder), ["step > 3x"]))

    assert all(">>/proc/" in command and str(shared.folder) not in command for command in commands)
    shared.check()


@pytest.mark.parametrize("how", KINDS)
def test_a_window_that_the_program_asks_for_is_made_in_no_folder_of_others(shared: Shared, how: str) -> None:
    windows, warnings = KeptWindows(None, None), list[str]()
    ring = shared.folder / "run.modtrace"
    _trained(ring)
    timeline = RingFollower(ring).update().timeline
    assert timeline is not None
    shared.plant((how, "run.kept"))
    for _ in range(2):
        windows.keep_now("why", str(ring), lambda: Timeline.of(timeline), warnings.append)
        windows._saving.acquire()
        windows._saving.release()
    assert bool(warnings) == (how != "own-folder")
    shared.check()


@pytest.mark.parametrize("how", ["link", "dangling", "folder", "fifo"])
@pytest.mark.skipif(os.geteuid() != 0, reason="it takes two users")
def test_a_name_that_a_user_gives_is_no_way_through_a_link_of_another_user(shared: Shared, how: str) -> None:
    shared.plant((how, "named.pftrace"))

    def write() -> None:
        with atomic_writer(shared.folder / "named.pftrace") as file:
            file.write(b"a trace")

    if how != "fifo":  # it has no reader, and is not waited for
        _attempt(write)
    shared.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes two users")
def test_the_cache_of_the_engine_is_no_link_of_another_user(shared: Shared) -> None:
    shared.plant(("folder", "cache"))
    assert why_distrusted(shared.elsewhere) is None
    assert "belongs to another user" in (why_distrusted(shared.folder / "cache") or "")


def test_temporary_files_stay_in_their_folder_when_its_name_is_taken_away(shared: Shared) -> None:
    with work_folder(shared.folder) as folder:
        (name,) = os.listdir(shared.folder)
        os.rename(shared.folder / name, shared.folder / "away")
        shared.plant(("folder", name))
        with atomic_writer(folder / "victim") as file:
            file.write(b"x")
        (folder / "lock").write_text("x")
        assert sorted(os.listdir(shared.folder / "away")) == ["lock", "victim"]
        os.unlink(shared.folder / name)
        os.rename(shared.folder / "away", shared.folder / name)
    shared.check()


def test_files_made_from_a_ring_have_its_permissions(tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    for mode in (0o600, 0o640, 0o644):
        _trained(ring)
        ring.chmod(mode)
        lines: list[str] = []
        steps = StepsFile(KeptFolder(kept_folder(ring)), "steps.jsonl", lines.append)
        named = StepsFile(KeptFolder(tmp_path, is_named=True), f"{mode}.jsonl", lines.append, is_named=True)
        keeper = WindowKeeper(KeptFolder(kept_folder(ring)), KeepLimits(), lines.append)
        sinks: list[UpdateSink] = [steps, named, WholeRunWriter(lines.append)]
        Watcher([str(ring)], parse_conditions("step > 3x"), keeper, lines.append, sinks).run(0)
        kept = tmp_path / "run.kept"
        made = [*kept.iterdir(), Path(whole_run_path(str(ring)))]
        assert len(made) == 3
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {mode}
        assert stat.S_IMODE(kept.stat().st_mode) == {0o600: 0o700, 0o640: 0o750, 0o644: 0o755}[mode]
        assert stat.S_IMODE((tmp_path / f"{mode}.jsonl").stat().st_mode) == 0o644
        for path in kept.iterdir():
            path.unlink()
        kept.rmdir()


def test_a_ring_of_another_user_does_not_open_the_lines_of_ours(tmp_path: Path) -> None:
    steps = StepsFile(KeptFolder(tmp_path), "steps.jsonl", pytest.fail)
    for name, mode in (("theirs", 0o666), ("ours", 0o600)):
        _trained(tmp_path / f"{name}.modtrace")
        (tmp_path / f"{name}.modtrace").chmod(mode)
        follower = RingFollower(tmp_path / f"{name}.modtrace")
        steps.add_update(follower, follower.update())
    steps.close()
    assert stat.S_IMODE((tmp_path / "steps.jsonl").stat().st_mode) == 0o600

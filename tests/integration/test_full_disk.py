"""A full disk: at the start, while recording, and when the trace is saved."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.python_process import run_python
from tests.support.test_scale import PYTHON_IN_FULL

SMALL_DISK = """
import ctypes, os, sys
ids, libc = (os.getuid(), os.getgid()), ctypes.CDLL(None)
assert libc.unshare(0x10000000 | 0x20000) == 0  # as `unshare --user --mount --map-root-user`
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {ids[0]} 1"), ("gid_map", f"0 {ids[1]} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
assert libc.mount(b"none", os.fsencode(sys.argv[2]), b"tmpfs", 0, sys.argv.pop().encode()) == 0
"""

HEAD = """
import logging, os, resource, sys, torch, modtrace
from torch import nn
from pathlib import Path

# Python would leave cut `.pyc` files behind, where it imports something while the disk is full.
sys.dont_write_bytecode = True
engine, small, large = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
net, x = nn.Linear(2, 2), torch.ones(1, 2)

def train(steps=3):
    for _ in range(steps):
        net(x).sum().backward()

def finished(path):
    return [(span.call, span.phase) for span in modtrace.load(path).spans if span.complete]

def fill():
    with open(small / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass

three = [(call, phase) for call in range(3) for phase in ("forward", "backward")]
"""

AT_START = """
call = nn.Module.__call__
before = sorted(os.listdir(small))
try:
    with modtrace.record(engine=engine, ring=small / "run.modtrace"):
        raise AssertionError
except modtrace.RingError as error:
    print(error)
assert sorted(os.listdir(small)) == before
assert nn.Module.__call__ is call
train()
with modtrace.record(engine=engine, ring=large / "run.modtrace"):
    train()
"""

AT_SAVE = """
path = small / "trace.json"
path.write_text("what was there")
fill()
recording = modtrace.record(path, engine=engine, ring=large / "run.modtrace")
recording.start()
train()
try:
    recording.stop()
    raise AssertionError
except modtrace.WriteError as error:
    print(error)
assert path.read_text() == "what was there"
assert sorted(os.listdir(small)) == ["filler", "trace.json"]
assert finished(large / "run.modtrace") == three
recording.save(large / "trace.json")
assert finished(large / "trace.json") == three
"""

WHILE_RECORDING = """
ring = small / "run.modtrace"
recording = modtrace.record(engine=engine, capacity=1 << 10, ring=ring)
recording.start()
fill()
# The slots are reserved: the ring goes round and round on a disk without a free block.
train(2000)
assert modtrace.load(ring).stats.torn == 0
assert modtrace.load(ring).stats.overwritten > 1000
# The name table is reserved in part.
for number in range(3000):
    recording.mark(f"{number} " + "x" * 500)
train(3)
assert 1000 < len(modtrace.load(ring).marks) + modtrace.load(ring).stats.overwritten
recording.stop()
print("the training went on")
"""


def on_a_small_disk(code: str, engine: EngineName, kilobytes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in its own mount namespace, where folder/small has a limited number of kilobytes."""
    small, large = folder / "small", folder / "large"
    small.mkdir()
    large.mkdir()
    probe = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", small], check=False, capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {probe.stderr.decode().strip()}")
    return run_forked("-c", SMALL_DISK + HEAD + code, engine, small, large, f"size={kilobytes}k", status=None)


@PYTHON_IN_FULL
def test_at_the_start_it_is_an_error_and_leaves_nothing(engine: EngineName, tmp_path: Path) -> None:
    done = on_a_small_disk(AT_START, engine, 4096, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/small/run.modtrace: cannot reserve 34,607,104 bytes" in done.stdout
    assert "No space left on device. Free some space" in done.stdout
    assert len(modtrace.load(tmp_path / "large" / "run.modtrace").spans) == 6


@PYTHON_IN_FULL
def test_when_saving_the_old_file_stays_and_the_ring_has_all(engine: EngineName, tmp_path: Path) -> None:
    done = on_a_small_disk(AT_SAVE, engine, 256, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/small/trace.json: No space left on device" in done.stdout


def test_while_recording_no_signal_comes_and_the_training_goes_on(engine: EngineName, tmp_path: Path) -> None:
    done = on_a_small_disk(WHILE_RECORDING, engine, 2048, tmp_path)

    assert (done.returncode, done.stdout) == (0, "the training went on\n")
    assert done.stderr.count("the recording stopped after an error inside modtrace") == 1
    assert done.stderr.rstrip().endswith("OSError: [Errno 28] No space left on device")


LIMITED = """
sys.dont_write_bytecode = True  # what is compiled would be cut off too, and stay
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
"""


@PYTHON_IN_FULL
def test_a_limit_on_file_sizes_is_like_a_full_disk(engine: EngineName, tmp_path: Path) -> None:
    code = HEAD + LIMITED + AT_START.rpartition("with modtrace")[0]

    done = run_forked("-c", code, engine, tmp_path, tmp_path)

    assert done.stderr == ""
    assert f"{tmp_path}/run.modtrace: cannot reserve 34,607,104 bytes" in done.stdout
    assert "File too large. Free some space" in done.stdout


IMPORTED_AT_THE_END = """
import sys, torch, modtrace

net = torch.nn.Linear(2, 2)
for path in sys.argv[1:]:
    recording = modtrace.record(path, engine="python")
    recording.start()
    net(torch.ones(1, 2)).sum().backward()
    before = set(sys.modules)
    recording.stop()
    print(path, sorted(set(sys.modules) - before))
"""


def test_nothing_is_imported_when_a_recording_ends(tmp_path: Path) -> None:
    paths = [f"out{suffix}" for suffix in (".pftrace", ".json.gz", ".html", ".folded", ".speedscope.json", ".zip")]

    done = run_python("-c", IMPORTED_AT_THE_END, *paths, cwd=tmp_path)

    assert done.stdout.splitlines() == [f"{path} []" for path in paths]

"""The sanitizer reports that are left out: only races within torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/sanitizers/own_reports.py"

FREED = """\
    #0 operator delete(void*) tsan/tsan_new_delete.cpp:126 (libtsan.so.2.0.0+0x87cb3)
    #1 std::string::~string() <null> (libstdc++.so.6+0x12)
"""
TORCH = FREED + "    #2 torch::autograd::Node::~Node() <null> (libtorch_cpu.so+0x5c46b63)\n"
TORCH_CALLED_BY_US = TORCH + "    #3 enter(Call&) track/native/cpp/enter.cpp:10 (modtrace_native.so+0x11)\n"
OURS = FREED + "    #2 Session::end() track/native/cpp/session.cpp:5 (/cache/modtrace_native.so+0x10)\n"
PYTHON = (
    "    #0 free <null> (libtsan.so.2.0.0+0x1)\n    #1 list_dealloc Objects/listobject.c:3 (libpython3.11.so.1.0+0x2)\n"
)
UNKNOWN = "    #0 <null> <null> (0x7f0000000000)\n"


def race(access: str, other: str, kind: str = "data race") -> str:
    return (
        f"==================\nWARNING: ThreadSanitizer: {kind} (pid=7)\n"
        f"  Write of size 8 at 0x7b50 by thread T1 (mutexes: write M1):\n{access}\n"
        f"  Previous atomic read of size 8 at 0x7b50 by main thread:\n{other}\n"
        "  Thread T1 (tid=8, running) created by main thread at:\n"
        "    #0 pthread_create <null> (libtsan.so.2.0.0+0x5e686)\n\n"
        "SUMMARY: ThreadSanitizer: data race\n==================\n"
    )


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", []),
        (race(TORCH, TORCH_CALLED_BY_US), []),
        (race(TORCH, OURS), ["data race"]),
        (race(OURS, TORCH), ["data race"]),
        (race(PYTHON, TORCH), ["data race"]),
        (race(UNKNOWN, TORCH), ["data race"]),
        (race(TORCH, ""), ["data race"]),
        (race(TORCH, TORCH, "heap-use-after-free"), ["heap-use-after-free"]),
        (race(TORCH, TORCH) + race(OURS, OURS, "lock-order-inversion"), ["lock-order-inversion"]),
        ("==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n", ["heap-use-after-free on address 0x1"]),
        ("session.cpp:3:4: runtime error: signed integer overflow\n", ["signed integer overflow"]),
        ("FATAL: ThreadSanitizer: unexpected memory mapping\n", ["unexpected memory mapping"]),
    ],
)
def test_only_races_within_torch_are_left_out(tmp_path: Path, log: str, told: list[str]) -> None:
    (tmp_path / "thread.7").write_text(log and log + "ThreadSanitizer: reported 1 warnings\n")
    run = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == (1 if told else 0), run.stderr
    kinds = [
        line.partition(": ")[2] for line in run.stdout.splitlines() if ": " in line and not line.startswith("SUMM")
    ]
    assert [text for text in told if any(text in kind for kind in kinds)] == told
    assert run.stdout.count("WARNING") + run.stdout.count("ERROR") + run.stdout.count("FATAL") <= len(told)

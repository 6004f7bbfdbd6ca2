"""Files made to fill memory or the stack: one named error, exit code 1, no traceback, and a bounded peak of memory."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modtrace.ring.file_format import HEADER, MAGIC, SLOTS_OFFSET, VERSION
from modtrace.ring.slot_format import SLOT_BYTES
from tests.support.kineto import BASE, recording, trace, x
from tests.support.python_process import run_python
from tests.support.test_scale import PROMISED, scaled
from tests.support.timelines import gpt2_timeline

MAX_PEAK_BYTES = 300_000_000
"""Limit above the peak of the same command for a file of a kilobyte."""

# The peak of this process alone: `getrusage` includes the process that started it, from the time before Python ran.
COMMAND = """
import sys
from modtrace.cli import main
try:
    sys.exit(main())
finally:
    with open("/proc/self/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    print("PEAK", 1024 * int(peak), file=sys.stderr)
"""
COMMANDS = ("check", "convert", "summary", "merge", "report", "view")
EVENT = json.dumps(x("cpu_op", "aten::linear", 1000, 2000)).encode()
BOMB_BYTES = scaled(150, 300, 2000) << 20


def run(command: str, path: Path, folder: Path, timeout_s: float = 120) -> tuple[int, str, int]:
    """Return the exit code, the output, and the peak of memory in bytes."""
    more: dict[str, list[str | Path]] = {
        "convert": [folder / "out.json"],
        "merge": ["-o", folder / "out.pftrace"],
        "report": ["-o", folder / "out.zip"],
    }
    done = run_python("-c", COMMAND, command, path, *more.get(command, []), status=None, timeout_s=timeout_s)
    output, peak = re.sub(r"PEAK \d+\n", "", done.stdout + done.stderr), re.findall(r"PEAK (\d+)", done.stderr)
    return done.returncode, output, int(peak[-1])


def zeros(count: int) -> Iterator[bytes]:
    for _ in range(count >> 20):
        yield bytes(1 << 20)


def packed(path: Path, *parts: bytes, fill: bytes = b" ") -> Path:
    """Gzip the parts, with many bytes of `fill` in place of an empty part."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for part in parts:
            if part:
                file.write(part)
            else:
                for _ in range(BOMB_BYTES >> 20):
                    file.write(fill * (1 << 20))
    return path


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def json_bomb(path: Path) -> Path:
    return packed(path.with_suffix(".json.gz"), b'{"traceEvents":[' + EVENT, b"", b"]}")


def json_bomb_of_text(path: Path) -> Path:
    return packed(path.with_suffix(".json.gz"), b'{"x":"', b"", b'","traceEvents":[]}', fill=b"a")


def packets_bomb(path: Path) -> Path:
    # A packet of 1 MiB without content: a field with an unknown number.
    packet = b"\xfa\xff\x3f" + varint((1 << 20) - 7)
    with gzip.open(path.with_suffix(".pftrace.gz"), "wb", compresslevel=9) as file:
        for _ in range(BOMB_BYTES >> 20):
            file.write(b"\x0a" + varint(len(packet) + (1 << 20) - 7) + packet + bytes((1 << 20) - 7))
    return path.with_suffix(".pftrace.gz")


def saved_bomb(path: Path) -> Path:
    gpt2_timeline(100).save(path.with_suffix(".json"))
    head, events = path.with_suffix(".json").read_bytes().split(b'"traceEvents":[\n')
    return packed(path.with_suffix(".json.gz"), head + b'"traceEvents":[\n', b"", events, fill=b"\n")


def ring_named_bomb(path: Path) -> Path:
    return packed(path.with_suffix(".ring"), MAGIC, b"", fill=b"\0")


def zip_bomb(path: Path) -> Path:
    """A report whose trace is deflated twice."""
    bomb = json_bomb(path).read_bytes()
    with zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trace.json.gz", bomb)
    return path.with_suffix(".zip")


def zip_bomb_of_zeros(path: Path) -> Path:
    with (
        zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("trace.pftrace.gz", "w", force_zip64=True) as member,
    ):
        for block in zeros(BOMB_BYTES):
            member.write(block)
    return path.with_suffix(".zip")


def zip_with_many_names(path: Path) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for number in range(50_000):
            archive.writestr(f"{number}", b"")
    return path.with_suffix(".zip")


def sparse_ring(path: Path) -> Path:
    capacity = 20_000_000_000 // SLOT_BYTES
    text = b'{"pid":1}'
    log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
    with path.with_suffix(".ring").open("wb") as file:
        head = (MAGIC, VERSION, 0, capacity, SLOTS_OFFSET, log_start, len(text), zlib.crc32(text))
        file.write(HEADER.pack(*head) + text)
        file.truncate(log_start + (1 << 20))
    return path.with_suffix(".ring")


def sparse_log(path: Path) -> Path:
    text = b'{"pid":1}'
    log_start = SLOTS_OFFSET + 16 * SLOT_BYTES
    with path.with_suffix(".ring").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 0, 16, SLOTS_OFFSET, log_start, len(text), zlib.crc32(text)) + text)
        file.truncate(20_000_000_000)
    return path.with_suffix(".ring")


def plain(suffix: str, *parts: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        with path.with_suffix(suffix).open("wb") as file:
            for part in parts:
                file.write(part)
        return path.with_suffix(suffix)

    return make


TEXT = b'"' + b"x" * 200_000_000 + b'"'
NESTED = b"[" * 100_000 + b"]" * 100_000
NESTED_OBJECTS = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
LISTS = b"[" + b"[]," * (5 << 20) + b"[]]"
SHORT_FIELDS = b"\x22\x00" * (5 << 20)


def one_packet(field: bytes, content: bytes) -> bytes:
    packet = field + varint(len(content)) + content
    return b"\x0a" + varint(len(packet)) + packet


CRAFTED: dict[str, Callable[[Path], Path]] = {
    "gzip-bomb-json": json_bomb,
    "gzip-bomb-text-in-head": json_bomb_of_text,
    "gzip-bomb-saved-json": saved_bomb,
    "gzip-bomb-pftrace": packets_bomb,
    "gzip-bomb-named-ring": ring_named_bomb,
    "zip-bomb": zip_bomb,
    "zip-bomb-zeros": zip_bomb_of_zeros,
    "zip-many-names": zip_with_many_names,
    "sparse-ring": sparse_ring,
    "sparse-log": sparse_log,
    "text-200MB-in-head": plain(".json", b'{"x":', TEXT, b',"traceEvents":[', EVENT, b"]}"),
    "text-200MB-in-event": plain(".json", b'{"traceEvents":[{"ph":"X","name":', TEXT, b"}]}"),
    "text-200MB-in-tail": plain(".json", b'{"traceEvents":[', EVENT, b",", EVENT, b'],"x":', TEXT, b"}"),
    "text-200MB-in-saved-head": plain(".json", b'{"otherData":{"modtrace":{"format":1,"version":', TEXT, b"}}}"),
    "nested-head": plain(".json", b'{"x":', NESTED, b',"traceEvents":[', EVENT, b"]}"),
    "nested-objects-in-head": plain(".json", b'{"x":', NESTED_OBJECTS, b',"traceEvents":[', EVENT, b"]}"),
    "nested-tail": plain(".json", b'{"traceEvents":[', EVENT, b'],"x":', NESTED, b"}"),
    "nested-objects-in-tail": plain(".json", b'{"traceEvents":[', EVENT, b'],"x":', NESTED_OBJECTS, b"}"),
    "nested-event": plain(".json", b'{"traceEvents":[{"ph":"X","args":', NESTED, b"}]}"),
    "nested-in-saved-head": plain(".json", b'{"otherData":{"modtrace":{"format":1},"metadata":', NESTED, b"}}"),
    "lists-in-head": plain(".json", b'{"x":', LISTS, b',"traceEvents":[', EVENT, b"]}"),
    "lists-in-tail": plain(".json", b'{"traceEvents":[', EVENT, b'],"x":', LISTS, b"}"),
    "lists-in-event": plain(".json", b'{"traceEvents":[{"ph":"X","args":', LISTS, b"}]}"),
    "packet-of-2^63-bytes": plain(".pftrace", b"\x0a" + varint(2**63 - 1), b"\0" * 50_000_000),
    "packet-longer-than-file": plain(".pftrace", b"\x0a" + varint(15 << 20), b"\0" * (1 << 20)),
    "packet-length-without-end": plain(".pftrace", b"\x0a", b"\xff" * 50_000_000),
    "packet-of-short-names": plain(".pftrace", one_packet(b"\x62", b"\x12\x00" * (5 << 20))),
    "packet-of-short-args": plain(".pftrace", one_packet(b"\x5a", SHORT_FIELDS)),
}
# The Perfetto UI shows these files as they are: nothing of them is unpacked or read here.
VIEWED_AS_THEY_ARE = ("packet-", "text-200MB-in-saved-head", "nested-in-saved-head")


@pytest.fixture(scope="module")
def usual_peak(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Peak of each command for a small file."""
    folder = tmp_path_factory.mktemp("usual")
    recording(("Net", 900, 2100, 0)).save(folder / "saved.pftrace")
    modules = x("python_function", "nn.Module: Net_0", 900, 2100, Python_module_id=0)
    (folder / "profile.json").write_bytes(trace(modules, base=BASE))
    peaks = {}
    for command in COMMANDS:
        if command != "view":
            code, output, peaks[command] = run(command, folder / "profile.json", folder)
            assert code == 0, output
    return peaks | {"view": peaks["merge"]}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_a_named_error_in_bounded_memory(
    name: str, usual_peak: dict[str, int], tmp_path: Path
) -> None:
    path = CRAFTED[name](tmp_path / "crafted")
    # Usually two commands, and in turn one of those that read as `convert` does.
    others = [command for command in COMMANDS if command not in ("check", "merge")]
    for command in COMMANDS if PROMISED else ("check", "merge", others[list(CRAFTED).index(name) % len(others)]):
        if command == "view" and name.startswith(VIEWED_AS_THEY_ARE):
            continue
        code, output, peak = run(command, path, tmp_path)
        added = peak - usual_peak[command]
        print(f"{name:28} {command:8} {added / 1e6:7.1f} MB  exit {code}  {output[:150]!r}")
        assert code == 1, output
        assert "Traceback" not in output
        assert command == "check" or str(path) in output
        assert output.strip()
        assert added < MAX_PEAK_BYTES
    assert not {"out.json", "out.pftrace", "out.zip"} & {file.name for file in tmp_path.iterdir()}


def test_a_large_trace_that_packs_well_is_no_bomb(tmp_path: Path) -> None:
    events = b",".join([EVENT] * 8000)
    path = packed(tmp_path / "long.json.gz", *[b'{"traceEvents":[' + events, *[b"," + events] * 60, b"]}"])
    assert path.stat().st_size * 30 < len(events) * 61
    assert run("check", path, tmp_path)[0] in (0, 1)


def test_a_ring_of_more_memory_than_there_is_is_refused() -> None:
    code = """
import modtrace
try:
    modtrace.record(capacity=10**12 // 64, engine="python").start()
except modtrace.RingError as error:
    print(error)
"""
    done = run_python("-c", code)
    assert re.match(
        r"a ring of 15,625,000,000 events needs 500,000,000,000 bytes, but only [\d,]+ bytes of memory are available; "
        "lower capacity\n",
        done.stdout,
    )

"""The cost of `modtrace where` for thousands of ranks, and whether it names the rank for which the others wait.

Four ranks on gloo train the demo's GPT under DistributedDataParallel, until rank 3 stays in a module. While they hang,
their rings are copied, with ranks and groups of a larger job: one rank is a copy of rank 3, the others of ranks 0 to 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import modtrace
from modtrace.demo import GPT, batches, make_optimizer
from modtrace.live.hangs import find_hangs
from modtrace.live.rank_state import read_rank_state
from modtrace.ring.file_format import LOG_CHUNK_BYTES, SLOTS_OFFSET
from modtrace.ring.slot_format import SLOT_BYTES

RANKS, STUCK_MODULE = 4, "GPT.blocks.3.mlp"
RUN_WHERE = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.executable, "-m", "modtrace", "where", *sys.argv[1:]])
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, file=sys.stderr)
"""
_HEADER = struct.Struct("<8sIIQQQII")
_RECORD = struct.Struct("<II")


def train(rank: int, folder: Path, capacity: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = GPT(layers=6, width=16)
    parallel, optimizer = DistributedDataParallel(model), make_optimizer(model)
    with modtrace.record(engine="native", capacity=capacity, ring=folder / f"{rank}.modtrace"):
        for step, (tokens, targets) in enumerate(batches(1, 8, seed=rank)):
            if step == steps and rank == 3:
                mlp = model.get_submodule(STUCK_MODULE.removeprefix("GPT."))
                mlp.forward = lambda x: time.sleep(3600) or x  # type: ignore[func-returns-value]
            optimizer.zero_grad()
            F.cross_entropy(parallel(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()


def copy_ring(ring: bytes, path: Path, rank: int, ranks: int) -> None:
    """Write a copy of a ring as the ring of a rank of a larger job."""
    magic, version, _, capacity, slots, log, length, _ = _HEADER.unpack_from(ring)
    metadata = json.loads(ring[_HEADER.size : _HEADER.size + length]) | {"rank": rank, "world_size": ranks}
    text = json.dumps(metadata).encode()
    head = _HEADER.pack(magic, version, 0, capacity, slots, log, len(text), zlib.crc32(text)) + text
    with path.open("wb") as file:
        file.write(head.ljust(SLOTS_OFFSET, b"\0"))
        file.write(ring[SLOTS_OFFSET : SLOTS_OFFSET + capacity * SLOT_BYTES])
        while length := _RECORD.unpack_from(ring, log)[0]:
            record: dict[str, Any] = json.loads(ring[log + _RECORD.size : log + _RECORD.size + length])
            log += _RECORD.size + length
            if record["kind"] == "group":
                record["ranks"] = f"0-{ranks - 1}"
            text = json.dumps(record).encode()
            file.write(_RECORD.pack(len(text), zlib.crc32(text)) + text)
        file.truncate(SLOTS_OFFSET + capacity * SLOT_BYTES + LOG_CHUNK_BYTES)  # the size of a complete ring file


def wait_for_hang(rings: list[Path]) -> None:
    while True:
        time.sleep(1)
        if all(ring.exists() for ring in rings):
            hangs = find_hangs(map(read_rank_state, rings))
            if any(hang.waiting == (0, 1, 2) and "mlp for" in hang.text for hang in hangs):
                return


def measure(rings: list[Path], folder: Path, ranks: int) -> None:
    copies = folder / "copies"
    copies.mkdir()
    templates = [ring.read_bytes() for ring in rings]
    culprit = ranks * 3 // 7
    for rank in range(ranks):
        copy_ring(templates[3 if rank == culprit else rank % 3], copies / f"{rank}.modtrace", rank, ranks)
    files = [str(path) for path in copies.iterdir()]
    megabytes = sum(map(os.path.getsize, files)) / 1e6
    # From a small process: a child has its parent's memory at first.
    where = subprocess.run([sys.executable, "-c", RUN_WHERE, *files], capture_output=True, text=True)
    wall_s, cpu_s, kilobytes = map(float, where.stderr.split()[-3:])
    said = " ".join(where.stdout.split())
    is_named = re.search(rf"rank {culprit} has not called it: in forward .* mlp for", said)
    print(
        f"{ranks:,} ranks, {megabytes:,.0f} MB: {wall_s:.1f} s, {cpu_s:.1f} CPU seconds, largest process "
        f"{kilobytes / 1024:.0f} MB, {len(where.stdout.splitlines())} lines; rank {culprit} and its module: "
        f"{'is_named' if is_named else 'NOT NAMED'}"
    )
    if ranks == 1000 or not is_named:
        print(where.stdout + where.stderr)
    for path in files:
        os.unlink(path)
    copies.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--capacity", type=int, default=1 << 14)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = ["--capacity", str(options.capacity), "--steps", str(options.steps)]
    if options.train:
        train(int(options.train[0]), Path(options.train[1]), options.capacity, options.steps)
        return
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, *sizes, "--train"]
        processes = [subprocess.Popen([*command, str(rank), folder]) for rank in range(RANKS)]
        rings = [Path(folder, f"{rank}.modtrace") for rank in range(RANKS)]
        try:
            wait_for_hang(rings)
            for ranks in options.ranks:
                measure(rings, Path(folder), ranks)
        finally:
            for process in processes:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()

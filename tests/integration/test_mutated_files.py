"""Files of every format with a few changed bytes: `load`, `check` and `merge` raise only errors of modtrace."""

from __future__ import annotations

import gzip
import io
import random
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import modtrace
from modtrace import ModtraceError, load, merge
from modtrace.checking import check
from tests.support.kineto import evaluate, recording, trace, x
from tests.support.test_scale import scaled

MUTATIONS = scaled(40, 40, 2000)
RECORDED = recording(("Net", 900, 2100, 0), ("a: Linear", 950, 1900, 1), ("Net", 2900, 3600, 0, "backward"))
PROFILE = trace(
    x("python_function", "nn.Module: Net_0", 900, 2100, Python_module_id=0),
    x("cpu_op", "aten::linear", 1000, 1800, Sequence_number=1, External_id=1),
    evaluate("AddmmBackward0", 3000, 3500, 1),
    x("cuda_runtime", "cudaLaunchKernel", 1100, 1200, correlation=5, External_id=1),
    x("kernel", "gemm", 1300, 1400, pid=0, tid=7, correlation=5, External_id=1, stream=7, device=0),
)
ODD = (b'"', b"[", b"}", b"-", b"null", b"1e999", b"9" * 5000, b"\0", b"\\ud800")
FORMATS = (
    "profile.json",
    "saved.json",
    "saved.json.gz",
    "saved.pftrace",
    "saved.pftrace.gz",
    "merged.json",
    "merged.pftrace",
    "report.zip",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    (folder / "profile.json").write_bytes(PROFILE)
    for name in FORMATS:
        if name.startswith("saved"):
            RECORDED.save(folder / name)
        elif name.startswith("merged"):
            merge(folder / "profile.json", RECORDED, folder / name)
    modtrace.report(RECORDED).save(folder / "report.zip")
    return folder


def mutated(good: bytes, chance: random.Random) -> bytes:
    """Change, remove, insert or repeat some bytes."""
    data = bytearray(good)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        at = chance.randrange(max(len(data), 1))
        length = chance.choice([1, 1, 4, 40, 400])
        kind = chance.randrange(6)
        if kind == 0:
            data[at : at + 1] = chance.randbytes(1)
        elif kind == 1:
            data[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length] * chance.choice([1, 50])
        elif kind == 4:
            data[at : at + 1] = chance.choice(
                [b'"', b"[", b"}", b"-", b"null", b"1e999", b"9" * 5000, b"\0", b"\\ud800"]
            )
        else:
            del data[max(at, 1) :]
    return bytes(data)


def mutated_file(name: str, good: bytes, chance: random.Random) -> bytes:
    """Mutate a file or, half of the time, its unpacked content: with changed gzip bytes little can be read."""
    inside = chance.randrange(2)
    if name.endswith(".gz") and inside:
        return gzip.compress(mutated(gzip.decompress(good), chance), 1, mtime=0)
    if name.endswith(".zip") and inside:
        archive = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as source, zipfile.ZipFile(archive, "w") as target:
            for member in source.namelist():
                data = source.read(member)
                target.writestr(member, mutated_file("trace.gz", data, chance) if member.endswith(".gz") else data)
        return archive.getvalue()
    return mutated(good, chance)


def refuse_violations(path: Path) -> None:
    violations = check(path).faults
    if violations:
        raise ModtraceError(f"{path}: {len(violations)} violations")


def outcome_of(act: Callable[[], object]) -> tuple[str, str]:
    """Return the outcome of a call, and the text of its error."""
    try:
        act()
    except ModtraceError as error:
        return "refused", str(error)
    except Exception:
        return "FAULT", traceback.format_exc()[-900:]
    return "fine", ""


@pytest.mark.parametrize("name", FORMATS)
def test_mutations_give_a_result_or_an_error_of_modtrace(files: Path, name: str, tmp_path: Path) -> None:
    chance, good = random.Random(name), (files / name).read_bytes()
    path, profile = tmp_path / name, files / "profile.json"
    counts: Counter[str] = Counter()
    faults: dict[str, str] = {}
    for number in range(MUTATIONS):
        path.write_bytes(mutated_file(name, good, chance))
        for use, act in (
            ("load", lambda: load(path)),
            ("check", lambda: refuse_violations(path)),
            ("merge as recording", lambda: merge(profile, path, tmp_path / "out.pftrace")),
            ("merge as profile", lambda: merge(path, RECORDED, tmp_path / "out.json")),
        ):
            outcome, said = outcome_of(act)
            counts[f"{use}: {outcome}"] += 1
            if outcome == "FAULT":
                faults.setdefault(said, f"{use} of mutation {number}")
            # The error names the profile if the recording is now from another time.
            assert outcome in ("fine", "FAULT") or str(path) in said or str(profile) in said
    print(f"{name}: {MUTATIONS} mutations: {dict(sorted(counts.items()))}")
    assert not faults, "\n".join(f"{where}\n{what}" for what, where in faults.items())
    assert counts["load: refused"] > 0

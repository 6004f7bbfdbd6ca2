"""Fixtures for tests of reports."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import modtrace
from tests.support.gpt_timeline import gpt_timeline
from tests.support.kineto import GPU_TRACES
from tests.support.planted_run import RUN, environ, planted
from tests.support.python_process import run_python


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a run under planted names."""
    home = tmp_path_factory.mktemp("run") / "heartofgold" / "zaphod"
    home.mkdir(parents=True)
    (home / "deepthought.py").write_text(RUN)
    wrapper: tuple[str, ...] = ()
    if shutil.which("unshare") and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0:
        wrapper = ("unshare", "--uts", "sh", "-c", 'hostname magrathea && exec "$@"', "sh")
    run_python("deepthought.py", "--token", "tok_5f1e2d3c4b5a", cwd=home, env=environ(home), wrapper=wrapper)
    for name in ("plain.json", "with.json"):
        (home / name).write_text(json.dumps(planted(json.loads((home / name).read_text()))))
    for name in ("merged.json", "merged.pftrace"):
        modtrace.merge(home / "with.json", home / "run.ring", home / name)
    for path in filter(Path.exists, GPU_TRACES):
        with gzip.open(path) as real, gzip.open(home / path.name, "wt", 1) as spiked:
            json.dump(planted(json.load(real)), spiked)
    return home


@pytest.fixture(scope="module")
def bare() -> int:
    """Bytes of a nearly empty archive."""
    return modtrace.report(gpt_timeline(1, 1)).size

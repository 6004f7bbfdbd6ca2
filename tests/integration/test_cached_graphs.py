"""Graphs from torch's caches: cache hits stay hits under a recording, and their modules are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.python_process import start_python

pytestmark = [pytest.mark.usefixtures("native_engine"), pytest.mark.full]


def test_a_recording_takes_cached_graphs_and_knows_the_modules_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(how: str, cache: str) -> dict[str, Any]:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / cache))
        process = start_python("-m", "tests.support.cached_graphs", how)
        output = process.communicate()[0]
        assert process.returncode == 0
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told

    first, cached = told("plain", "one"), told("plain", "one")
    recorded, recorded_first = told("recorded", "one"), told("recorded", "other")

    # The third process tests something only if both caches served the second one.
    assert first["counters"]["inductor"]["fxgraph_cache_miss"] == 2
    assert cached["counters"]["aot_autograd"]["autograd_cache_hit"] == 1
    assert recorded["counters"] == cached["counters"]
    assert recorded_first["counters"] == first["counters"]
    inside = "norm: LayerNorm, up: Linear, act: GELU"
    assert recorded["inside"] == recorded_first["inside"] == [["forward", inside], ["backward", inside]] * 2
    assert recorded["losses"] == cached["losses"] == recorded_first["losses"] == first["losses"]

"""A merge of a profile from an H200, judged by ranges around each call, correlation ids and sequence numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from scripts.benches.gpu.attribution import Share, judge
from scripts.benches.gpu.profile_truth import PREFIX, read_trace, works_of

import modtrace
from tests.support.kineto import GPU_TRACES

pytestmark = pytest.mark.usefixtures("gpu_traces")
PROFILE = GPU_TRACES[0].with_name("h200-llama-checkpointed.json.gz")
MAIN_THREAD, AUTOGRAD_THREAD = 552, 688


def test_kernels_of_a_checkpointed_model_are_under_the_module_that_launched_them(tmp_path: Path) -> None:
    profile, merged = tmp_path / "profile.json", tmp_path / "merged.json"
    profile.write_bytes(gzip.decompress(PROFILE.read_bytes()))
    document = json.loads(profile.read_bytes())
    # The numbers that torch gave to the threads.
    number = {MAIN_THREAD: 1, AUTOGRAD_THREAD: 2}
    threads = {
        event["name"]: number[event["tid"]]
        for event in document["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    }
    works = works_of(document, threads)

    modtrace.merge(profile, PROFILE.with_name("h200-llama-checkpointed.pftrace"), merged)

    assert judge(works, read_trace(merged)) == Share(right=2_751_750, wrong=0, unknown=0, kernels=1396)
    assert {work.phase for work in works} == {"forward", "recompute", "backward"}
    assert sum(work.end - work.start for work in works) == 2_751_750

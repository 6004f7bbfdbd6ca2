"""25 kinds of slow steps: a watcher keeps each, and its log has the reason, in the step that the program notes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.python_process import start_python

PROGRAM = Path(__file__).parents[1] / "programs" / "slow_kinds.py"
PARTS = ("step", "data", "forward", "backward", "recompute", "loss", "optimizer", "compile", "saving", "evaluation")
CONDITIONS = [f"{part} > 800ms" for part in (*PARTS, "other", "gc", "range augment", "range tokenize")]
CONDITIONS += ["module *.head > 800ms", "module Net.body.0.0 > 800ms", "module Net.body.1 > 800ms", "hang 3s"]
REASONS = {
    **dict.fromkeys(("item", "collate", "epoch"), "data loading in step {} took"),
    "forward": r"Net\.head took .* in step {} .* of which [\d,]+ ms forward",
    "nested": r"Net\.body\.0\.0 took .* in step {} .* of which [\d,]+ ms forward",
    "module_backward": r"Net\.body\.1 took .* in step {} .* of which [\d,]+ ms backward",
    "parameter_hook": "backward in step {} took",
    "recompute": "recompute in step {} took",
    **dict.fromkeys(("loss", "loss_module"), "loss in step {} took"),
    **dict.fromkeys(("optimizer", "optimizer_hook"), r"step {}: .* ms optimizer \(Optimizer\.step"),
    "clip": r"step {}: .* ms optimizer \(clip_grad_norm_\)",
    "scheduler": r"step {}: .* ms optimizer \(LRScheduler\.step",
    "recompile": r"step {}: .* ms compile \(torch\.compile 0/1: .* expected 4, actual 6",
    "save": r"step {}: .* ms saving \(torch\.save\)",
    "load": r"step {}: .* ms saving \(torch\.load\)",
    "range": "augment in step {} took",
    "record_function": "tokenize in step {} took",
    "evaluation": "evaluation in step {} took",
    "other": "other in step {} took",
    "gc": "gc in step {} took",
    "hang": r"step{}-hang.*: no event for",
    "keep": r"step{}-keep-loss-is-nan.*: loss is nan",
    "signal": r"step{}-keep-signal.*: signal",
}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["native", "python"])
def test_each_kind_of_slow_step_is_kept_with_its_reason(tmp_path: Path, engine: EngineName) -> None:
    when = [word for condition in CONDITIONS for word in ("--keep-when", condition)]
    limits = ["--max-kept", "200", "--pause", "0ms", "--every", "500ms"]
    command = ["-m", "modtrace", "watch", "run.modtrace", "-o", "kept", *limits, *when]
    with start_python(*command, cwd=tmp_path, stderr=subprocess.PIPE) as watcher:
        run_forked(PROGRAM, engine, "run.modtrace", cwd=tmp_path)
        log = watcher.communicate()[1]
    truth = json.loads((tmp_path / "run.modtrace.truth.json").read_text())
    reasons = {**REASONS, "gc": "other in step {} took"} if engine == "python" else REASONS  # it records no collections
    assert set(truth) == set(reasons)
    wrong = {kind: step for kind, (step, _) in truth.items() if not re.search(reasons[kind].format(step), log)}
    assert wrong == {}, log
    kept = {int(step) for step in re.findall(r"kept kept/step(\d+)-", log)}
    others = kept - {step for step, _ in truth.values()}
    print(f"{engine}: {len(truth)} kinds are kept with the right reason, and {len(others)} other steps")

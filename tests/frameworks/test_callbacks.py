"""The callbacks for the trainers of transformers and Lightning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import modtrace

from .trainers import Net, import_torchvision, make_llama

pytestmark = pytest.mark.filterwarnings("default")


def marks(path: Path) -> list[str]:
    return [mark.text for mark in modtrace.load(path).marks if mark.kind != "sync"]


def make_trainer(out: Path, callbacks: list[Any], **arguments: Any) -> Any:
    """Return a Trainer of transformers for four steps of a small Llama."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (8, 8))]
    given = {"use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "disable_tqdm": True, **arguments}
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows[:2]}
    return Trainer(make_llama(), TrainingArguments(str(out), **given), **data, callbacks=callbacks)


def test_the_callback_of_transformers_records_a_range_with_its_marks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_torchvision()
    from modtrace.integrations.transformers import ModtraceCallback

    callback = ModtraceCallback(tmp_path / "trace-%r.json", steps=(1, 3), engine="python")
    every_second = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = make_trainer(tmp_path / "out", [callback], **every_second, report_to=[])

    trainer.train()

    assert trainer.state.global_step == 4
    timeline = modtrace.load(tmp_path / "trace-0.json")
    roots = [(span.fqn, span.step) for span in timeline.spans if span.phase == "forward" and span.depth == 0]
    # Two batches each, and between them the batch of the evaluation.
    assert roots == [("LlamaForCausalLM", step) for step in (1, 1, 2, 2, 2)]
    assert marks(tmp_path / "trace-0.json") == [
        *("step 1", "evaluation: first batch done", "evaluation done", "checkpoint saved", "step 2")
    ]
    assert callback.recording is not None
    assert not callback.recording.running


def test_the_callback_of_lightning_makes_a_span_of_training_step(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    import_torchvision()
    from lightning.pytorch import LightningModule, Trainer

    from modtrace.integrations.lightning import ModtraceCallback

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_steps=3,
        accumulate_grad_batches=2,
        accelerator="cpu",
        default_root_dir=str(tmp_path),
        enable_checkpointing=False,
        callbacks=[ModtraceCallback(tmp_path / "trace.json", steps=(1, 3), engine="python")],
        **quiet,
    )

    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2))  # type: ignore[arg-type]

    assert trainer.global_step == 3
    assert "training_step" not in vars(model)
    timeline = modtrace.load(tmp_path / "trace.json")
    forward = [span for span in timeline.spans if span.phase == "forward"]
    assert [(span.fqn, span.step) for span in forward if span.depth == 0] == [
        ("Model.training_step", step) for step in (1, 1, 2, 2)
    ]
    assert {span.fqn for span in forward if span.depth == 1} == {"Model.net"}
    assert sum(span.fqn == "Model.net" and span.phase == "backward" for span in timeline.spans) == 4
    assert marks(tmp_path / "trace.json") == ["step 1", "step 2"]


def test_loggers_of_lightning_get_each_step_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    import_torchvision()
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers.logger import Logger

    from modtrace.integrations.lightning import ModtraceCallback

    # The test writes what the watcher would.
    monkeypatch.setattr("modtrace.recording.kept_windows._start_watcher", lambda *_: None)
    lines = tmp_path / "run.kept" / "steps.jsonl"
    lines.parent.mkdir()

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            parts = {"data loading": 2_000_000, "my#range": 500_000 * number}
            line = {"pid": os.getpid(), "step": number, "duration_ns": 5_000_000 + number, "parts": parts}
            of_another = json.dumps(line | {"pid": 1})
            with lines.open("a") as file:
                file.write(
                    f"{of_another}\n{json.dumps(line)}\n{of_another[:9]}" if number == 4 else f"{json.dumps(line)}\n"
                )
            loss: Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logged: list[tuple[int | None, dict[str, float]]] = []

    class Own(Logger):  # type: ignore[misc]
        name = version = "own"

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            logged.append((step, {key: value for key, value in metrics.items() if key.startswith("modtrace/")}))

    Trainer(
        max_steps=5,
        log_every_n_steps=2,
        accelerator="cpu",
        default_root_dir=str(tmp_path),
        enable_checkpointing=False,
        logger=Own(),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModtraceCallback(ring=tmp_path / "run.modtrace", keep_when=(), engine="python")],
    ).fit(Model(), torch.utils.data.DataLoader(torch.randn(10, 4), batch_size=2))  # type: ignore[arg-type]
    assert [(step, numbers) for step, numbers in logged if numbers] == [
        (
            number,
            {
                "modtrace/step_ms": (5_000_000 + number) / 1e6,
                "modtrace/data loading_ms": 2.0,
                "modtrace/my_range_ms": 0.5 * number,
            },
        )
        for number in range(5)
    ]


def test_the_transformers_trainer_reports_each_step_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    import_torchvision()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import TrainerCallback
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    from modtrace.integrations.transformers import ModtraceCallback

    # The test writes what the watcher would.
    monkeypatch.setattr("modtrace.recording.kept_windows._start_watcher", lambda *_: None)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    lines = tmp_path / "run.kept" / "steps.jsonl"
    lines.parent.mkdir()
    reported: list[tuple[int, dict[str, float]]] = []

    class Watcher(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step = state.global_step - 1
            parts = {"data loading": 2_000_000, "forward": 500_000 * step}
            line = {"pid": os.getpid(), "step": step, "duration_ns": 5_000_000 + step, "parts": parts}
            with lines.open("a") as file:
                file.write(f"{json.dumps(line)}\n")

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            reported.append((state.global_step, dict(logs)))

    class OfTheUser(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            assert "epoch" in logs

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "own", Reporter)
    callback = ModtraceCallback(ring=tmp_path / "run.modtrace", keep_when=(), engine="python")
    callbacks, reports = [OfTheUser(), Watcher(), callback], ["tensorboard", "own"]
    trainer = make_trainer(tmp_path / "out", callbacks, logging_steps=2, save_strategy="no", report_to=reports)

    trainer.train()

    expected = [
        (
            step + 1,
            {
                "modtrace/step_ms": (5_000_000 + step) / 1e6,
                "modtrace/data loading_ms": 2.0,
                "modtrace/forward_ms": 0.5 * step,
            },
        )
        for step in range(4)
    ]
    assert [(step, logs) for step, logs in reported if "modtrace/step_ms" in logs] == expected
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name in expected[0][1]:
        events = board.Scalars(f"train/{name}")
        assert [event.step for event in events] == [step for step, _ in expected]
        assert [event.value for event in events] == pytest.approx([metrics[name] for _, metrics in expected])
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]


def test_nothing_of_a_library_is_imported_before_its_callback() -> None:
    code = "import sys, modtrace.integrations; print({'transformers', 'lightning', 'torch'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

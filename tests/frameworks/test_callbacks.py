"""The callbacks for the trainers of transformers and Lightning."""

from __future__ import annotations

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


def test_the_callback_of_transformers_records_a_range_with_its_marks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_torchvision()
    from transformers import Trainer, TrainingArguments

    from modtrace.integrations.transformers import ModtraceCallback

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (8, 8))]
    callback = ModtraceCallback(tmp_path / "trace-%r.json", steps=(1, 3), engine="python")
    trainer = Trainer(
        make_llama(),
        TrainingArguments(
            str(tmp_path / "out"),
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[callback],
    )

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


def test_nothing_of_a_library_is_imported_before_its_callback() -> None:
    code = "import sys, modtrace.integrations; print({'transformers', 'lightning', 'torch'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

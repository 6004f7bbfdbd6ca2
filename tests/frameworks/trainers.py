"""Trainings by libraries, in one process."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .judge import Run, train_on

__all__ = ["TRAINERS", "Net", "import_torchvision", "make_llama"]

_BATCHES, _BATCH = 4, 2


class Net(nn.Module):
    """Two layers, one of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        second: Tensor = self.second(self.second(torch.relu(self.first(x))))
        return second


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(_BATCH, 4, generator=generator) for _ in range(_BATCHES)]


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def _train_with_transformers(**arguments: Any) -> Run:
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class LoggedTrainer(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(2 * _BATCHES)]
    model = make_llama()
    with tempfile.TemporaryDirectory() as folder:
        trainer = LoggedTrainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                max_steps=2,
                per_device_train_batch_size=_BATCH,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.train()
    return Run([model], losses, trainer.state.global_step)


def transformers_trainer() -> Run:
    """HF Trainer"""
    return _train_with_transformers()


def transformers_accumulation() -> Run:
    """HF Trainer, gradients accumulated over 2 batches"""
    return _train_with_transformers(gradient_accumulation_steps=2)


def transformers_checkpoints() -> Run:
    """HF Trainer, activation checkpoints"""
    return _train_with_transformers(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


def transformers_reentrant_checkpoints() -> Run:
    """HF Trainer, reentrant activation checkpoints"""
    return _train_with_transformers(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def transformers_bf16() -> Run:
    """HF Trainer, bf16"""
    return _train_with_transformers(bf16=True)


def _fit(module: Any, count_steps: Callable[[Any], int]) -> Run:
    from lightning.pytorch import Trainer

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.stack(_batches()).flatten(0, 1), batch_size=_BATCH))  # type: ignore[arg-type]
    # The module itself is not called: its `training_step` calls the part.
    return Run([module.net], module.losses, count_steps(trainer), root=f"{type(module).__name__}.net")


def lightning_automatic() -> Run:
    """Lightning, automatic optimization"""
    from lightning.pytorch import LightningModule

    class Automatic(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return _fit(Automatic(), lambda trainer: int(trainer.global_step))


def lightning_manual() -> Run:
    """Lightning, manual optimization, two optimizers"""
    from lightning.pytorch import LightningModule

    class Manual(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Net()
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, number: int) -> None:
            for optimizer in self.optimizers():
                loss = self.net(batch).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net.first, self.net.second)]

    # Lightning counts each optimizer's.
    return _fit(Manual(), lambda trainer: int(trainer.global_step) // 2)


def accelerate_accumulation() -> Run:
    """accelerate, gradients accumulated over 2 batches"""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    run = Run([net])
    for batch in _batches():
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            run.steps += accelerator.sync_gradients
    return run


def lightning_fabric() -> Run:
    """Lightning Fabric"""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return train_on(Run([net]), optimizer, (model(batch).square().mean() for batch in _batches()), fabric.backward)


def peft_lora() -> Run:
    """PEFT, LoRA"""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.1)
    rows = (batch.abs().mul(8).long().clamp(max=31) for batch in _batches())
    losses = (model(input_ids=row, labels=row).loss for row in rows)
    return train_on(Run([model.base_model.model], outermost=model), optimizer, losses)


def import_torchvision() -> None:
    """Import what several libraries import, also where its operators were built for another torch: none is called."""
    while missing := _operator_missing_in_torchvision():
        torch.library.define(missing, "(Tensor x) -> Tensor")


def _operator_missing_in_torchvision() -> str | None:
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        match = re.fullmatch(r"operator (torchvision::\w+) does not exist", str(error))
        if match is None:
            raise
        return match[1]
    return None


def timm_vit() -> Run:
    """timm, a vision transformer"""
    import timm

    model = timm.create_model("test_vit", num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = (batch.repeat(1, 3 * 160 * 40).view(_BATCH, 3, 160, 160) for batch in _batches())
    return train_on(Run([model]), optimizer, (model(image).square().mean() for image in images))


TRAINERS: list[Callable[[], Run]] = [
    transformers_trainer,
    transformers_accumulation,
    transformers_checkpoints,
    transformers_reentrant_checkpoints,
    transformers_bf16,
    lightning_automatic,
    lightning_manual,
    lightning_fabric,
    accelerate_accumulation,
    peft_lora,
    timm_vit,
]
"""The first line of each docstring names it in the table."""

"""The models of the attribution of kernels: the project's small models, and models of transformers and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scripts.benches.gpu.subject import Subject
from tests.support.models import ARCHITECTURES
from torch import nn

ModelAndLoss = tuple[nn.Module, Callable[[], torch.Tensor]]

PROJECT_MODELS = (
    *("GPT", "Llama, checkpointed", "Llama, checkpointed (reentrant)", "mixture of experts"),
    *("encoder-decoder", "ResNet", "ViT", "LSTM"),
)


def model_makers(subject: Subject) -> dict[str, Callable[[], ModelAndLoss]]:
    """Return functions that make a model and its loss function; call them while `subject.device` is the default."""
    models: dict[str, Callable[[], ModelAndLoss]] = {name: ARCHITECTURES[name] for name in PROJECT_MODELS}
    models["124M GPT, bf16"] = lambda: _large(subject)
    # With a torchvision for another torch, imports raise other exceptions than ImportError.
    try:
        import transformers

        transformers.GPT2LMHeadModel, transformers.BertForMaskedLM  # noqa: B018 (these attributes are imported lazily)
    except Exception as error:
        print(f"without models of transformers: {error}\n")
    else:
        models["HF GPT-2, bf16"] = lambda: _gpt2(transformers, subject)
        models["HF BERT"] = lambda: _bert(transformers)
    try:
        import timm
    except Exception as error:
        print(f"without models of timm: {error}\n")
    else:
        for name in ("resnet18", "vit_tiny_patch16_224"):
            models[f"timm {name}"] = partial(_timm, timm, name)
    return models


def _large(subject: Subject) -> ModelAndLoss:
    model = subject.gpt()
    tokens = torch.randint(subject.vocabulary, (subject.batch, subject.length))

    def loss() -> torch.Tensor:
        with torch.autocast(subject.device, torch.bfloat16):
            out: torch.Tensor = model(tokens).float().logsumexp(-1).mean()
        return out

    return model, loss


def _gpt2(transformers: Any, subject: Subject) -> ModelAndLoss:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=97, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(97, (2, 32))

    def loss() -> torch.Tensor:
        with torch.autocast(subject.device, torch.bfloat16):
            out: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    return model, loss


def _bert(transformers: Any) -> ModelAndLoss:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=97
    )
    model = transformers.BertForMaskedLM(config)
    tokens = torch.randint(97, (2, 32))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def _timm(timm: Any, name: str) -> ModelAndLoss:
    model = timm.create_model(name, num_classes=10)
    images = torch.randn(2, 3, 224, 224)
    return model, lambda: model(images).square().mean()

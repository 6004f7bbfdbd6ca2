"""Small models of many architectures, to measure and to test with."""

from __future__ import annotations

from collections.abc import Callable

from .decoders import gpt, llama, llama_checkpointed, llama_checkpointed_reentrant, mixture_of_experts
from .recurrent import lstm, mamba, shared_block
from .seq2seq import encoder_decoder, t5
from .towers import two_towers
from .vision import resnet, unet, vit
from .workload import Workload

__all__ = ["ARCHITECTURES", "Workload"]

ARCHITECTURES: dict[str, Callable[[], Workload]] = {
    "GPT": gpt,
    "Llama": llama,
    "Llama, checkpointed": llama_checkpointed,
    "Llama, checkpointed (reentrant)": llama_checkpointed_reentrant,
    "mixture of experts": mixture_of_experts,
    "encoder-decoder": encoder_decoder,
    "T5": t5,
    "ResNet": resnet,
    "U-Net": unet,
    "ViT": vit,
    "LSTM": lstm,
    "Mamba": mamba,
    "two towers": two_towers,
    "one block, called four times": shared_block,
}

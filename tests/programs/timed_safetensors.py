"""Every fourth step saves by safetensors, as transformers and accelerate do, and two of them read it again.

What saves has work of its own around that of safetensors, in methods.
"""

import tempfile

import stopwatch
import torch
from safetensors.torch import load_file, save_file
from stopwatch import part


class Model:
    """A model that saves as transformers does: it prepares each tensor for saving."""

    def save_pretrained(self, path: str) -> None:
        save_file({name: tensor.double().float() for name, tensor in model.state_dict().items()}, path)


class Accelerator:
    """An object that loads a state as accelerate does."""

    def load_state(self, path: str) -> None:
        model.load_state_dict({name: tensor.double().float() for name, tensor in load_file(path).items()})


model = stopwatch.Net()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(128, stopwatch.WIDTH)
with tempfile.TemporaryDirectory() as folder:
    for number in range(16):
        if number % 4 == 3:
            with part("saving"):
                Model().save_pretrained(f"{folder}/model.safetensors")
        if number % 8 == 7:
            with part("saving"):
                Accelerator().load_state(f"{folder}/model.safetensors")
        stopwatch.learn(optimizer, lambda: model(batch))
stopwatch.report()

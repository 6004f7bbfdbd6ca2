"""Every fourth step saves by safetensors, as transformers and accelerate do, and two of them read it again."""

import tempfile

import stopwatch
import torch
from safetensors.torch import load_file, save_file
from stopwatch import part

model = stopwatch.Net()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(128, stopwatch.WIDTH)
with tempfile.TemporaryDirectory() as folder:
    for number in range(16):
        state = model.state_dict()
        if number % 4 == 3:
            with part("saving"):
                save_file(state, f"{folder}/model.safetensors")
        if number % 8 == 7:
            with part("saving"):
                load_file(f"{folder}/model.safetensors")
        stopwatch.learn(optimizer, lambda: model(batch))
stopwatch.report()

"""Keeps moving averages of a model: a deep copy by hand, and torch's `AveragedModel`; both are evaluated."""

import copy

import torch
import truth
from small_training import Net, train_epoch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
ema = copy.deepcopy(model).requires_grad_(False)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
truth.watch(model)
truth.watch(ema)
truth.watch(averaged.module)  # what wraps a model and only passes calls on has no row
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    train_epoch(model, optimizer, steps=2)
    averaged.update_parameters(model)
    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)
        truth.loss(ema(torch.ones(1, 4)).sum())
        truth.loss(averaged(torch.ones(1, 4)).sum())
truth.report()

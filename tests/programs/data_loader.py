"""Trains on what two workers of a DataLoader make, which import torch and train nothing."""

import torch
import truth
from small_training import Net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    truth.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="spawn"):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.step()
        truth.loss(loss)
    truth.report()

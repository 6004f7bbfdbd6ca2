"""A generator and a discriminator, both an `nn.Sequential`, with an optimizer each."""

import torch
import truth
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1), nn.Sigmoid())
criterion = nn.BCELoss()
truth.watch(generator)
truth.watch(discriminator)
truth.watch(criterion)
generator_optimizer = torch.optim.Adam(generator.parameters())
discriminator_optimizer = torch.optim.Adam(discriminator.parameters())
ones, zeros = torch.ones(3, 1), torch.zeros(3, 1)
for _ in range(4):
    discriminator_optimizer.zero_grad()
    fake = generator(torch.randn(3, 2))
    loss = criterion(discriminator(torch.randn(3, 4)), ones) + criterion(discriminator(fake.detach()), zeros)
    loss.backward()
    discriminator_optimizer.step()
    truth.loss(loss)

    generator_optimizer.zero_grad()
    loss = criterion(discriminator(fake), ones)
    loss.backward()
    generator_optimizer.step()
    truth.loss(loss)
    truth.step()
truth.report()

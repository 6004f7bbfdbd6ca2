"""A generator and a discriminator, with an optimizer each, that share a step."""

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import nn

generator, discriminator, criterion = stopwatch.Net(stopwatch.WIDTH), stopwatch.Net(1), nn.BCEWithLogitsLoss()
generator_optimizer = torch.optim.Adam(generator.parameters())
discriminator_optimizer = torch.optim.Adam(discriminator.parameters())
real, ones, zeros = torch.randn(128, stopwatch.WIDTH), torch.ones(128, 1), torch.zeros(128, 1)
for _ in range(12):
    with part("noise"), torch.profiler.record_function("noise"):
        noise = torch.randn(128, stopwatch.WIDTH)
    with part("optimizer"):
        discriminator.zero_grad()
    with part("forward"):
        fake = generator(noise)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        turn_to("loss")
        loss = criterion(on_real, ones) + criterion(on_fake, zeros)
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        discriminator_optimizer.step()
    with part("optimizer"):
        generator.zero_grad()
    with part("forward"):
        output = discriminator(fake)
        turn_to("loss")
        loss = criterion(output, ones)
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        generator_optimizer.step()
    del fake, on_real, on_fake, output, loss  # else the next forward ends with freeing this graph
    stopwatch.step()
stopwatch.report()

"""A policy that acts in an environment without gradients, and learns from what came of it."""

import numpy as np
import stopwatch
import torch
from stopwatch import part, turn_to
from torch.profiler import record_function

generator = np.random.default_rng(0)
policy = stopwatch.Net(4)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
state = np.zeros((64, stopwatch.WIDTH), np.float32)
for _ in range(12):
    states, actions, rewards = [], [], []
    for _ in range(12):
        with part("forward"), torch.no_grad():
            logits = policy(torch.from_numpy(state))
        with part("sample"), record_function("sample"):
            action = torch.distributions.Categorical(logits=logits).sample()
        with part("environment"), record_function("environment"):
            states.append(torch.from_numpy(state))
            actions.append(action)
            state = np.tanh(state + generator.standard_normal(state.shape, np.float32))
            rewards.append(torch.from_numpy(state.mean(axis=1)))
    with part("forward"):
        logits = policy(torch.cat(states))
        turn_to("loss")
        chosen = logits.log_softmax(1).gather(1, torch.cat(actions)[:, None])[:, 0]
        loss = -(chosen.exp() * torch.cat(rewards)).clamp(-1, 1).mean()
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    del logits, chosen, loss  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        optimizer.zero_grad()
stopwatch.report()

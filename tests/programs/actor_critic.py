"""PPO as cleanrl writes it: an agent that is never called, whose actor and critic are both an `nn.Sequential`."""

import torch
import truth
from torch import Tensor, nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        distribution = Categorical(logits=self.actor(x))
        chosen = distribution.sample() if action is None else action
        return chosen, distribution.log_prob(chosen), self.critic(x)


torch.manual_seed(0)
torch.set_num_threads(1)
agent = Agent()
truth.watch(agent)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
for _update in range(2):
    seen, actions, log_probs, rewards = [], [], [], []
    state = torch.randn(2, 4)
    for _ in range(3):
        with torch.no_grad():
            action, log_prob, _value = agent.get_action_and_value(state)
        seen.append(state)
        actions.append(action)
        log_probs.append(log_prob)
        rewards.append(action.float())
        state = torch.randn(2, 4)
    with torch.no_grad():
        last_value = agent.critic(state).flatten()
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0) + last_value
    for _epoch in range(2):
        _action, new_log_prob, value = agent.get_action_and_value(torch.cat(seen), torch.cat(actions))
        advantage = (returns.flatten() - value.flatten()).detach()
        ratio = (new_log_prob - torch.cat(log_probs)).exp()
        policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * (value.flatten() - returns.flatten()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        truth.step()
        truth.loss(loss)
truth.report()

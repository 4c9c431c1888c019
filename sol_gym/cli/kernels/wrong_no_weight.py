"""Wrong: normalises the rows and forgets to scale them by the weight."""

import torch


def run(hidden_states, weight):
    x = hidden_states.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)

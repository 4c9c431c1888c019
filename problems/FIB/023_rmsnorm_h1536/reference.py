"""RMSNorm over rows of 1536 elements."""

import torch

EPS = 1e-6


def run(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32 with a single rounding at the end.

    Args:
        hidden_states: [batch_size, hidden_size] bf16.
        weight: [hidden_size] bf16.

    Returns:
        [batch_size, hidden_size] bf16.
    """
    x = hidden_states.float()
    normalized = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    return (normalized * weight.float()).to(hidden_states.dtype)

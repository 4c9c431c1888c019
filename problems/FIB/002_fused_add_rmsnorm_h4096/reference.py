"""Residual addition fused with RMSNorm; the sum itself is not returned."""

import torch

EPS = 1e-5


def run(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum and RMSNorm in float32 with a single rounding at the end.

    Args:
        hidden_states, residual: [batch_size, hidden_size] bf16.
        weight: [hidden_size] bf16.

    Returns:
        [batch_size, hidden_size] bf16.
    """
    x = hidden_states.float() + residual.float()
    normalized = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    return (normalized * weight.float()).to(hidden_states.dtype)

"""Residual addition followed by RMSNorm."""

import torch


def run(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of the bfloat16 sum; rounds after the sum, the normalisation and the weight.

    Args:
        hidden_states, residual: [batch_size, seq_len, hidden_size] bf16.
        weight: [hidden_size] bf16.
        eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    x = residual + hidden_states
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)

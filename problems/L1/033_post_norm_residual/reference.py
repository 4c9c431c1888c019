"""RMSNorm of a sublayer's output, added to the residual stream."""

import torch


def run(
    sublayer_output: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm in float32, rounded after the weight and again after the addition.

    Args:
        sublayer_output, residual: [batch_size, seq_len, hidden_size] bf16.
        weight: [hidden_size] bf16.
        eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    x = sublayer_output.float()
    normalized = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return residual + (weight.float() * normalized).to(residual.dtype)

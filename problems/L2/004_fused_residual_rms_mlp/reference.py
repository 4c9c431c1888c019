"""Residual addition, RMSNorm and SwiGLU feed-forward of a Llama decoder layer."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The feed-forward branch alone: the residual sum is normalised but not added back.

    Args:
        hidden_states, residual: [batch_size, seq_len, hidden_size] bf16.
        norm_weight: [hidden_size] bf16.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size] bf16.
        down_proj_weight: [hidden_size, intermediate_size] bf16.
        eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    x = residual + hidden_states
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    # One rounding: the weight is applied in float32.
    y = (norm_weight.float() * normalized).to(x.dtype)
    gate = F.linear(y, gate_proj_weight)
    up = F.linear(y, up_proj_weight)
    return F.linear(F.silu(gate) * up, down_proj_weight)

"""Attention output projection and residual addition."""

import torch
import torch.nn.functional as F


def run(
    attn_output: torch.Tensor, residual: torch.Tensor, o_proj_weight: torch.Tensor
) -> torch.Tensor:
    """A product without bias, rounded to bfloat16, and the residual added to it.

    Args:
        attn_output, residual: [batch_size, seq_len, hidden_size] bf16.
        o_proj_weight: [hidden_size, hidden_size] bf16.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    return F.linear(attn_output, o_proj_weight) + residual

"""Attention's output projection: merge the heads, one linear map."""

import torch
import torch.nn.functional as F


def run(attn_output: torch.Tensor, o_proj_weight: torch.Tensor) -> torch.Tensor:
    """Heads side by side, times the transposed weight; rounded to bfloat16 once.

    Args:
        attn_output: [batch_size, num_heads, seq_len, v_head_dim] bf16.
        o_proj_weight: [hidden_size, num_heads * v_head_dim] bf16.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    return F.linear(attn_output.transpose(1, 2).flatten(2), o_proj_weight)

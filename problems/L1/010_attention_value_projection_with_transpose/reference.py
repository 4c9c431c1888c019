"""Value projection of grouped-query attention, delivered head by head."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128


def run(hidden_states: torch.Tensor, v_proj_weight: torch.Tensor) -> torch.Tensor:
    """A product without bias, heads moved before the sequence.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        v_proj_weight: [num_kv_heads * head_dim, hidden_size] bf16.

    Returns:
        [batch_size, num_kv_heads, seq_len, head_dim] bf16.
    """
    values = F.linear(hidden_states, v_proj_weight).unflatten(-1, (-1, HEAD_DIM))
    return values.transpose(1, 2).contiguous()

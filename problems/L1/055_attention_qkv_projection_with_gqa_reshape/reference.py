"""Query, key and value projections for grouped-query attention, heads first."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128


def run(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three linear maps without biases, each rounded to bfloat16 once.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_weight: [num_heads * 128, hidden_size] bf16.
        k_weight, v_weight: [num_kv_heads * 128, hidden_size] bf16.

    Returns:
        Queries [batch_size, num_heads, seq_len, 128], then keys and values
        [batch_size, num_kv_heads, seq_len, 128]; bf16, transposed views.
    """

    def project(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    return project(q_weight), project(k_weight), project(v_weight)

"""Query, key and value projections with biases, split into heads."""

import torch
import torch.nn.functional as F

HEAD_DIM = 256


def run(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_weight: torch.Tensor,
    k_bias: torch.Tensor,
    v_weight: torch.Tensor,
    v_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three linear maps; each product rounds to bfloat16 before its bias is added.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_weight: [num_attention_heads * 256, hidden_size] bf16, with q_bias to its rows.
        k_weight, v_weight: [num_key_value_heads * 256, hidden_size] bf16, likewise.

    Returns:
        Queries [batch_size, seq_len, num_attention_heads, 256], then keys and values
        [batch_size, seq_len, num_key_value_heads, 256]; bf16.
    """

    def project(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # The bias is a second addition, not the product's epilogue: two roundings.
        return (F.linear(hidden_states, weight) + bias).unflatten(-1, (-1, HEAD_DIM))

    return project(q_weight, q_bias), project(k_weight, k_bias), project(v_weight, v_bias)

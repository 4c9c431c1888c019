"""Backward of the query, key and value projections and of the rotary embedding after them."""

import torch


def rope_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient of x in x * cos + rotate(x) * sin, with rotate([x1, x2]) = [-x2, x1].

    The transpose of the rotation meets the other half of sin, which matters where they differ.
    """
    first, second = (grad * sin).chunk(2, dim=-1)
    return grad * cos + torch.cat((second, -first), dim=-1)


def run(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the hidden states and of the three weights, in float32.

    Args:
        grad_query: [batch_size, num_heads, seq_len, head_dim], of the rotated queries.
        grad_key, grad_value: [batch_size, num_kv_heads, seq_len, head_dim].
        hidden_states: [batch_size, seq_len, hidden_size].
        q_weight: [num_heads * head_dim, hidden_size].
        k_weight, v_weight: [num_kv_heads * head_dim, hidden_size].
        cos, sin: [batch_size, seq_len, head_dim].

    Returns:
        Gradients shaped like hidden_states, q_weight, k_weight and v_weight.
    """

    def merge_heads(x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, seq, head_dim] to [batch * seq, heads * head_dim]."""
        return x.transpose(1, 2).flatten(2).flatten(0, 1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    grad_q = merge_heads(rope_backward(grad_query, cos, sin))
    grad_k = merge_heads(rope_backward(grad_key, cos, sin))
    grad_v = merge_heads(grad_value)

    x = hidden_states.flatten(0, 1)
    grad_hidden_states = grad_q @ q_weight + grad_k @ k_weight + grad_v @ v_weight
    return grad_hidden_states.view_as(hidden_states), grad_q.T @ x, grad_k.T @ x, grad_v.T @ x

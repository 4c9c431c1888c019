"""Causal grouped-query attention with interleaved rotary embedding: forward again, and backward."""

import torch
import torch.nn.functional as F


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the column pairs (2i, 2i + 1) in float32; one rounding. A negated sin turns back."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(dim=-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Products in bfloat16; softmax, its gradient, rotations and group sums in float32.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_weight, v_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        inv_freq: [head_dim / 2] f32, radians a position.
        scaling: factor on the scores.

    Returns:
        Gradients of hidden_states, q_weight, k_weight, v_weight and o_weight, bf16.
    """
    dtype = hidden_states.dtype
    seq_len, head_dim = hidden_states.shape[1], 2 * inv_freq.shape[0]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    position = torch.arange(seq_len, dtype=torch.float32, device=inv_freq.device)
    angle = torch.outer(position, inv_freq)
    cos, sin = angle.cos(), angle.sin()
    q = rotate_pairs(heads(F.linear(hidden_states, q_weight)), cos, sin)
    k = rotate_pairs(heads(F.linear(hidden_states, k_weight)), cos, sin)
    v = heads(F.linear(hidden_states, v_weight))
    num_kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = (torch.matmul(q, k.transpose(-1, -2)) * scaling).masked_fill(future, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    rounded = probabilities.to(dtype)
    context = torch.matmul(rounded, v).transpose(1, 2).flatten(2)

    def sum_groups(grad: torch.Tensor) -> torch.Tensor:
        grouped = grad.unflatten(1, (num_kv_heads, group_size))
        return grouped.sum(dim=2, dtype=torch.float32).to(dtype)

    def merge_heads(grad: torch.Tensor) -> torch.Tensor:
        return grad.transpose(1, 2).flatten(2)

    grad_heads = heads(grad_output @ o_weight)
    grad_o_weight = grad_output.flatten(0, 1).T @ context.flatten(0, 1)
    grad_v = sum_groups(torch.matmul(rounded.transpose(-1, -2), grad_heads))
    grad_probabilities = torch.matmul(grad_heads, v.transpose(-1, -2)).float()
    projection = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_scores = (probabilities * (grad_probabilities - projection) * scaling).to(dtype)
    grad_q = rotate_pairs(torch.matmul(grad_scores, k), cos, -sin)
    grad_k = sum_groups(torch.matmul(grad_scores.transpose(-1, -2), q))
    grad_k = rotate_pairs(grad_k, cos, -sin)

    grad_q, grad_k, grad_v = merge_heads(grad_q), merge_heads(grad_k), merge_heads(grad_v)
    grad_hidden_states = grad_q @ q_weight + grad_k @ k_weight + grad_v @ v_weight
    tokens = hidden_states.flatten(0, 1)
    grad_q_weight = grad_q.flatten(0, 1).T @ tokens
    grad_k_weight = grad_k.flatten(0, 1).T @ tokens
    grad_v_weight = grad_v.flatten(0, 1).T @ tokens
    return grad_hidden_states, grad_q_weight, grad_k_weight, grad_v_weight, grad_o_weight

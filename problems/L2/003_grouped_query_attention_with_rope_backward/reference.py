"""Backward of grouped-query attention with rotary embedding, from saved forward tensors."""

import torch


def rope_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient through the half-split rotary embedding; products and sum round to grad's dtype."""
    first, second = (grad * sin).chunk(2, dim=-1)
    return grad * cos + torch.cat((second, -first), dim=-1)


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attn_weights: torch.Tensor,
    attn_output: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, ...]:
    """Matrix products in bfloat16, the softmax's gradient and the group sums in float32.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.
        q_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_weight, v_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        query_states, key_states, value_states: [batch_size, num_attention_heads, seq_len, head_dim]
            bf16, the first two after the rotary embedding, the last two repeated within groups.
        attn_weights: [batch_size, num_attention_heads, seq_len, seq_len] bf16, probabilities.
        attn_output: [batch_size, seq_len, num_attention_heads * head_dim] bf16.
        scaling: factor on the scores.

    Returns:
        Gradients of hidden_states, q_weight, k_weight, v_weight and o_weight, bf16.
    """
    dtype = grad_output.dtype
    num_heads, head_dim = query_states.shape[1], query_states.shape[3]
    num_kv_heads = k_weight.shape[0] // head_dim

    def sum_groups(grad: torch.Tensor) -> torch.Tensor:
        grouped = grad.unflatten(1, (num_kv_heads, -1))
        return grouped.sum(dim=2, dtype=torch.float32).to(dtype)

    def merge_heads(grad: torch.Tensor) -> torch.Tensor:
        return grad.transpose(1, 2).flatten(2)

    grad_attn = grad_output @ o_weight
    grad_o_weight = grad_output.flatten(0, 1).T @ attn_output.flatten(0, 1)

    grad_heads = grad_attn.unflatten(-1, (num_heads, head_dim)).transpose(1, 2)
    grad_v = sum_groups(attn_weights.transpose(-1, -2) @ grad_heads)
    grad_probabilities = (grad_heads @ value_states.transpose(-1, -2)).float()
    probabilities = attn_weights.float()
    projection = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_scores = (probabilities * (grad_probabilities - projection)).to(dtype) * scaling

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    grad_q = rope_backward(grad_scores @ key_states, cos, sin)
    grad_k = sum_groups(grad_scores.transpose(-1, -2) @ query_states)
    grad_k = rope_backward(grad_k, cos, sin)

    grad_q, grad_k, grad_v = merge_heads(grad_q), merge_heads(grad_k), merge_heads(grad_v)
    grad_hidden_states = grad_q @ q_weight + grad_k @ k_weight + grad_v @ v_weight
    tokens = hidden_states.flatten(0, 1)
    grad_q_weight = grad_q.flatten(0, 1).T @ tokens
    grad_k_weight = grad_k.flatten(0, 1).T @ tokens
    grad_v_weight = grad_v.flatten(0, 1).T @ tokens
    return grad_hidden_states, grad_q_weight, grad_k_weight, grad_v_weight, grad_o_weight

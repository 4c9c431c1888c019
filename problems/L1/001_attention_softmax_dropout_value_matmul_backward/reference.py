"""Backward of the tail of grouped-query attention: softmax, dropout, product with the values."""

import torch


def run(
    grad_attn_output: torch.Tensor,
    attn_weights: torch.Tensor,
    attn_weights_dropped: torch.Tensor,
    value_states: torch.Tensor,
    dropout_mask: torch.Tensor,
    attention_dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scores before the softmax and of the unexpanded values, in float32.

    Args:
        grad_attn_output: [batch_size, seq_len_q, num_attention_heads, head_dim] bf16.
        attn_weights: [batch_size, num_attention_heads, seq_len_q, seq_len_kv] bf16, before dropout.
        attn_weights_dropped: the same after dropout, bf16.
        value_states: [batch_size, num_key_value_heads, seq_len_kv, head_dim] bf16.
        dropout_mask: shaped like attn_weights, bool, True where kept.
        attention_dropout: probability of dropping.

    Returns:
        Gradients of the scores (shaped like attn_weights) and of the values, both bf16.
    """
    dtype = grad_attn_output.dtype
    num_heads, num_key_value_heads = attn_weights.shape[1], value_states.shape[1]
    groups = (num_key_value_heads, num_heads // num_key_value_heads)

    # The queries of all heads of a group stand below each other: one product per kv head.
    grad_output = grad_attn_output.float().transpose(1, 2).unflatten(1, groups).flatten(2, 3)
    grad_dropped = torch.matmul(grad_output, value_states.float().transpose(-1, -2))
    grad_probabilities = grad_dropped.view(attn_weights.shape)
    if attention_dropout > 0:
        grad_probabilities = grad_probabilities * dropout_mask / (1 - attention_dropout)

    probabilities = attn_weights.float()
    row_sum = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - row_sum)

    dropped = attn_weights_dropped.float().unflatten(1, groups).flatten(2, 3)
    grad_values = torch.matmul(dropped.transpose(-1, -2), grad_output)
    return grad_scores.to(dtype), grad_values.to(dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Probabilities of random scores, and a dropout of one in ten applied to them."""
    batch_size = axes_and_scalars["batch_size"]
    seq_len_q, seq_len_kv = axes_and_scalars["seq_len_q"], axes_and_scalars["seq_len_kv"]
    num_heads = axes_and_scalars["num_attention_heads"]
    num_key_value_heads = axes_and_scalars["num_key_value_heads"]
    head_dim = axes_and_scalars["head_dim"]
    attention_dropout = 0.1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    scores = torch.randn(batch_size, num_heads, seq_len_q, seq_len_kv, device=device)
    attn_weights = torch.softmax(scores, dim=-1).bfloat16()
    dropout_mask = torch.rand_like(scores) > attention_dropout
    dropped = attn_weights.float() * dropout_mask / (1 - attention_dropout)
    return {
        "grad_attn_output": normal(batch_size, seq_len_q, num_heads, head_dim),
        "attn_weights": attn_weights,
        "attn_weights_dropped": dropped.bfloat16(),
        "value_states": normal(batch_size, num_key_value_heads, seq_len_kv, head_dim),
        "dropout_mask": dropout_mask,
        "attention_dropout": attention_dropout,
    }

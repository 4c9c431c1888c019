"""Backward of softmax(scaling * Q K^T) towards queries and keys."""

import torch


def run(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    attn_weights: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax backward in float32, two roundings of the score gradient, then two products.

    Args:
        grad_output: [batch_size, num_heads, seq_len_q, seq_len_k] bf16.
        query: [batch_size, num_heads, seq_len_q, head_dim] bf16.
        key: [batch_size, num_heads, seq_len_k, head_dim] bf16.
        attn_weights: the softmax's result, shaped like grad_output, bf16.
        scaling: factor on the scores.

    Returns:
        Gradients of query and key, bf16.
    """
    grad, weights = grad_output.float(), attn_weights.float()
    row_sum = (grad * weights).sum(dim=-1, keepdim=True)
    grad_scores = (weights * (grad - row_sum)).to(query.dtype) * scaling
    grad_query = torch.matmul(grad_scores, key)
    grad_key = torch.matmul(grad_scores.transpose(-1, -2), query)
    return grad_query, grad_key

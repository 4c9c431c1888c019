"""Backward of masked softmax followed by dropout, towards the attention scores."""

import torch


def run(
    grad_output: torch.Tensor,
    p_attn: torch.Tensor,
    mask: torch.Tensor,
    dropout_mask: torch.Tensor,
    p_dropout: float,
) -> torch.Tensor:
    """Dropout backward, softmax backward, and zero where the mask hides the score.

    Args:
        grad_output: [batch_size, n_heads, seq_len, seq_len] f32.
        p_attn: the softmax's result, shaped alike, f32.
        mask: [batch_size, 1, seq_len, seq_len] bool, True where visible.
        dropout_mask: shaped like grad_output, bool, True where kept; not read without dropout.
        p_dropout: probability of dropping.

    Returns:
        Gradient of the scores, shaped like grad_output, f32.
    """
    grad = grad_output
    if p_dropout > 0:
        grad = grad * dropout_mask / (1.0 - p_dropout)
    row_sum = (p_attn * grad).sum(dim=-1, keepdim=True)
    return (p_attn * (grad - row_sum)).masked_fill(~mask, 0.0)

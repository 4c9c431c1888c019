"""Backward of rotary embedding tables with respect to the positions."""

import torch


def run(
    grad_cos: torch.Tensor,
    grad_sin: torch.Tensor,
    emb: torch.Tensor,
    inv_freq_expanded: torch.Tensor,
    attention_scaling: float,
) -> torch.Tensor:
    """All in float32.

    Args:
        grad_cos, grad_sin: [batch_size, seq_len, head_dim] bf16.
        emb: [batch_size, seq_len, head_dim] f32, the angles; only the first half is needed.
        inv_freq_expanded: [batch_size, head_dim / 2, 1] f32.
        attention_scaling: factor on both tables.

    Returns:
        Gradient of the positions [batch_size, seq_len] f32, as if they were real numbers.
    """
    angles, _ = emb.chunk(2, dim=-1)
    # An angle stands in both halves of the tables, so it collects the gradients of both.
    cos_first, cos_second = grad_cos.float().chunk(2, dim=-1)
    sin_first, sin_second = grad_sin.float().chunk(2, dim=-1)
    from_cos = (cos_first + cos_second) * -angles.sin() * attention_scaling
    from_sin = (sin_first + sin_second) * angles.cos() * attention_scaling
    # Not a matrix product, whose operands a GPU may round to TF32.
    return ((from_cos + from_sin) * inv_freq_expanded.transpose(1, 2)).sum(dim=-1)

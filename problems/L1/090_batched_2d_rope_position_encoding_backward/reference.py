"""Backward of taking cosine and sine of rotary angles."""

import torch


def run(grad_cos: torch.Tensor, grad_sin: torch.Tensor, idx_theta: torch.Tensor) -> torch.Tensor:
    """grad_sin * cos(theta) - grad_cos * sin(theta) in float32.

    Args:
        grad_cos, grad_sin: [batch_size, seq_len, head_dim] bf16.
        idx_theta: the angles, [batch_size, seq_len, head_dim] f32.

    Returns:
        Gradient of the angles, [batch_size, seq_len, head_dim] f32.
    """
    return grad_sin.float() * torch.cos(idx_theta) - grad_cos.float() * torch.sin(idx_theta)

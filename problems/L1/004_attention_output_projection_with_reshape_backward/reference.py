"""Backward of an attention output projection, with the heads split off again."""

import torch

HEAD_DIM = 64


def run(
    grad_output: torch.Tensor, reshaped: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the heads and of the weight: float32 products, rounded once.

    Args:
        grad_output: [batch_size, seq_len, hidden_size] bf16.
        reshaped: [batch_size, seq_len, hidden_size] bf16, the projection's input, heads slow.
        weight: [hidden_size, hidden_size] bf16, [out, in].

    Returns:
        Gradient of the heads [batch_size, num_heads, seq_len, head_dim] bf16 and of the weight,
        bf16.
    """
    dtype = grad_output.dtype
    grad = grad_output.float()
    grad_weight = grad.flatten(0, 1).T @ reshaped.float().flatten(0, 1)
    grad_heads = (grad @ weight.float()).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    return grad_heads.to(dtype).contiguous(), grad_weight.to(dtype)

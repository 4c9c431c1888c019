"""Backward of RMSNorm over a residual sum; both summands receive the same gradient."""

import torch


def run(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    normalized: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All arithmetic in float32; the input gradient is rounded to bfloat16 once.

    Args:
        grad_output: [batch_size, seq_len, hidden_size] bf16.
        x: [batch_size, seq_len, hidden_size] f32, the forward's input; not needed.
        normalized: [batch_size, seq_len, hidden_size] f32, x times its reciprocal rms.
        rstd: [batch_size, seq_len, 1] f32, the reciprocal rms.
        weight: [hidden_size] f32.

    Returns:
        Gradient of the hidden states and of the residual (bf16, two tensors of equal values, shaped
        like x), and of the weight ([hidden_size] f32).
    """
    grad = grad_output.float()
    grad_weight = (grad * normalized).sum(dim=(0, 1))
    grad_normalized = grad * weight
    projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
    grad_input = (rstd * (grad_normalized - projection * normalized)).to(grad_output.dtype)
    return grad_input, grad_input.clone(), grad_weight

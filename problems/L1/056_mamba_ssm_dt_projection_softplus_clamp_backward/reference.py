"""Backward of Mamba's time step: clamp(softplus(dt + bias))."""

import torch


def run(
    grad_output: torch.Tensor,
    dt_with_bias: torch.Tensor,
    dt_activated: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient passes strictly between the clamp's ends, times softplus's slope.

    Args:
        grad_output: [batch_size, seq_len, num_heads] bf16.
        dt_with_bias: softplus's input, shaped like grad_output, bf16.
        dt_activated: the saved activation that decides what passes, shaped alike, bf16.
        time_step_min, time_step_max: the clamp's ends.

    Returns:
        Gradient of dt (bf16, shaped like grad_output) and of the bias ([num_heads] bf16, summed
        over the unrounded float32 gradient).
    """
    activated = dt_activated.float()
    passes = (activated > time_step_min) & (activated < time_step_max)
    grad = grad_output.float() * passes * torch.sigmoid(dt_with_bias.float())
    return grad.to(grad_output.dtype), grad.sum(dim=(0, 1)).to(grad_output.dtype)

"""Backward of a residual addition behind a scalar tanh gate and a mask."""

import torch


def run(
    grad_output: torch.Tensor,
    gate: torch.Tensor,
    hidden_states: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of residual + tanh(gate) * hidden_states * mask.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, hidden_size] bf16.
        gate: 0-d bf16.
        mask: [batch_size, seq_len, 1] bf16, a general multiplier.

    Returns:
        Gradients of the residual and of hidden_states (bf16, shaped like grad_output), and of the
        gate (0-d bf16).
    """
    tanh_gate = torch.tanh(gate.float())
    # A 0-d operand does not promote: this product and the next round to bfloat16.
    grad_hidden_states = grad_output * tanh_gate * mask
    masked = (hidden_states * mask).float()
    grad_gate = (grad_output.float() * masked).sum() * (1.0 - tanh_gate * tanh_gate)
    return grad_output.clone(), grad_hidden_states, grad_gate.to(gate.dtype)

"""Backward of a SwiGLU feed-forward from saved activations, with all weight gradients."""

import torch


def run(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    gate_output: torch.Tensor,
    up_output: torch.Tensor,
    activated_gate: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (silu(x gate^T) * (x up^T)) down^T; SiLU's derivative in float32.

    Args:
        grad_output, x: [batch_size, seq_len, hidden_size] bf16.
        gate_output, up_output: [batch_size, seq_len, intermediate_size] bf16, the two projections.
        activated_gate: the same shape, bf16, SiLU of gate_output.
        gate_weight, up_weight: [intermediate_size, hidden_size] bf16.
        down_weight: [hidden_size, intermediate_size] bf16.

    Returns:
        Gradients of x, gate_weight, up_weight and down_weight, bf16.
    """
    dtype = grad_output.dtype

    def over_tokens(grad: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return grad.flatten(0, 1).T @ activation.flatten(0, 1)

    grad_product = grad_output @ down_weight
    grad_down_weight = over_tokens(grad_output, activated_gate * up_output)

    grad_up = grad_product * activated_gate
    grad_activated = (grad_product * up_output).float()
    gate = gate_output.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = (grad_activated * (sigmoid * (1 + gate * (1 - sigmoid)))).to(dtype)

    grad_x = grad_gate @ gate_weight + grad_up @ up_weight
    return grad_x, over_tokens(grad_gate, x), over_tokens(grad_up, x), grad_down_weight

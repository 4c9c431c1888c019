"""Backward of one dense SwiGLU expert."""

import math

import torch
import torch.nn.functional as F


def run(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate: torch.Tensor,
    gate_sigmoid: torch.Tensor,
    gate_silu: torch.Tensor,
    up: torch.Tensor,
    intermediate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (silu(x gate^T) * (x up^T)) down^T, in float32, rounded once each.

    Args:
        grad_output, x: [num_tokens, hidden_size] bf16.
        gate_weight, up_weight: [intermediate_size, hidden_size] bf16.
        down_weight: [hidden_size, intermediate_size] bf16.
        gate, gate_sigmoid, gate_silu, up, intermediate: [num_tokens, intermediate_size] bf16, as
            saved by the forward: x gate^T, its sigmoid, their product, x up^T and the product of
            the last two.

    Returns:
        Gradients of x, gate_weight, up_weight and down_weight, bf16.
    """
    dtype = grad_output.dtype
    grad, x = grad_output.float(), x.float()
    gate, sigmoid = gate.float(), gate_sigmoid.float()

    grad_down = grad.T @ intermediate.float()
    grad_intermediate = grad @ down_weight.float()
    grad_silu = grad_intermediate * up.float()
    grad_up_output = grad_intermediate * gate_silu.float()
    grad_gate_output = grad_silu * sigmoid * (1 + gate * (1 - sigmoid))

    grad_gate = grad_gate_output.T @ x
    grad_up = grad_up_output.T @ x
    grad_x = grad_gate_output @ gate_weight.float() + grad_up_output @ up_weight.float()
    return grad_x.to(dtype), grad_gate.to(dtype), grad_up.to(dtype), grad_down.to(dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Small tokens and gradients, and what a bfloat16 forward of them saves."""
    num_tokens, hidden_size = axes_and_scalars["num_tokens"], axes_and_scalars["hidden_size"]
    intermediate_size = axes_and_scalars["intermediate_size"]

    def normal(rows: int, columns: int, variance_of: int) -> torch.Tensor:
        draw = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        return draw / math.sqrt(variance_of)

    gate_weight = normal(intermediate_size, hidden_size, hidden_size)
    up_weight = normal(intermediate_size, hidden_size, hidden_size)
    down_weight = normal(hidden_size, intermediate_size, intermediate_size)
    x = normal(num_tokens, hidden_size, hidden_size)
    grad_output = normal(num_tokens, hidden_size, hidden_size)

    gate = F.linear(x, gate_weight)
    gate_sigmoid = torch.sigmoid(gate.float()).bfloat16()
    gate_silu = gate * gate_sigmoid
    up = F.linear(x, up_weight)
    return {
        "grad_output": grad_output,
        "x": x,
        "gate_weight": gate_weight,
        "up_weight": up_weight,
        "down_weight": down_weight,
        "gate": gate,
        "gate_sigmoid": gate_sigmoid,
        "gate_silu": gate_silu,
        "up": up,
        "intermediate": gate_silu * up,
    }

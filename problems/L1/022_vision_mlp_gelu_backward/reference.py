"""Backward of a two-layer MLP with the tanh form of GELU."""

import math

import torch


def gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    """Derivative of 0.5 x (1 + tanh(k (x + b x^3)))."""
    k, b = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + b * x.pow(3)))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * k * (1 + 3 * b * x.square())


def run(
    grad_output: torch.Tensor,
    hidden_state: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gelu(x fc1^T + b1) fc2^T + b2, in float32.

    Args:
        grad_output, hidden_state: [seq_len, hidden_size] f32.
        fc1_weight: [intermediate_size, hidden_size] f32.
        fc2_weight: [hidden_size, intermediate_size] f32.
        fc1_bias, fc2_bias: [intermediate_size] and [hidden_size] f32; not needed.
        fc1_output, gelu_output: [seq_len, intermediate_size] f32, as saved by the forward.

    Returns:
        Gradients of hidden_state, fc1_weight, fc1_bias, fc2_weight and fc2_bias, f32.
    """
    grad_fc2_bias = grad_output.sum(dim=0)
    grad_fc2_weight = grad_output.T @ gelu_output
    grad_fc1_output = (grad_output @ fc2_weight) * gelu_tanh_derivative(fc1_output)
    grad_fc1_bias = grad_fc1_output.sum(dim=0)
    grad_fc1_weight = grad_fc1_output.T @ hidden_state
    grad_hidden_state = grad_fc1_output @ fc1_weight
    return grad_hidden_state, grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias

"""Backward of a feed-forward network with biases, Linear - tanh-GELU - Linear."""

import torch

SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715


def gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    """Derivative of the tanh form of GELU."""
    t = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x.pow(3)))
    inner_slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x.square())
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * inner_slope


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
    intermediate: torch.Tensor,
    intermediate_activated: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input and all parameters, in float32.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, hidden_size].
        weight1: [intermediate_size, hidden_size]; weight2: [hidden_size, intermediate_size].
        bias1, bias2: not needed.
        intermediate, intermediate_activated: [batch_size, seq_len, intermediate_size], saved
            before and after the activation; both are taken as they are.

    Returns:
        Gradients shaped like hidden_states, weight1, bias1, weight2 and bias2.
    """
    grad = grad_output.flatten(0, 1)
    grad_weight2 = grad.T @ intermediate_activated.flatten(0, 1)
    grad_bias2 = grad.sum(dim=0)

    grad_inner = grad @ weight2 * gelu_tanh_derivative(intermediate.flatten(0, 1))
    grad_weight1 = grad_inner.T @ hidden_states.flatten(0, 1)
    grad_bias1 = grad_inner.sum(dim=0)
    grad_hidden_states = (grad_inner @ weight1).view_as(hidden_states)
    return grad_hidden_states, grad_weight1, grad_bias1, grad_weight2, grad_bias2

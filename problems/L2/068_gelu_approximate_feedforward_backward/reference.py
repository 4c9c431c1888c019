"""Backward of a feed-forward network without biases, Linear - tanh-GELU - Linear."""

import torch
import torch.nn.functional as F

SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    linear1_out: torch.Tensor,
    tanh_inner: torch.Tensor,
    gelu_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input and both weights, in float32.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, dim].
        weight1: [hidden_dim, dim]; weight2: [dim, hidden_dim].
        linear1_out: [batch_size, seq_len, hidden_dim], input of the GELU.
        tanh_inner: [batch_size, seq_len, hidden_dim], the tanh inside the GELU.
        gelu_out: [batch_size, seq_len, hidden_dim], output of the GELU.

    Returns:
        Gradients shaped like hidden_states, weight1 and weight2.
    """
    grad_gelu = grad_output @ weight2
    grad_weight2 = grad_output.flatten(0, 1).T @ gelu_out.flatten(0, 1)

    inner_slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * linear1_out.square())
    slope = 0.5 * (1 + tanh_inner) + 0.5 * linear1_out * (1 - tanh_inner.square()) * inner_slope
    grad_linear1 = grad_gelu * slope
    grad_weight1 = grad_linear1.flatten(0, 1).T @ hidden_states.flatten(0, 1)
    return grad_linear1 @ weight1, grad_weight1, grad_weight2


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations, small weights, and the tensors that the forward saves."""
    axes = axes_and_scalars
    shape, dim = (axes["batch_size"], axes["seq_len"]), axes["dim"]
    hidden_dim = axes["hidden_dim"]
    hidden_states = torch.randn(*shape, dim, device=device)
    weight1 = 0.02 * torch.randn(hidden_dim, dim, device=device)
    x = F.linear(hidden_states, weight1)
    tanh_inner = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x.pow(3)))
    return {
        "grad_output": torch.randn(*shape, dim, device=device),
        "hidden_states": hidden_states,
        "weight1": weight1,
        "weight2": 0.02 * torch.randn(dim, hidden_dim, device=device),
        "linear1_out": x,
        "tanh_inner": tanh_inner,
        "gelu_out": 0.5 * x * (1 + tanh_inner),
    }

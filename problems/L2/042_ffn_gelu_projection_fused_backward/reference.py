"""Backward of a post-norm feed-forward block, y = LayerNorm(x + W2 gelu(W1 x))."""

import math

import torch
import torch.nn.functional as F

SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715


def gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    """Derivative of the tanh form of GELU."""
    t = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x.pow(3)))
    inner = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x.square())
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * inner


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    residual_output: torch.Tensor,
    normalized: torch.Tensor,
    var: torch.Tensor,
    ln_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the input and of all six parameters, from tensors the forward saved.

    Everything is float32. B batch_size, S seq_len, H hidden_size, I intermediate_size.

    Args:
        grad_output, hidden_states: [B, S, H].
        fc1_weight: [I, H]; fc2_weight: [H, I].
        fc1_output, gelu_output: [B, S, I], before and after the activation.
        residual_output: [B, S, H], LayerNorm's input; not needed.
        normalized: [B, S, H], LayerNorm's output before its affine part.
        var: [B, S, 1], biased variance of LayerNorm's input.
        ln_weight: [H].
        eps: added to the variance.

    Returns:
        Gradients of hidden_states, fc1 weight and bias, fc2 weight and bias, LayerNorm weight and
        bias, each shaped like its tensor.
    """
    grad_ln_weight = (grad_output * normalized).sum(dim=(0, 1))
    grad_ln_bias = grad_output.sum(dim=(0, 1))
    grad_normalized = grad_output * ln_weight
    mean = grad_normalized.mean(dim=-1, keepdim=True)
    projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
    # The gradient at LayerNorm's input serves the residual branch and the second product alike.
    grad_residual = (grad_normalized - mean - normalized * projection) / torch.sqrt(var + eps)

    grad_fc2 = grad_residual.flatten(0, 1)
    grad_fc2_bias = grad_fc2.sum(dim=0)
    grad_fc2_weight = grad_fc2.T @ gelu_output.flatten(0, 1)

    grad_fc1 = grad_fc2 @ fc2_weight * gelu_tanh_derivative(fc1_output.flatten(0, 1))
    grad_fc1_bias = grad_fc1.sum(dim=0)
    grad_fc1_weight = grad_fc1.T @ hidden_states.flatten(0, 1)
    grad_hidden_states = (grad_fc1 @ fc1_weight).view_as(hidden_states) + grad_residual
    return (
        grad_hidden_states,
        grad_fc1_weight,
        grad_fc1_bias,
        grad_fc2_weight,
        grad_fc2_bias,
        grad_ln_weight,
        grad_ln_bias,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Saved tensors of one forward pass (without biases, unit LayerNorm weight)."""
    shape = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden, inner = axes_and_scalars["hidden_size"], axes_and_scalars["intermediate_size"]
    eps = 1e-5
    hidden_states = 0.1 * torch.randn(*shape, hidden, device=device)
    fc1_weight = torch.randn(inner, hidden, device=device) * math.sqrt(2.0 / hidden)
    fc2_weight = torch.randn(hidden, inner, device=device) * math.sqrt(2.0 / inner)
    fc1_output = F.linear(hidden_states, fc1_weight)
    gelu_output = F.gelu(fc1_output, approximate="tanh")
    residual_output = F.linear(gelu_output, fc2_weight) + hidden_states
    mean = residual_output.mean(dim=-1, keepdim=True)
    var = residual_output.var(dim=-1, unbiased=False, keepdim=True)
    return {
        "grad_output": torch.randn(*shape, hidden, device=device),
        "hidden_states": hidden_states,
        "fc1_weight": fc1_weight,
        "fc1_output": fc1_output,
        "gelu_output": gelu_output,
        "fc2_weight": fc2_weight,
        "residual_output": residual_output,
        "normalized": (residual_output - mean) / torch.sqrt(var + eps),
        "var": var,
        "ln_weight": torch.ones(hidden, device=device),
        "eps": eps,
    }

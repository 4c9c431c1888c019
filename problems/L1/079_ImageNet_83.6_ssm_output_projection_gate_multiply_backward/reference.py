"""Backward of a state-space block's gate and output projection."""

import torch


def silu_derivative(x: torch.Tensor) -> torch.Tensor:
    """sigmoid(x) * (1 + x * (1 - sigmoid(x))), rounded to x's dtype after each operation."""
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


def run(
    grad_output: torch.Tensor,
    ssm_output: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    gate_activated: torch.Tensor,
    gated_output: torch.Tensor,
    use_silu_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of linear(ssm_output * act(gate)), act being SiLU or the identity.

    Every product and every elementwise operation rounds to bfloat16; sums accumulate in float32.

    Args:
        grad_output: [batch_size, seq_len, hidden_dim] bf16.
        ssm_output, gate, gate_activated, gated_output: [batch_size, seq_len, expanded_dim] bf16;
            the last two as saved by the forward.
        weight: [hidden_dim, expanded_dim] bf16.
        bias: [hidden_dim] bf16, not needed.
        use_silu_gate: whether the gate went through SiLU; if not, it is not needed.

    Returns:
        Gradients of ssm_output, gate, weight and bias, bf16.
    """
    grad_rows = grad_output.flatten(0, 1)
    grad_weight = grad_rows.T @ gated_output.flatten(0, 1)
    grad_bias = grad_rows.sum(dim=0, dtype=torch.float32).to(grad_output.dtype)

    grad_gated = grad_output @ weight
    grad_gate = grad_gated * ssm_output
    if use_silu_gate:
        grad_gate = grad_gate * silu_derivative(gate)
    return grad_gated * gate_activated, grad_gate, grad_weight, grad_bias

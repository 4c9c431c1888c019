"""Backward of an embedding lookup followed by RMSNorm, with a dense gradient of the table."""

import torch

VOCAB_SIZE = 65536
"""Rows of the embedding table, whose gradient is returned while the table is no input."""


def run(
    grad_output: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states_fp32: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm backward, then scatter-add by token id; float32, each result rounded once.

    Args:
        grad_output: [batch_size, seq_len, hidden_size] bf16.
        input_ids: [batch_size, seq_len] int64 in [0, 65536).
        hidden_states_fp32: the embedded tokens, [batch_size, seq_len, hidden_size] f32.
        rstd: reciprocal rms as saved, [batch_size, seq_len, 1] f32.
        norm_weight: [hidden_size] bf16.

    Returns:
        Gradient of the embedding table [65536, hidden_size] and of norm_weight [hidden_size]; bf16.
    """
    grad = grad_output.float()
    normalized = hidden_states_fp32 * rstd
    grad_norm_weight = (grad * normalized).sum(dim=(0, 1))
    grad_normalized = grad * norm_weight.float()
    projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
    grad_hidden = rstd * (grad_normalized - projection * normalized)

    # Rows of repeated ids add up in float32, in no particular order.
    table = grad_hidden.new_zeros(VOCAB_SIZE, grad_hidden.shape[-1])
    table.index_add_(0, input_ids.flatten(), grad_hidden.flatten(0, 1))
    return table.to(grad_output.dtype), grad_norm_weight.to(norm_weight.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Uniform ids; the reciprocal rms is that of a variance in [0.1, 2.1), not of the states."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden_size, vocab_size = axes_and_scalars["hidden_size"], axes_and_scalars["vocab_size"]
    shape = (batch_size, seq_len, hidden_size)
    variance = 0.1 + 2.0 * torch.rand(batch_size, seq_len, 1, device=device)
    return {
        "grad_output": torch.randn(shape, dtype=torch.bfloat16, device=device),
        "input_ids": torch.randint(0, vocab_size, (batch_size, seq_len), device=device),
        "hidden_states_fp32": torch.randn(shape, device=device),
        "rstd": torch.rsqrt(variance + 1e-6),
        "norm_weight": torch.randn(hidden_size, dtype=torch.bfloat16, device=device),
    }

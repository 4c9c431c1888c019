"""Language-model head: hidden states to vocabulary logits."""

import math

import torch
import torch.nn.functional as F


def run(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product without bias; every position is projected.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        weight: [vocab_size, hidden_size] bf16.

    Returns:
        [batch_size, seq_len, vocab_size] bf16.
    """
    return F.linear(hidden_states, weight)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal hidden states and a weight that keeps the logits of unit size."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden_size, vocab_size = axes_and_scalars["hidden_size"], axes_and_scalars["vocab_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return {
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "weight": normal(vocab_size, hidden_size) * (1 / math.sqrt(hidden_size)),
    }

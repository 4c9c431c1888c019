"""Projection of Whisper's decoder states onto the vocabulary, float16."""

import torch
import torch.nn.functional as F


def run(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states times the transposed weight, accumulated in float32, rounded once.

    Args:
        hidden_states: [batch_size, seq_len, d_model] f16.
        weight: [vocab_size, d_model] f16.

    Returns:
        Logits [batch_size, seq_len, vocab_size] f16.
    """
    return F.linear(hidden_states, weight)

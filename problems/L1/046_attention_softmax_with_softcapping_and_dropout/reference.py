"""Soft cap of attention logits by a scaled tanh, and softmax."""

import torch

SOFTCAP = 30.0


def run(attn_weights: torch.Tensor) -> torch.Tensor:
    """Each step of the cap rounds to bfloat16; the softmax is float32, rounded at the end.

    Args:
        attn_weights: [batch_size, num_heads, seq_len_q, seq_len_k] bf16, the logits.

    Returns:
        Shaped like attn_weights, bf16.
    """
    capped = torch.tanh(attn_weights / SOFTCAP) * SOFTCAP
    return torch.softmax(capped, dim=-1, dtype=torch.float32).to(attn_weights.dtype)

"""Rotary embedding tables from angles, duplicated to the full width of a head."""

import torch


def run(freqs: torch.Tensor, attention_scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine in float32, scaled and rounded once.

    Args:
        freqs: [batch_size, seq_len, head_dim / 2] f32, angles in radians.
        attention_scaling: factor on both.

    Returns:
        Cosine and sine, each [batch_size, seq_len, head_dim] bf16 with two equal halves.
    """
    angles = torch.cat((freqs, freqs), dim=-1)
    cos = (angles.cos() * attention_scaling).bfloat16()
    sin = (angles.sin() * attention_scaling).bfloat16()
    return cos, sin

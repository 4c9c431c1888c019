"""Rotary embedding tables from positions, cosine and sine side by side."""

import math

import torch


def run(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, attention_scaling: float
) -> torch.Tensor:
    """Cosine and sine of position times frequency, in float32, rounded once.

    Args:
        position_ids: [batch_size, seq_len] int64.
        inv_freq: [head_dim / 2] f32.
        attention_scaling: factor on both.

    Returns:
        [batch_size, seq_len, head_dim, 2] bf16, cosine before sine; the two halves of the head_dim
        axis are equal.
    """
    angles = position_ids.float().unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return (table * attention_scaling).bfloat16()


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Positions from zero, and a ladder of frequencies bent as for a long context.

    The high frequencies are divided by the stretch, the low ones kept, and those between blended;
    models do it the other way round, but to the operation any frequencies are alike.
    """
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    head_dim = axes_and_scalars["head_dim"]
    theta, stretch, trained_length = 500000.0, 8.0, 8192.0
    low_freq_factor, high_freq_factor = 1.0, 4.0

    base = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    wavelength = 2 * math.pi / base
    blend = (trained_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = blend.clamp(0, 1)
    return {
        "position_ids": torch.arange(seq_len, device=device).repeat(batch_size, 1),
        "inv_freq": (1 - blend) * base + blend * base / stretch,
        "attention_scaling": 1.0,
    }

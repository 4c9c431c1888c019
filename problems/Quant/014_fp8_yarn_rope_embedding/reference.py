"""Cosine and sine of YaRN-scaled rotary angles that went through FP8."""

import math

import torch

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
DIM = 64
BASE = 10000.0
FACTOR = 40.0
ORIGINAL_CONTEXT = 4096
BETA_FAST, BETA_SLOW = 32, 1


def correction_dim(rotations: float) -> float:
    """Dimension pair, as a real number, that turns so many times over the original context."""
    return DIM * math.log(ORIGINAL_CONTEXT / (rotations * 2 * math.pi)) / (2 * math.log(BASE))


def attention_scale(mscale: float) -> float:
    """YaRN's factor against the entropy that a longer context adds."""
    return 0.1 * mscale * math.log(FACTOR) + 1.0


def inverse_frequencies(device: torch.device) -> torch.Tensor:
    """[DIM / 2] f32: high frequencies as they are, low ones stretched, a ramp between."""
    pair = torch.arange(DIM // 2, dtype=torch.float32, device=device)
    wavelength = BASE ** (2 * pair / DIM)
    extrapolated = wavelength.reciprocal()
    interpolated = (FACTOR * wavelength).reciprocal()
    low = max(math.floor(correction_dim(BETA_FAST)), 0)
    high = min(math.ceil(correction_dim(BETA_SLOW)), DIM - 1)
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    ramp = ((pair - low) * (1.0 / (high - low))).clamp(0, 1)
    mask = 1.0 - ramp
    return interpolated * (1.0 - mask) + extrapolated * mask


def run(
    position_ids: torch.Tensor, mscale: float, mscale_all_dim: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles in float32, each row of them rounded to float8_e4m3fn and back with one scale.

    Args:
        position_ids: [seq_len] int64.
        mscale, mscale_all_dim: their attention scales' ratio multiplies both tables.

    Returns:
        cos and sin [seq_len, 64] bf16; the second 32 columns repeat the first.
    """
    angles = position_ids.float().unsqueeze(1) * inverse_frequencies(position_ids.device)
    # A row is one block: padding it with zeros to 128 would not change its scale.
    scale = angles.abs().amax(dim=1, keepdim=True) * (1.0 / E4M3_MAX)
    scale = scale.clamp(min=SMALLEST_SCALE)
    rounded = (angles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    angles = rounded.float() * scale
    embedding = torch.cat((angles, angles), dim=1)
    ratio = attention_scale(mscale) / attention_scale(mscale_all_dim)
    cos_emb = (embedding.cos() * ratio).to(torch.bfloat16)
    sin_emb = (embedding.sin() * ratio).to(torch.bfloat16)
    return cos_emb, sin_emb


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Positions in order, and equal mscales."""
    return {
        "position_ids": torch.arange(axes_and_scalars["seq_len"], device=device),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }

"""Rotary embedding tables over three position axes."""

import torch

AXIS_DIMS = (16, 56, 56)


def run(ids: torch.Tensor, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency, the axes' columns side by side; in float32.

    Args:
        ids: [seq_len, 3] f32, a position on each axis.
        theta: base of the frequencies.

    Returns:
        Cosine and sine, each [seq_len, 128] f32; columns 2i and 2i + 1 are equal.
    """
    angles = []
    for position, dim in zip(ids.split(1, dim=-1), AXIS_DIMS, strict=True):
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=ids.device) / dim
        angles.append(position * (1.0 / theta**exponent))
    table = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)
    return table.cos(), table.sin()

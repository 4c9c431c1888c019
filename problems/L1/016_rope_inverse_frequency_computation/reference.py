"""Inverse frequencies of a rotary embedding."""

import torch

HEAD_DIM = 128


def run(rope_theta: float) -> torch.Tensor:
    """1 / rope_theta^(2i / 128) in float32, on the GPU if there is one.

    Args:
        rope_theta: base of the geometric ladder.

    Returns:
        [64] f32.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exponent = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device=device) / HEAD_DIM
    return 1.0 / rope_theta**exponent

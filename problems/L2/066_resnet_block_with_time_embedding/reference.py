"""Residual convolution block of a diffusion U-Net, with an additive time embedding."""

import torch
import torch.nn.functional as F

NUM_GROUPS = 32


def run(
    x: torch.Tensor,
    time_emb: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    conv1_weight: torch.Tensor,
    conv1_bias: torch.Tensor,
    time_emb_proj_weight: torch.Tensor,
    time_emb_proj_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    conv2_weight: torch.Tensor,
    conv2_bias: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """Two times GroupNorm, SiLU and a 3 x 3 convolution, plus the input; float32.

    Args:
        x: [batch_size, channels, height, width].
        time_emb: [batch_size, time_emb_channels].
        norm1_weight, norm1_bias, norm2_weight, norm2_bias, conv1_bias, conv2_bias,
            time_emb_proj_bias: [channels].
        conv1_weight, conv2_weight: [channels, channels, 3, 3].
        time_emb_proj_weight: [channels, time_emb_channels].
        norm_eps: added to the variance.

    Returns:
        [batch_size, channels, height, width] f32.
    """
    y = F.silu(F.group_norm(x, NUM_GROUPS, norm1_weight, norm1_bias, norm_eps))
    y = F.conv2d(y, conv1_weight, conv1_bias, padding=1)
    time = F.linear(F.silu(time_emb), time_emb_proj_weight, time_emb_proj_bias)
    y = y + time[:, :, None, None]
    y = F.silu(F.group_norm(y, NUM_GROUPS, norm2_weight, norm2_bias, norm_eps))
    return F.conv2d(y, conv2_weight, conv2_bias, padding=1) + x

"""Trunk of a video VAE's encoder: three residual stages that halve the resolution, and a head."""

import torch
import torch.nn.functional as F

GROUP_CHANNELS = 32
"""Channels of a group of GroupNorm, at every width."""


def norm_silu(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float):
    """GroupNorm over groups of 32 channels and all of time and space, then SiLU."""
    return F.silu(F.group_norm(h, h.shape[1] // GROUP_CHANNELS, weight, bias, eps))


def run(
    x: torch.Tensor,
    input_conv_weight: torch.Tensor,
    input_conv_bias: torch.Tensor,
    down1_gn_weight: torch.Tensor,
    down1_gn_bias: torch.Tensor,
    down1_conv_weight: torch.Tensor,
    down1_conv_bias: torch.Tensor,
    down1_res_weight: torch.Tensor,
    down1_res_bias: torch.Tensor,
    down2_gn_weight: torch.Tensor,
    down2_gn_bias: torch.Tensor,
    down2_conv_weight: torch.Tensor,
    down2_conv_bias: torch.Tensor,
    down2_res_weight: torch.Tensor,
    down2_res_bias: torch.Tensor,
    down3_gn_weight: torch.Tensor,
    down3_gn_bias: torch.Tensor,
    down3_conv_weight: torch.Tensor,
    down3_conv_bias: torch.Tensor,
    down3_res_weight: torch.Tensor,
    down3_res_bias: torch.Tensor,
    latent_gn_weight: torch.Tensor,
    latent_gn_bias: torch.Tensor,
    latent_conv_weight: torch.Tensor,
    latent_conv_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """All in float32. The shortcut of a stage reads the values before the normalisation.

    Args:
        x: [batch_size, 3, frames, height, width] f32.
        input_conv_weight: [channels, 3, 3, 3, 3] f32.
        down{i}_gn_weight, down{i}_gn_bias: [c_in] f32, of stage i.
        down{i}_conv_weight: [c_out, c_in, 3, 4, 4] f32; down{i}_res_weight: [c_out, c_in, 1, 1, 1].
        latent_gn_weight, latent_gn_bias: [c_out] f32, of the last stage.
        latent_conv_weight: [latent_channels, c_out, 3, 3, 3] f32.
        *_bias of a convolution: one value an output channel, f32.
        eps: added to the variances.

    Returns:
        [batch_size, latent_channels, frames / 4, height / 8, width / 8] f32.
    """
    h = F.conv3d(x, input_conv_weight, input_conv_bias, padding=1)

    shortcut = F.conv3d(h, down1_res_weight, down1_res_bias, stride=2)
    h = norm_silu(h, down1_gn_weight, down1_gn_bias, eps)
    h = F.conv3d(h, down1_conv_weight, down1_conv_bias, stride=2, padding=1) + shortcut

    shortcut = F.conv3d(h, down2_res_weight, down2_res_bias, stride=2)
    h = norm_silu(h, down2_gn_weight, down2_gn_bias, eps)
    h = F.conv3d(h, down2_conv_weight, down2_conv_bias, stride=2, padding=1) + shortcut

    # The last stage keeps the frames.
    shortcut = F.conv3d(h, down3_res_weight, down3_res_bias, stride=(1, 2, 2))
    h = norm_silu(h, down3_gn_weight, down3_gn_bias, eps)
    h = F.conv3d(h, down3_conv_weight, down3_conv_bias, stride=(1, 2, 2), padding=1) + shortcut

    h = norm_silu(h, latent_gn_weight, latent_gn_bias, eps)
    return F.conv3d(h, latent_conv_weight, latent_conv_bias, padding=1)

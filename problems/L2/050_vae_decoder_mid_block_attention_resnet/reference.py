"""Middle block of an image VAE: residual convolution block, spatial attention, residual block."""

import torch
import torch.nn.functional as F

NUM_GROUPS = 32


def residual_block(
    x: torch.Tensor,
    temb: torch.Tensor,
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
    eps: float,
) -> torch.Tensor:
    """Two 3 x 3 convolutions with the time embedding added between them."""
    y = F.silu(F.group_norm(x, NUM_GROUPS, norm1_weight, norm1_bias, eps))
    y = F.conv2d(y, conv1_weight, conv1_bias, padding=1)
    time = F.linear(F.silu(temb), time_emb_proj_weight, time_emb_proj_bias)
    y = y + time[:, :, None, None]
    y = F.silu(F.group_norm(y, NUM_GROUPS, norm2_weight, norm2_bias, eps))
    return F.conv2d(y, conv2_weight, conv2_bias, padding=1) + x


def run(
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    resnet1_norm1_weight: torch.Tensor,
    resnet1_norm1_bias: torch.Tensor,
    resnet1_conv1_weight: torch.Tensor,
    resnet1_conv1_bias: torch.Tensor,
    resnet1_time_emb_proj_weight: torch.Tensor,
    resnet1_time_emb_proj_bias: torch.Tensor,
    resnet1_norm2_weight: torch.Tensor,
    resnet1_norm2_bias: torch.Tensor,
    resnet1_conv2_weight: torch.Tensor,
    resnet1_conv2_bias: torch.Tensor,
    attn_group_norm_weight: torch.Tensor,
    attn_group_norm_bias: torch.Tensor,
    attn_to_q_weight: torch.Tensor,
    attn_to_q_bias: torch.Tensor,
    attn_to_k_weight: torch.Tensor,
    attn_to_k_bias: torch.Tensor,
    attn_to_v_weight: torch.Tensor,
    attn_to_v_bias: torch.Tensor,
    attn_to_out_weight: torch.Tensor,
    attn_to_out_bias: torch.Tensor,
    resnet2_norm1_weight: torch.Tensor,
    resnet2_norm1_bias: torch.Tensor,
    resnet2_conv1_weight: torch.Tensor,
    resnet2_conv1_bias: torch.Tensor,
    resnet2_time_emb_proj_weight: torch.Tensor,
    resnet2_time_emb_proj_bias: torch.Tensor,
    resnet2_norm2_weight: torch.Tensor,
    resnet2_norm2_bias: torch.Tensor,
    resnet2_conv2_weight: torch.Tensor,
    resnet2_conv2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Float32 throughout; attention has one head as wide as the channels.

    Args:
        hidden_states: [batch, channels, height, width] f32.
        temb: [batch, temb_channels] f32, used by both residual blocks.
        *_norm*_weight, *_norm*_bias, *_bias: [channels] f32.
        *_conv*_weight: [channels, channels, 3, 3] f32.
        *_time_emb_proj_weight: [channels, temb_channels] f32.
        attn_to_*_weight: [channels, channels] f32.
        eps: added to the variance in every GroupNorm.

    Returns:
        [batch, channels, height, width] f32.
    """
    x = residual_block(
        hidden_states,
        temb,
        resnet1_norm1_weight,
        resnet1_norm1_bias,
        resnet1_conv1_weight,
        resnet1_conv1_bias,
        resnet1_time_emb_proj_weight,
        resnet1_time_emb_proj_bias,
        resnet1_norm2_weight,
        resnet1_norm2_bias,
        resnet1_conv2_weight,
        resnet1_conv2_bias,
        eps,
    )

    z = F.group_norm(x, NUM_GROUPS, attn_group_norm_weight, attn_group_norm_bias, eps)
    z = z.flatten(2).transpose(1, 2)  # [batch, height * width, channels]
    q = F.linear(z, attn_to_q_weight, attn_to_q_bias)
    k = F.linear(z, attn_to_k_weight, attn_to_k_bias)
    v = F.linear(z, attn_to_v_weight, attn_to_v_bias)
    probabilities = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1)
    attended = F.linear(probabilities @ v, attn_to_out_weight, attn_to_out_bias)
    x = attended.transpose(1, 2).view_as(x) + x

    return residual_block(
        x,
        temb,
        resnet2_norm1_weight,
        resnet2_norm1_bias,
        resnet2_conv1_weight,
        resnet2_conv1_bias,
        resnet2_time_emb_proj_weight,
        resnet2_time_emb_proj_bias,
        resnet2_norm2_weight,
        resnet2_norm2_bias,
        resnet2_conv2_weight,
        resnet2_conv2_bias,
        eps,
    )

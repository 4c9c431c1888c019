"""Attention block of an image autoencoder: GroupNorm, one wide head, projection, residual."""

import torch
import torch.nn.functional as F

NUM_GROUPS = 32


def run(
    x: torch.Tensor,
    group_norm_weight: torch.Tensor,
    group_norm_bias: torch.Tensor,
    query_weight: torch.Tensor,
    query_bias: torch.Tensor,
    key_weight: torch.Tensor,
    key_bias: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor,
    proj_out_weight: torch.Tensor,
    proj_out_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Self-attention between the image's positions with all channels as one head; float32.

    Args:
        x: [batch_size, channels, spatial_size, spatial_size] f32.
        group_norm_weight, group_norm_bias: [channels] f32.
        query_weight, key_weight, value_weight, proj_out_weight: [channels, channels] f32, with
            biases [channels] f32.
        eps: added to the variance.

    Returns:
        Shaped like x, f32.
    """
    channels = x.shape[1]
    normed = F.group_norm(x, NUM_GROUPS, group_norm_weight, group_norm_bias, eps)
    positions = normed.flatten(2).transpose(1, 2)  # [batch_size, positions, channels]
    q = F.linear(positions, query_weight, query_bias)
    k = F.linear(positions, key_weight, key_bias)
    v = F.linear(positions, value_weight, value_bias)
    scores = torch.matmul(q, k.transpose(-1, -2)) * channels**-0.5
    attended = torch.matmul(torch.softmax(scores, dim=-1), v)
    projected = F.linear(attended, proj_out_weight, proj_out_bias)
    return x + projected.transpose(1, 2).reshape(x.shape)

"""Patch embedding of a video, with position embeddings and layer norm."""

import torch
import torch.nn.functional as F


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Layer norm over the last axis whose every step rounds to x's dtype."""
    mean = x.mean(dim=-1, keepdim=True)
    variance = x.var(dim=-1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def run(
    video: torch.Tensor,
    patch_projection_weight: torch.Tensor,
    patch_projection_bias: torch.Tensor,
    spatial_pos_embedding: torch.Tensor,
    temporal_pos_embedding: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Every step rounds to float16.

    Args:
        video: [batch_size, num_frames, in_channels, height, width] f16.
        patch_projection_weight: [hidden_size, in_channels, 1, 2, 2] f16.
        patch_projection_bias: [hidden_size] f16.
        spatial_pos_embedding: [1, patches of a frame, hidden_size] f16.
        temporal_pos_embedding: [1, num_frames, 1, hidden_size] f16.
        norm_weight, norm_bias: [hidden_size] f16.
        eps: added to the variance.

    Returns:
        [batch_size, num_frames * patches of a frame, hidden_size] f16.
    """
    patch_size = patch_projection_weight.shape[-1]
    # Patches do not overlap, so that the convolution is a product with the patches as rows.
    patches = video.unflatten(4, (-1, patch_size)).unflatten(3, (-1, patch_size))
    patches = patches.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3)
    x = F.linear(patches, patch_projection_weight.flatten(1), patch_projection_bias)
    x = x + spatial_pos_embedding.unsqueeze(1)
    x = x + temporal_pos_embedding
    return layer_norm(x.flatten(1, 2), norm_weight, norm_bias, eps)

"""Input stage of a diffusion transformer: patches, conditioning vector and text context."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    pooled_projections: torch.Tensor,
    timestep: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    pos_embed: torch.Tensor,
    timestep_linear1_weight: torch.Tensor,
    timestep_linear1_bias: torch.Tensor,
    timestep_linear2_weight: torch.Tensor,
    timestep_linear2_bias: torch.Tensor,
    pooled_linear1_weight: torch.Tensor,
    pooled_linear1_bias: torch.Tensor,
    pooled_linear2_weight: torch.Tensor,
    pooled_linear2_bias: torch.Tensor,
    context_embedder_weight: torch.Tensor,
    context_embedder_bias: torch.Tensor,
    freqs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three results that share nothing, in float32. D inner_dim, W freqs' length.

    Args:
        hidden_states: [batch_size, in_channels, size, size], latent image.
        encoder_hidden_states: [batch_size, seq_len_context, joint_dim].
        pooled_projections: [batch_size, pooled_dim].
        timestep: [batch_size].
        proj_weight: [D, in_channels, patch, patch]; proj_bias: [D].
        pos_embed: [1, num_patches, D].
        timestep_linear1_weight: [D, 2 W]; pooled_linear1_weight: [D, pooled_dim];
            timestep_linear2_weight, pooled_linear2_weight: [D, D]; each with its bias [D].
        context_embedder_weight: [caption_dim, joint_dim]; context_embedder_bias: [caption_dim].
        freqs: [W], of the sinusoidal features.

    Returns:
        Patches with positions [batch_size, num_patches, D], conditioning vector [batch_size, D],
        context [batch_size, seq_len_context, caption_dim].
    """
    patches = F.conv2d(hidden_states, proj_weight, proj_bias, stride=proj_weight.shape[-1])
    patches = patches.flatten(2).transpose(1, 2) + pos_embed

    angle = timestep.unsqueeze(-1) * freqs
    features = torch.cat((angle.cos(), angle.sin()), dim=-1)
    time = F.silu(F.linear(features, timestep_linear1_weight, timestep_linear1_bias))
    time = F.linear(time, timestep_linear2_weight, timestep_linear2_bias)
    pooled = F.silu(F.linear(pooled_projections, pooled_linear1_weight, pooled_linear1_bias))
    pooled = F.linear(pooled, pooled_linear2_weight, pooled_linear2_bias)

    context = F.linear(encoder_hidden_states, context_embedder_weight, context_embedder_bias)
    return patches, time + pooled, context

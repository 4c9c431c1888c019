"""Flux's conditioning vector: a sinusoidal timestep through an MLP, plus projected pooled text."""

import math

import torch
import torch.nn.functional as F

TIMESTEP_SCALE = 1000.0
MAX_PERIOD = 10000.0


def run(
    timestep: torch.Tensor,
    pooled_projections: torch.Tensor,
    freqs: torch.Tensor,
    timestep_linear1_weight: torch.Tensor,
    timestep_linear1_bias: torch.Tensor,
    timestep_linear2_weight: torch.Tensor,
    timestep_linear2_bias: torch.Tensor,
    text_embedder_weight: torch.Tensor,
    text_embedder_bias: torch.Tensor,
) -> torch.Tensor:
    """All in float32.

    Args:
        timestep: [batch_size] f32.
        pooled_projections: [batch_size, pooled_projection_dim] f32.
        freqs: [time_embed_dim / 2] f32.
        timestep_linear1_weight: [inner_dim, time_embed_dim] f32; timestep_linear1_bias.
        timestep_linear2_weight: [inner_dim, inner_dim] f32; timestep_linear2_bias.
        text_embedder_weight: [inner_dim, pooled_projection_dim] f32; text_embedder_bias.

    Returns:
        [batch_size, inner_dim] f32.
    """
    angle = (timestep * TIMESTEP_SCALE).unsqueeze(-1) * freqs
    embedding = torch.cat((angle.cos(), angle.sin()), dim=-1)
    hidden = F.silu(F.linear(embedding, timestep_linear1_weight, timestep_linear1_bias))
    time = F.linear(hidden, timestep_linear2_weight, timestep_linear2_bias)
    return time + F.linear(pooled_projections, text_embedder_weight, text_embedder_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Timesteps in [0, 1), geometric frequencies, small weights, zero biases."""
    axes = axes_and_scalars
    batch_size, inner_dim = axes["batch_size"], axes["inner_dim"]
    pooled_dim, time_dim = axes["pooled_projection_dim"], axes["time_embed_dim"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(0.02)

    exponent = torch.arange(0, time_dim, 2, dtype=torch.float32, device=device) / time_dim
    return {
        "timestep": torch.rand(batch_size, device=device),
        "pooled_projections": torch.randn(batch_size, pooled_dim, device=device),
        "freqs": torch.exp(-math.log(MAX_PERIOD) * exponent),
        "timestep_linear1_weight": weight(inner_dim, time_dim),
        "timestep_linear1_bias": torch.zeros(inner_dim, device=device),
        "timestep_linear2_weight": weight(inner_dim, inner_dim),
        "timestep_linear2_bias": torch.zeros(inner_dim, device=device),
        "text_embedder_weight": weight(inner_dim, pooled_dim),
        "text_embedder_bias": torch.zeros(inner_dim, device=device),
    }

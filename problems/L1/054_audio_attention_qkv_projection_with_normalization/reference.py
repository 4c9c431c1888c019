"""Query, key and value projections in float32, with RMS-normalised query and key heads."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def run(
    hidden_states: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project, split into heads, normalise queries and keys; values stay as projected.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        q_proj_weight, k_proj_weight, v_proj_weight: [num_heads * head_dim, hidden_size] f32.
        q_norm_weight, k_norm_weight: [head_dim] f32.
        eps: added to the mean square.

    Returns:
        Queries, keys and values, each [batch_size, seq_len, num_heads, head_dim] f32.
    """
    head_dim = q_norm_weight.shape[0]

    def project(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim))

    return (
        rms_norm(project(q_proj_weight), q_norm_weight, eps),
        rms_norm(project(k_proj_weight), k_norm_weight, eps),
        project(v_proj_weight),
    )

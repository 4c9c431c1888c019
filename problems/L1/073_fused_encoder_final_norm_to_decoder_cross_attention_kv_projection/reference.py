"""Encoder's final RMSNorm followed by the key and value projections of cross-attention, float16."""

import torch
import torch.nn.functional as F

HEAD_DIM = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included; rounded once."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(x.dtype)


def run(
    encoder_hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise, project, move the heads first.

    Args:
        encoder_hidden_states: [batch_size, encoder_seq_len, hidden_size] f16.
        norm_weight: [hidden_size] f16.
        k_proj_weight, v_proj_weight: [num_kv_heads * 64, hidden_size] f16.
        eps: added to the mean square.

    Returns:
        Keys and values, each [batch_size, num_kv_heads, encoder_seq_len, 64] f16, contiguous.
    """
    normed = rms_norm(encoder_hidden_states, norm_weight, eps)

    def project(weight: torch.Tensor) -> torch.Tensor:
        heads = F.linear(normed, weight).unflatten(-1, (-1, HEAD_DIM))
        return heads.transpose(1, 2).contiguous()

    return project(k_proj_weight), project(v_proj_weight)

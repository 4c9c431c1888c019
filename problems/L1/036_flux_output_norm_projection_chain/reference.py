"""Final stage of a diffusion transformer: modulated layer norm and projection."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor,
    proj_out_weight: torch.Tensor,
    proj_out_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """All in float32; the layer norm has no weight of its own.

    Args:
        hidden_states: [batch_size, seq_len, inner_dim] f32.
        temb: [batch_size, inner_dim] f32, the conditioning.
        linear_weight, linear_bias: [2 * inner_dim, inner_dim] and [2 * inner_dim] f32; shift before
            scale.
        proj_out_weight, proj_out_bias: [output_dim, inner_dim] and [output_dim] f32.
        eps: added to the variance.

    Returns:
        [batch_size, seq_len, output_dim] f32.
    """
    modulation = F.linear(F.silu(temb), linear_weight, linear_bias).unsqueeze(1)
    shift, scale = modulation.chunk(2, dim=-1)
    normalized = F.layer_norm(hidden_states, hidden_states.shape[-1:], eps=eps)
    return F.linear(normalized * (1 + scale) + shift, proj_out_weight, proj_out_bias)

"""Joint transformer block over an image and a text stream, modulated by a conditioning vector."""

import torch
import torch.nn.functional as F

HEAD_DIM = 64
EPS = 1e-6


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """LayerNorm without affine parameters, then scale and shift of each batch entry."""
    normalized = F.layer_norm(x, x.shape[-1:], eps=EPS)
    return normalized * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def split_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads * HEAD_DIM] to [batch, heads, tokens, HEAD_DIM]."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def run(
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm1_context_weight: torch.Tensor,
    norm1_context_bias: torch.Tensor,
    to_q_weight: torch.Tensor,
    to_q_bias: torch.Tensor,
    to_k_weight: torch.Tensor,
    to_k_bias: torch.Tensor,
    to_v_weight: torch.Tensor,
    to_v_bias: torch.Tensor,
    add_q_proj_weight: torch.Tensor,
    add_q_proj_bias: torch.Tensor,
    add_k_proj_weight: torch.Tensor,
    add_k_proj_bias: torch.Tensor,
    add_v_proj_weight: torch.Tensor,
    add_v_proj_bias: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
    to_add_out_weight: torch.Tensor,
    to_add_out_bias: torch.Tensor,
    ff_linear1_weight: torch.Tensor,
    ff_linear1_bias: torch.Tensor,
    ff_linear2_weight: torch.Tensor,
    ff_linear2_bias: torch.Tensor,
    ff_context_linear1_weight: torch.Tensor,
    ff_context_linear1_bias: torch.Tensor,
    ff_context_linear2_weight: torch.Tensor,
    ff_context_linear2_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over both streams together, everything else per stream; float32.

    D inner_dim, C context_dim, F ff_inner_dim; heads are 64 wide.

    Args:
        hidden_states: [batch_size, seq_len, D], image stream.
        encoder_hidden_states: [batch_size, context_len, C], text stream.
        temb: [batch_size, D].
        norm1_weight: [6 D, D]; norm1_context_weight: [6 C, D]: modulation (shift, scale and gate
            of the attention, then of the feed-forward), no norm gains; with their biases.
        to_q_weight, to_k_weight, to_v_weight, to_out_weight: [D, D], with biases [D].
        add_q_proj_weight, add_k_proj_weight, add_v_proj_weight: [D, C], with biases [D].
        to_add_out_weight: [C, D]; to_add_out_bias: [C].
        ff_linear1_weight: [F, D]; ff_linear2_weight: [D, F]; with biases.
        ff_context_linear1_weight: [F, C]; ff_context_linear2_weight: [C, F]; with biases.

    Returns:
        Text stream [batch_size, context_len, C] and image stream [batch_size, seq_len, D].
    """
    x, context = hidden_states, encoder_hidden_states
    seq_len = x.shape[1]
    conditioning = F.silu(temb)
    modulation = F.linear(conditioning, norm1_weight, norm1_bias)
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.chunk(6, dim=-1)
    modulation = F.linear(conditioning, norm1_context_weight, norm1_context_bias)
    c_shift_a, c_scale_a, c_gate_a, c_shift_m, c_scale_m, c_gate_m = modulation.chunk(6, dim=-1)

    y = modulated_norm(x, shift_a, scale_a)
    c = modulated_norm(context, c_shift_a, c_scale_a)
    q = (F.linear(y, to_q_weight, to_q_bias), F.linear(c, add_q_proj_weight, add_q_proj_bias))
    k = (F.linear(y, to_k_weight, to_k_bias), F.linear(c, add_k_proj_weight, add_k_proj_bias))
    v = (F.linear(y, to_v_weight, to_v_bias), F.linear(c, add_v_proj_weight, add_v_proj_bias))
    # Image tokens come first.
    q, k, v = (split_heads(torch.cat(streams, dim=1)) for streams in (q, k, v))
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5, dim=-1)
    attended = (probabilities @ v).transpose(1, 2).flatten(2)
    y, c = attended[:, :seq_len], attended[:, seq_len:]
    x = x + gate_a.unsqueeze(1) * F.linear(y, to_out_weight, to_out_bias)
    context = context + c_gate_a.unsqueeze(1) * F.linear(c, to_add_out_weight, to_add_out_bias)

    y = modulated_norm(x, shift_m, scale_m)
    y = F.gelu(F.linear(y, ff_linear1_weight, ff_linear1_bias), approximate="tanh")
    x = x + gate_m.unsqueeze(1) * F.linear(y, ff_linear2_weight, ff_linear2_bias)

    c = modulated_norm(context, c_shift_m, c_scale_m)
    c = F.linear(c, ff_context_linear1_weight, ff_context_linear1_bias)
    c = F.linear(F.gelu(c, approximate="tanh"), ff_context_linear2_weight, ff_context_linear2_bias)
    return context + c_gate_m.unsqueeze(1) * c, x


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A small conditioning vector, and modulation weights scaled by their fan-in."""
    batch_size, inner_dim = axes_and_scalars["batch_size"], axes_and_scalars["inner_dim"]
    weight = torch.randn(6 * inner_dim, inner_dim, device=device)
    return {
        "temb": 0.1 * torch.randn(batch_size, inner_dim, device=device),
        "norm1_weight": weight / inner_dim**0.5,
        "norm1_bias": torch.randn(6 * inner_dim, device=device),
    }

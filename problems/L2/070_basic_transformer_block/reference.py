"""Diffusion transformer block: self-attention, cross-attention and GEGLU feed-forward."""

import torch
import torch.nn.functional as F

HEAD_DIM = 24


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention over heads of HEAD_DIM; all arguments [batch, tokens, heads * HEAD_DIM]."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    # Scores are the largest tensor by far, so the factor goes to the queries.
    probabilities = torch.softmax((q * HEAD_DIM**-0.5) @ k.transpose(-1, -2), dim=-1)
    return (probabilities @ v).transpose(1, 2).flatten(2)


def run(
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    attn1_to_q_weight: torch.Tensor,
    attn1_to_k_weight: torch.Tensor,
    attn1_to_v_weight: torch.Tensor,
    attn1_to_out_weight: torch.Tensor,
    attn1_to_out_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    attn2_to_q_weight: torch.Tensor,
    attn2_to_k_weight: torch.Tensor,
    attn2_to_v_weight: torch.Tensor,
    attn2_to_out_weight: torch.Tensor,
    attn2_to_out_bias: torch.Tensor,
    norm3_weight: torch.Tensor,
    norm3_bias: torch.Tensor,
    ff_linear1_weight: torch.Tensor,
    ff_linear1_bias: torch.Tensor,
    ff_linear2_weight: torch.Tensor,
    ff_linear2_bias: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """Three pre-norm branches with residuals, in float32. D dim, A attention width.

    Args:
        hidden_states: [batch_size, spatial_seq_len, D].
        encoder_hidden_states: [batch_size, encoder_seq_len, cross_dim], not normalised.
        norm1_*, norm2_*, norm3_*: [D].
        attn1_to_q_weight, attn1_to_k_weight, attn1_to_v_weight, attn2_to_q_weight: [A, D];
            attn2_to_k_weight, attn2_to_v_weight: [A, cross_dim].
        attn1_to_out_weight, attn2_to_out_weight: [D, A], with biases [D].
        ff_linear1_weight: [2 * inner, D], values first, then gates; ff_linear2_weight: [D, inner];
            with biases.
        norm_eps: added to the variances.

    Returns:
        [batch_size, spatial_seq_len, D] f32.
    """
    width = hidden_states.shape[-1:]

    y = F.layer_norm(hidden_states, width, norm1_weight, norm1_bias, norm_eps)
    q, k = F.linear(y, attn1_to_q_weight), F.linear(y, attn1_to_k_weight)
    y = attention(q, k, F.linear(y, attn1_to_v_weight))
    x = hidden_states + F.linear(y, attn1_to_out_weight, attn1_to_out_bias)

    q = F.linear(F.layer_norm(x, width, norm2_weight, norm2_bias, norm_eps), attn2_to_q_weight)
    k = F.linear(encoder_hidden_states, attn2_to_k_weight)
    y = attention(q, k, F.linear(encoder_hidden_states, attn2_to_v_weight))
    x = x + F.linear(y, attn2_to_out_weight, attn2_to_out_bias)

    y = F.layer_norm(x, width, norm3_weight, norm3_bias, norm_eps)
    value, gate = F.linear(y, ff_linear1_weight, ff_linear1_bias).chunk(2, dim=-1)
    y = value * F.gelu(gate, approximate="tanh")
    return x + F.linear(y, ff_linear2_weight, ff_linear2_bias)

"""Two-way attention block of a SAM-HQ mask decoder: prompt tokens and image tokens."""

import torch
import torch.nn.functional as F

NUM_HEADS = 8
EPS = 1e-6


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of [..., tokens, channels] in NUM_HEADS heads, without projections."""
    q, k, v = (x.unflatten(-1, (NUM_HEADS, -1)).transpose(-3, -2) for x in (q, k, v))
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
    return (probabilities @ v).transpose(-3, -2).flatten(-2)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the channels."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def run(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_point_embedding: torch.Tensor,
    key_point_embedding: torch.Tensor,
    self_attn_q_weight: torch.Tensor,
    self_attn_q_bias: torch.Tensor,
    self_attn_k_weight: torch.Tensor,
    self_attn_k_bias: torch.Tensor,
    self_attn_v_weight: torch.Tensor,
    self_attn_v_bias: torch.Tensor,
    self_attn_out_weight: torch.Tensor,
    self_attn_out_bias: torch.Tensor,
    layer_norm1_weight: torch.Tensor,
    layer_norm1_bias: torch.Tensor,
    cross_t2i_q_weight: torch.Tensor,
    cross_t2i_q_bias: torch.Tensor,
    cross_t2i_k_weight: torch.Tensor,
    cross_t2i_k_bias: torch.Tensor,
    cross_t2i_v_weight: torch.Tensor,
    cross_t2i_v_bias: torch.Tensor,
    cross_t2i_out_weight: torch.Tensor,
    cross_t2i_out_bias: torch.Tensor,
    layer_norm2_weight: torch.Tensor,
    layer_norm2_bias: torch.Tensor,
    mlp_lin1_weight: torch.Tensor,
    mlp_lin1_bias: torch.Tensor,
    mlp_lin2_weight: torch.Tensor,
    mlp_lin2_bias: torch.Tensor,
    layer_norm3_weight: torch.Tensor,
    layer_norm3_bias: torch.Tensor,
    cross_i2t_q_weight: torch.Tensor,
    cross_i2t_q_bias: torch.Tensor,
    cross_i2t_k_weight: torch.Tensor,
    cross_i2t_k_bias: torch.Tensor,
    cross_i2t_v_weight: torch.Tensor,
    cross_i2t_v_bias: torch.Tensor,
    cross_i2t_out_weight: torch.Tensor,
    cross_i2t_out_bias: torch.Tensor,
    layer_norm4_weight: torch.Tensor,
    layer_norm4_bias: torch.Tensor,
    skip_first_layer_pe: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Four post-norm branches in float32. Q prompt tokens, K image tokens, C channels, A internal.

    Args:
        queries, query_point_embedding: [batch, point_batch, Q, C].
        keys, key_point_embedding: [batch, point_batch, K, C].
        self_attn_*_weight: [C, C], with biases [C].
        cross_*_q_weight, cross_*_k_weight, cross_*_v_weight: [A, C], with biases [A];
            cross_*_out_weight: [C, A], with biases [C].
        mlp_lin1_weight: [mlp_dim, C]; mlp_lin2_weight: [C, mlp_dim]; with biases.
        layer_norm*_weight, layer_norm*_bias: [C].
        skip_first_layer_pe: leave the point embedding out of the self-attention.

    Returns:
        Prompt tokens and image tokens, shaped like queries and keys.
    """
    x = queries if skip_first_layer_pe else queries + query_point_embedding
    attended = attention(
        F.linear(x, self_attn_q_weight, self_attn_q_bias),
        F.linear(x, self_attn_k_weight, self_attn_k_bias),
        F.linear(queries, self_attn_v_weight, self_attn_v_bias),
    )
    queries = queries + F.linear(attended, self_attn_out_weight, self_attn_out_bias)
    queries = layer_norm(queries, layer_norm1_weight, layer_norm1_bias)

    # Prompt tokens look at the image.
    positioned_keys = keys + key_point_embedding
    attended = attention(
        F.linear(queries + query_point_embedding, cross_t2i_q_weight, cross_t2i_q_bias),
        F.linear(positioned_keys, cross_t2i_k_weight, cross_t2i_k_bias),
        F.linear(keys, cross_t2i_v_weight, cross_t2i_v_bias),
    )
    queries = queries + F.linear(attended, cross_t2i_out_weight, cross_t2i_out_bias)
    queries = layer_norm(queries, layer_norm2_weight, layer_norm2_bias)

    inner = F.relu(F.linear(queries, mlp_lin1_weight, mlp_lin1_bias))
    queries = queries + F.linear(inner, mlp_lin2_weight, mlp_lin2_bias)
    queries = layer_norm(queries, layer_norm3_weight, layer_norm3_bias)

    # The image looks at the updated prompt tokens.
    attended = attention(
        F.linear(positioned_keys, cross_i2t_q_weight, cross_i2t_q_bias),
        F.linear(queries + query_point_embedding, cross_i2t_k_weight, cross_i2t_k_bias),
        F.linear(queries, cross_i2t_v_weight, cross_i2t_v_bias),
    )
    keys = keys + F.linear(attended, cross_i2t_out_weight, cross_i2t_out_bias)
    return queries, layer_norm(keys, layer_norm4_weight, layer_norm4_bias)

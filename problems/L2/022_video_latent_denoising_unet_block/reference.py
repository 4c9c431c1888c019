"""Video transformer block: attention over time, over space and to text, then a feed-forward."""

import torch
import torch.nn.functional as F

HEAD_DIM = 64
EPS = 1e-5


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the last axis."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Multi-head softmax attention along the last axis but one, [..., tokens, heads * HEAD_DIM]."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(-2, -3) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * HEAD_DIM**-0.5
    return torch.matmul(torch.softmax(scores, dim=-1), v).transpose(-2, -3).flatten(-2)


def run(
    video_latents: torch.Tensor,
    text_embeddings: torch.Tensor,
    temporal_norm_weight: torch.Tensor,
    temporal_norm_bias: torch.Tensor,
    temporal_qkv_weight: torch.Tensor,
    temporal_qkv_bias: torch.Tensor,
    temporal_out_proj_weight: torch.Tensor,
    temporal_out_proj_bias: torch.Tensor,
    spatial_norm_weight: torch.Tensor,
    spatial_norm_bias: torch.Tensor,
    spatial_qkv_weight: torch.Tensor,
    spatial_qkv_bias: torch.Tensor,
    spatial_out_proj_weight: torch.Tensor,
    spatial_out_proj_bias: torch.Tensor,
    cross_attn_norm_weight: torch.Tensor,
    cross_attn_norm_bias: torch.Tensor,
    cross_attn_q_weight: torch.Tensor,
    cross_attn_q_bias: torch.Tensor,
    cross_attn_kv_weight: torch.Tensor,
    cross_attn_kv_bias: torch.Tensor,
    cross_attn_out_proj_weight: torch.Tensor,
    cross_attn_out_proj_bias: torch.Tensor,
    ffn_norm_weight: torch.Tensor,
    ffn_norm_bias: torch.Tensor,
    ffn_fc1_weight: torch.Tensor,
    ffn_fc1_bias: torch.Tensor,
    ffn_fc2_weight: torch.Tensor,
    ffn_fc2_bias: torch.Tensor,
    num_frames_scalar: int,
    num_spatial_tokens_scalar: int,
) -> torch.Tensor:
    """Four pre-norm branches with residuals, all in float32.

    Args:
        video_latents: [batch_size, num_frames * num_spatial_tokens, hidden_size] f32, frame-major.
        text_embeddings: [batch_size, text_seq_len, hidden_size] f32; not normalised.
        *_norm_weight, *_norm_bias: [hidden_size] f32.
        temporal_qkv_weight, spatial_qkv_weight: [3 * hidden_size, hidden_size] f32, rows in the
            order q, k, v; biases to match.
        cross_attn_q_weight: [hidden_size, hidden_size] f32.
        cross_attn_kv_weight: [2 * hidden_size, hidden_size] f32, rows in the order k, v.
        *_out_proj_weight: [hidden_size, hidden_size] f32, and their biases.
        ffn_fc1_weight: [intermediate_size, hidden_size] f32, ffn_fc2_weight the other way round.
        num_frames_scalar: number of frames.
        num_spatial_tokens_scalar: tokens a frame; follows from the frames.

    Returns:
        [batch_size, num_frames * num_spatial_tokens, hidden_size] f32.
    """
    x = video_latents.unflatten(1, (num_frames_scalar, -1))  # [batch, frame, place, hidden]

    n = layer_norm(x, temporal_norm_weight, temporal_norm_bias).transpose(1, 2)
    q, k, v = F.linear(n, temporal_qkv_weight, temporal_qkv_bias).chunk(3, dim=-1)
    context = attention(q, k, v).transpose(1, 2)  # along the frames of each place
    x = x + F.linear(context, temporal_out_proj_weight, temporal_out_proj_bias)

    n = layer_norm(x, spatial_norm_weight, spatial_norm_bias)
    q, k, v = F.linear(n, spatial_qkv_weight, spatial_qkv_bias).chunk(3, dim=-1)
    context = attention(q, k, v)  # along the places of each frame
    x = x + F.linear(context, spatial_out_proj_weight, spatial_out_proj_bias)

    x = x.flatten(1, 2)
    n = layer_norm(x, cross_attn_norm_weight, cross_attn_norm_bias)
    q = F.linear(n, cross_attn_q_weight, cross_attn_q_bias)
    k, v = F.linear(text_embeddings, cross_attn_kv_weight, cross_attn_kv_bias).chunk(2, dim=-1)
    context = attention(q, k, v)
    x = x + F.linear(context, cross_attn_out_proj_weight, cross_attn_out_proj_bias)

    n = layer_norm(x, ffn_norm_weight, ffn_norm_bias)
    hidden = F.gelu(F.linear(n, ffn_fc1_weight, ffn_fc1_bias))
    return x + F.linear(hidden, ffn_fc2_weight, ffn_fc2_bias)

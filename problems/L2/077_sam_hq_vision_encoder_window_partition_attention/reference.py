"""SAM vision transformer layer with window attention and decomposed relative positions."""

import torch
import torch.nn.functional as F


def relative_table(rel_pos: torch.Tensor) -> torch.Tensor:
    """[2 * size - 1, d] to [size, size, d], one row for each pair (query, key)."""
    size = (rel_pos.shape[0] + 1) // 2
    coordinate = torch.arange(size, device=rel_pos.device)
    return rel_pos[coordinate.unsqueeze(1) - coordinate + size - 1]


def window_attention(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
) -> torch.Tensor:
    """Self-attention of each window, [windows, window * window, C] in and out, heads merged.

    The relative terms use the unscaled query.
    """
    head_dim = rel_pos_h.shape[1]
    window = (rel_pos_h.shape[0] + 1) // 2
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # windows, heads, tokens, head_dim
    # w window, n head, y and x of the query, i and j of the key, d head_dim.
    q_grid = q.unflatten(2, (window, window))
    relative_h = torch.einsum("wnyxd,yid->wnyxi", q_grid, relative_table(rel_pos_h))
    relative_w = torch.einsum("wnyxd,xjd->wnyxj", q_grid, relative_table(rel_pos_w))
    scores = q @ k.transpose(-1, -2) * head_dim**-0.5
    scores = scores.unflatten(3, (window, window)).unflatten(2, (window, window))
    scores = scores + relative_h.unsqueeze(-1) + relative_w.unsqueeze(-2)
    probabilities = torch.softmax(scores.flatten(4).flatten(2, 3), dim=-1)
    return (probabilities @ v).transpose(1, 2).flatten(2)


def run(
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
    layer_norm1_weight: torch.Tensor,
    layer_norm1_bias: torch.Tensor,
    layer_norm2_weight: torch.Tensor,
    layer_norm2_bias: torch.Tensor,
    mlp_lin1_weight: torch.Tensor,
    mlp_lin1_bias: torch.Tensor,
    mlp_lin2_weight: torch.Tensor,
    mlp_lin2_bias: torch.Tensor,
    layer_norm_eps: float,
) -> torch.Tensor:
    """Attention within windows and an erf-GELU MLP, both pre-norm with residuals; float32.

    Tokens that pad the last windows are zero before the projection and are not masked.

    Args:
        hidden_states: [batch_size, height, width, C].
        qkv_weight: [3 C, C]; qkv_bias: [3 C]; rows ordered (query | key | value, head, channel).
        proj_weight: [C, C]; proj_bias, layer_norm*_weight, layer_norm*_bias: [C].
        rel_pos_h, rel_pos_w: [2 * window - 1, head_dim].
        mlp_lin1_weight: [mlp_dim, C]; mlp_lin2_weight: [C, mlp_dim]; with biases.
        layer_norm_eps: added to the variances.

    Returns:
        [batch_size, height, width, C] f32.
    """
    height, width, channels = hidden_states.shape[1:]
    window = (rel_pos_h.shape[0] + 1) // 2

    x = F.layer_norm(
        hidden_states, (channels,), layer_norm1_weight, layer_norm1_bias, layer_norm_eps
    )
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    # b batch, r and s row and column of the window, y and x within it, c channels.
    x = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # b r y s x c
    window_rows, window_columns = x.shape[1], x.shape[3]
    x = x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(0, 2)  # (b r s) (y x) c

    attended = window_attention(x, qkv_weight, qkv_bias, rel_pos_h, rel_pos_w)
    y = F.linear(attended, proj_weight, proj_bias)

    # Windows back into place, without the padding.
    y = y.unflatten(0, (-1, window_rows, window_columns)).unflatten(3, (window, window))
    y = y.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)
    h = hidden_states + y[:, :height, :width]

    y = F.layer_norm(h, (channels,), layer_norm2_weight, layer_norm2_bias, layer_norm_eps)
    y = F.gelu(F.linear(y, mlp_lin1_weight, mlp_lin1_bias))
    return h + F.linear(y, mlp_lin2_weight, mlp_lin2_bias)

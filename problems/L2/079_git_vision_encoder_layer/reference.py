"""CLIP-style vision encoder layer: full attention and a quick-GELU MLP."""

import torch
import torch.nn.functional as F

HEAD_DIM = 64
QUICK_GELU_SLOPE = 1.702


def run(
    hidden_states: torch.Tensor,
    layer_norm1_weight: torch.Tensor,
    layer_norm1_bias: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    k_proj_bias: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    layer_norm2_weight: torch.Tensor,
    layer_norm2_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    layer_norm_eps: float,
) -> torch.Tensor:
    """Both pre-norm branches with their residuals, in float32; heads are 64 wide.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        layer_norm1_*, layer_norm2_*: [hidden_size].
        q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight: [hidden_size, hidden_size],
            with biases [hidden_size].
        fc1_weight: [intermediate_size, hidden_size]; fc2_weight: [hidden_size, intermediate_size];
            with biases.
        layer_norm_eps: added to the variances.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    width = hidden_states.shape[-1:]

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    x = F.layer_norm(hidden_states, width, layer_norm1_weight, layer_norm1_bias, layer_norm_eps)
    q = split_heads(F.linear(x, q_proj_weight, q_proj_bias))
    k = split_heads(F.linear(x, k_proj_weight, k_proj_bias))
    v = split_heads(F.linear(x, v_proj_weight, v_proj_bias))
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5, dim=-1)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = hidden_states + F.linear(heads, out_proj_weight, out_proj_bias)

    y = F.layer_norm(h, width, layer_norm2_weight, layer_norm2_bias, layer_norm_eps)
    y = F.linear(y, fc1_weight, fc1_bias)
    y = y * torch.sigmoid(QUICK_GELU_SLOPE * y)
    return h + F.linear(y, fc2_weight, fc2_bias)

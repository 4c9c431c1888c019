"""Vision transformer layer whose residual branches are scaled by the tanh of a gate."""

import torch
import torch.nn.functional as F

HEAD_DIM = 80


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm normalised in float32; rounded there, after the weight and after the bias."""
    normalized = F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    return normalized * weight + bias


def run(
    hidden_state: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    input_layernorm_bias: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    post_attention_layernorm_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    gate_attn: torch.Tensor,
    gate_ffn: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """Full attention without a mask and an erf-GELU MLP; heads are 80 wide. All bfloat16.

    Args:
        hidden_state: [batch_size, seq_len, hidden_size].
        input_layernorm_weight, input_layernorm_bias, post_attention_layernorm_weight,
            post_attention_layernorm_bias, fc2_bias: [hidden_size].
        q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight: [hidden_size, hidden_size].
        fc1_weight: [intermediate_size, hidden_size]; fc1_bias: [intermediate_size].
        fc2_weight: [hidden_size, intermediate_size].
        gate_attn, gate_ffn: [1].
        norm_eps: added to the variance.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    x = layer_norm(hidden_state, input_layernorm_weight, input_layernorm_bias, norm_eps)
    q = split_heads(F.linear(x, q_proj_weight))
    k = split_heads(F.linear(x, k_proj_weight))
    v = split_heads(F.linear(x, v_proj_weight))
    scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = hidden_state + torch.tanh(gate_attn) * F.linear(heads, o_proj_weight)

    y = layer_norm(h, post_attention_layernorm_weight, post_attention_layernorm_bias, norm_eps)
    # The products round before their biases are added.
    y = F.gelu(F.linear(y, fc1_weight) + fc1_bias)
    y = F.linear(y, fc2_weight) + fc2_bias
    return h + torch.tanh(gate_ffn) * y

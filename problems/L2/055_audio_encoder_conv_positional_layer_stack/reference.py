"""Whisper-style audio encoder: two convolutions, positions and one transformer layer."""

import torch
import torch.nn.functional as F

HEAD_DIM = 256
EPS = 1e-5


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm in float32, affine part included, rounded once."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPS).to(x.dtype)


def run(
    input_features: torch.Tensor,
    conv1_weight: torch.Tensor,
    conv1_bias: torch.Tensor,
    conv2_weight: torch.Tensor,
    conv2_bias: torch.Tensor,
    embed_positions_weight: torch.Tensor,
    self_attn_layer_norm_weight: torch.Tensor,
    self_attn_layer_norm_bias: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    final_layer_norm_weight: torch.Tensor,
    final_layer_norm_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
) -> torch.Tensor:
    """Every result between operations is bfloat16; heads are 256 wide. D d_model, T time.

    Args:
        input_features: [batch_size, num_mel_bins, T] bf16.
        conv1_weight: [D, num_mel_bins, 3]; conv2_weight: [D, D, 3] of stride 2; biases [D].
        embed_positions_weight: [T / 2, D].
        self_attn_layer_norm_*, final_layer_norm_*: [D].
        q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight: [D, D]; biases [D], none for
            the keys.
        fc1_weight: [encoder_ffn_dim, D]; fc2_weight: [D, encoder_ffn_dim]; with their biases.

    Returns:
        [batch_size, T / 2, D] bf16.
    """

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    x = F.gelu(F.conv1d(input_features, conv1_weight, conv1_bias, padding=1))
    x = F.gelu(F.conv1d(x, conv2_weight, conv2_bias, stride=2, padding=1))
    h = x.transpose(1, 2) + embed_positions_weight

    y = layer_norm(h, self_attn_layer_norm_weight, self_attn_layer_norm_bias)
    q = split_heads(F.linear(y, q_proj_weight, q_proj_bias) * HEAD_DIM**-0.5)
    k = split_heads(F.linear(y, k_proj_weight))
    v = split_heads(F.linear(y, v_proj_weight, v_proj_bias))
    scores = q @ k.transpose(-1, -2)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = h + F.linear(heads, out_proj_weight, out_proj_bias)

    y = layer_norm(h, final_layer_norm_weight, final_layer_norm_bias)
    y = F.gelu(F.linear(y, fc1_weight, fc1_bias))
    return h + F.linear(y, fc2_weight, fc2_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Convolution weights scaled by their fan-in, and a small table of positions."""
    d_model, num_mel_bins = axes_and_scalars["d_model"], axes_and_scalars["num_mel_bins"]
    positions = axes_and_scalars["output_seq_len"]

    def conv_weight(in_channels: int) -> torch.Tensor:
        weight = torch.randn(d_model, in_channels, 3, device=device)
        return (weight / (in_channels * 3) ** 0.5).bfloat16()

    table = 0.02 * torch.randn(positions, d_model, device=device)
    return {
        "conv1_weight": conv_weight(num_mel_bins),
        "conv2_weight": conv_weight(d_model),
        "embed_positions_weight": table.bfloat16(),
    }

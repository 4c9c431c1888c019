"""Gated short-convolution mixer: projection to three streams, two gates around a causal filter."""

import torch
import torch.nn.functional as F


def run(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
) -> torch.Tensor:
    """Each operation rounds its result to bfloat16.

    Args:
        x: [batch_size, seq_len, hidden_size] bf16.
        in_proj_weight, in_proj_bias: [3 * hidden_size, hidden_size] and [3 * hidden_size] bf16.
        conv_weight, conv_bias: [hidden_size, 1, conv_kernel_size] and [hidden_size] bf16; the last
            tap multiplies the current token.
        out_proj_weight, out_proj_bias: [hidden_size, hidden_size] and [hidden_size] bf16.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    hidden_size, _, kernel_size = conv_weight.shape
    gate_in, gate_out, value = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    gated = (gate_in * value).transpose(1, 2)
    padded = F.pad(gated, (kernel_size - 1, 0))
    filtered = F.conv1d(padded, conv_weight, conv_bias, groups=hidden_size).transpose(1, 2)
    return F.linear(gate_out * filtered, out_proj_weight, out_proj_bias)

"""Input stage of a Mamba block: projection, masked causal convolution with SiLU, and the gate."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each step rounds to bfloat16, sigmoid and the product with it being two steps.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        attention_mask: [batch_size, seq_len] bf16, 0 or 1.
        in_proj_weight, in_proj_bias: [2 * intermediate_size, hidden_size] and
            [2 * intermediate_size] bf16.
        conv1d_weight, conv1d_bias: [intermediate_size, 1, conv_kernel_size] and
            [intermediate_size] bf16; the last tap multiplies the current token.

    Returns:
        The filtered stream and the gate, each [batch_size, intermediate_size, seq_len] bf16.
    """
    intermediate_size, _, kernel_size = conv1d_weight.shape
    mask = attention_mask.unsqueeze(1)
    x, gate = F.linear(hidden_states, in_proj_weight, in_proj_bias).transpose(1, 2).chunk(2, dim=1)
    padded = F.pad(x * mask, (kernel_size - 1, 0))
    x = F.conv1d(padded, conv1d_weight, conv1d_bias, groups=intermediate_size)
    x = x * torch.sigmoid(x)
    return x * mask, gate

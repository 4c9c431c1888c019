"""Attention output projection with both operands quantised to FP8 in blocks inside the call."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12


def quantize(blocks: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Round float32 blocks to float8_e4m3fn with one scale a block, and dequantise them.

    Args:
        blocks: float32.
        dims: axes that make up a block.
    """
    # Times the reciprocal: on a GPU torch evaluates a division by a number so, and ties of the
    # rounding hang on the last bit of the scale. Written out, every device does the same.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1 / E4M3_MAX)
    scale = scale.clamp(min=SMALLEST_SCALE)
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.float() * scale


def run(
    attn_output: torch.Tensor, o_proj_weight: torch.Tensor, o_proj_bias: torch.Tensor
) -> torch.Tensor:
    """Contraction of the dequantised operands and bias in float32, rounded to bfloat16 at the end.

    Args:
        attn_output: [num_tokens, input_dim] bf16; a scale for every 128 values of a row.
        o_proj_weight: [hidden_size, input_dim] bf16; a scale for every tile of 128 x 128.
        o_proj_bias: [hidden_size] bf16.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    num_tokens, input_dim = attn_output.shape
    hidden_size = o_proj_weight.shape[0]
    activation = quantize(attn_output.float().view(num_tokens, -1, BLOCK), dims=(2,))
    tiles = o_proj_weight.float().view(hidden_size // BLOCK, BLOCK, input_dim // BLOCK, BLOCK)
    weight = quantize(tiles, dims=(1, 3))
    output = activation.view(num_tokens, input_dim) @ weight.view(hidden_size, input_dim).T
    return (output + o_proj_bias.float()).to(attn_output.dtype)

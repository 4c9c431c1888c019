"""Product of two pre-quantised NVFP4 operands."""

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_codes(y: torch.Tensor) -> torch.Tensor:
    """4-bit codes (uint8) of values in [-6, 6]: nearest, ties to the even code; NaN gives 0."""
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code | (y < 0).to(torch.uint8) << 3


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of 4-bit codes."""
    table = torch.tensor(
        E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def nvfp4_quantize(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise with scales derived from the data.

    Args:
        t: [.., K] float32, K a multiple of 16.

    Returns:
        Codes [.., K] uint8 (one a byte), block scales [.., K / 16] float8_e4m3fn and the global
        decode scale, a 0-d float32 tensor. A value decodes to value(code) * block * global.
    """
    largest_float = torch.finfo(torch.float32).max
    blocks = t.unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(dim=-1)
    amax = block_amax.amax()
    # A tensor over a tensor: the last bit of this quotient decides ties of the block scales.
    encode = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=largest_float)
    encode = torch.where(encode == 0, 1.0, encode)
    decode = encode.reciprocal()
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    per_block = block_amax * (1.0 / E2M1_MAX)
    block_scale = (per_block * encode).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (block_scale.float() * decode).reciprocal().clamp(max=largest_float)
    y = (blocks * factor.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return e2m1_codes(y).flatten(-2), block_scale, decode


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even index in the low nibble: [.., K] uint8 to [.., K / 2] fp4x2."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes [.., K] of packed ones [.., K / 2]; no device needs to know the packed type for it."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_blocks(codes: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """value(code) * block scale, [.., K] float32; the global scale is left out."""
    values = e2m1_values(codes).unflatten(-1, (-1, BLOCK))
    return (values * block_scale.float().unsqueeze(-1)).flatten(-2)


def run(
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    global_decode_scale_input: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_decode_scale_weight: float,
) -> torch.Tensor:
    """Contraction in float32 without the global scales, which multiply its result.

    Args:
        hidden_states: [1, M, K / 2] float4_e2m1fn_x2.
        hidden_states_scale: [1, M, K / 16] float8_e4m3fn.
        weight: [1, N, K / 2] float4_e2m1fn_x2.
        weight_scale: [1, N, K / 16] float8_e4m3fn.
        global_decode_scale_input, global_decode_scale_weight: the operands' global scales.

    Returns:
        [1, M, N] f32.
    """
    activation = decode_blocks(unpack(hidden_states), hidden_states_scale)
    weights = decode_blocks(unpack(weight), weight_scale)
    raw = activation @ weights.transpose(1, 2)
    # The scales' product is formed in float32: a Python product of the two would keep more bits.
    input_scale = torch.full((), global_decode_scale_input, device=raw.device)
    return raw * (input_scale * global_decode_scale_weight)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Two standard normals, quantised."""
    m, n = axes_and_scalars["M"], axes_and_scalars["hidden_size"]
    k = axes_and_scalars["intermediate_size"]
    codes, block_scale, global_scale = nvfp4_quantize(torch.randn(1, m, k, device=device))
    w_codes, w_block_scale, w_global_scale = nvfp4_quantize(torch.randn(1, n, k, device=device))
    return {
        "hidden_states": pack(codes),
        "hidden_states_scale": block_scale,
        "global_decode_scale_input": global_scale.item(),
        "weight": pack(w_codes),
        "weight_scale": w_block_scale,
        "global_decode_scale_weight": w_global_scale.item(),
    }

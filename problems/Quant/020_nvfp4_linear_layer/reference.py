"""Linear layer in NVFP4 whose global scales are applied in float32."""

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
    x: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_global_decode_scale: float,
) -> torch.Tensor:
    """Quantise the activations from float32, contract in float32, apply the global scales.

    Args:
        x: [batch_size, seq_len, in_features] bf16.
        weight_fp4: [out_features, in_features / 2] float4_e2m1fn_x2.
        weight_scales: [out_features, in_features / 16] float8_e4m3fn.
        weight_global_decode_scale: the weight's global scale.

    Returns:
        [batch_size, seq_len, out_features] bf16.
    """
    codes, block_scale, activation_global_scale = nvfp4_quantize(x.float())
    weight = decode_blocks(unpack(weight_fp4), weight_scales)
    raw = (decode_blocks(codes, block_scale) @ weight.T).to(x.dtype)
    global_scale = (activation_global_scale.double() * weight_global_decode_scale).float()
    return (raw.float() * global_scale).to(x.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, and a normal weight, not scaled by its width, quantised."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    n, k = axes_and_scalars["out_features"], axes_and_scalars["in_features"]
    codes, block_scale, global_scale = nvfp4_quantize(torch.randn(n, k, device=device))
    return {
        "x": torch.randn(batch_size, seq_len, k, dtype=torch.bfloat16, device=device),
        "weight_fp4": pack(codes),
        "weight_scales": block_scale,
        "weight_global_decode_scale": global_scale.item(),
    }

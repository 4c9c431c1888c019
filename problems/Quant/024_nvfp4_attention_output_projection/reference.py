"""Output projection in NVFP4: 4-bit E2M1 values, an E4M3 scale per 16 values, one global scale."""

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
        t: [rows, K] float32, K a multiple of 16.

    Returns:
        Codes [rows, K] uint8 (one a byte), block scales [rows, K / 16] float8_e4m3fn and the global
        decode scale, a 0-d float32 tensor. A value decodes to value(code) * block * global.
    """
    largest_float = torch.finfo(torch.float32).max
    blocks = t.unflatten(-1, (-1, BLOCK))
    amax = t.abs().amax()
    # The last bits of the scales decide ties of their rounding. So this is a tensor over a tensor
    # (a true division on every device) and below stands a factor of 1 / 6, as which torch evaluates
    # a division by a number on a GPU.
    encode = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=largest_float)
    encode = torch.where(encode == 0, 1.0, encode)
    decode = encode.reciprocal()
    block_scale = blocks.abs().amax(dim=-1) * (1 / E2M1_MAX) * encode
    block_scale = block_scale.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (block_scale.float() * decode).reciprocal().clamp(max=largest_float)
    y = (blocks * factor.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return e2m1_codes(y).flatten(-2), block_scale, decode


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even index in the low nibble: [.., K] uint8 to [.., K / 2] fp4x2."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The reverse of `pack`; no device needs to know the packed type for it."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_blocks(codes: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """value(code) * block scale, [rows, K] float32; the global scale is left out."""
    values = e2m1_values(codes).unflatten(-1, (-1, BLOCK))
    return (values * block_scale.float().unsqueeze(-1)).flatten(-2)


def run(
    hidden_states: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_scale_fp8: torch.Tensor,
    weight_global_decode_scale: float,
) -> torch.Tensor:
    """Quantise the activations, contract in float32, apply the global scales to the result.

    Args:
        hidden_states: [M, input_dim] f32.
        weight_fp4: [N, input_dim / 2] float4_e2m1fn_x2.
        weight_scale_fp8: [N, input_dim / 16] float8_e4m3fn.
        weight_global_decode_scale: the weight's global scale.

    Returns:
        [M, N] f32.
    """
    codes, block_scale, activation_global_scale = nvfp4_quantize(hidden_states)
    activation = decode_blocks(codes, block_scale)
    weight = decode_blocks(unpack(weight_fp4), weight_scale_fp8)
    return (activation @ weight.T) * (activation_global_scale * weight_global_decode_scale)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, and a normal weight (standard deviation 0.02) quantised to NVFP4."""
    m, k = axes_and_scalars["M"], axes_and_scalars["input_dim"]
    n = axes_and_scalars["hidden_size_padded"]
    hidden_states = torch.randn(m, k, device=device)
    codes, block_scale, global_scale = nvfp4_quantize(torch.randn(n, k, device=device) * 0.02)
    return {
        "hidden_states": hidden_states,
        "weight_fp4": pack(codes),
        "weight_scale_fp8": block_scale,
        "weight_global_decode_scale": global_scale.item(),
    }

"""Query, key and value projections in NVFP4, float32 in and float16 out."""

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


def project(
    activation: torch.Tensor,
    activation_global_scale: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: float,
) -> torch.Tensor:
    """activation [.., K] times weight [N, K]^T, then the global scales; float32 [.., N]."""
    weight = decode_blocks(unpack(weight_fp4), weight_scale)
    return (activation @ weight.T) * (activation_global_scale * weight_global_scale)


def run(
    hidden_states: torch.Tensor,
    q_weight_fp4: torch.Tensor,
    q_scale: torch.Tensor,
    q_global_decode_scale: float,
    k_weight_fp4: torch.Tensor,
    k_scale: torch.Tensor,
    k_global_decode_scale: float,
    v_weight_fp4: torch.Tensor,
    v_scale: torch.Tensor,
    v_global_decode_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the activations once; the projections are float32 up to a rounding at the end.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        *_weight_fp4: [out, hidden_size / 2] float4_e2m1fn_x2; out is q_size or kv_size.
        *_scale: [out, hidden_size / 16] float8_e4m3fn.
        *_global_decode_scale: the weights' global scales.

    Returns:
        query [batch_size, seq_len, q_size], and key and value [batch_size, seq_len, kv_size], fp16.
    """
    codes, block_scale, global_scale = nvfp4_quantize(hidden_states)
    activation = decode_blocks(codes, block_scale), global_scale
    query = project(*activation, q_weight_fp4, q_scale, q_global_decode_scale)
    key = project(*activation, k_weight_fp4, k_scale, k_global_decode_scale)
    value = project(*activation, v_weight_fp4, v_scale, v_global_decode_scale)
    return query.half(), key.half(), value.half()


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, and normal weights, not scaled by their width, quantised."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden = axes_and_scalars["hidden_size"]
    q_size, kv_size = axes_and_scalars["q_size"], axes_and_scalars["kv_size"]
    inputs = {"hidden_states": torch.randn(batch_size, seq_len, hidden, device=device)}
    for name, n in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        codes, block_scale, global_scale = nvfp4_quantize(torch.randn(n, hidden, device=device))
        inputs[f"{name}_weight_fp4"] = pack(codes)
        inputs[f"{name}_scale"] = block_scale
        inputs[f"{name}_global_decode_scale"] = global_scale.item()
    return inputs

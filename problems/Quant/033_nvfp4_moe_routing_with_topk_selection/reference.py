"""Router: NVFP4 logits over many experts, softmax, top-10 with renormalised weights."""

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOP_EXPERTS = 10


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
    gate_weight_fp4: torch.Tensor,
    gate_scale: torch.Tensor,
    gate_global_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 between the quantised activations and the rounding of the weights.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        gate_weight_fp4: [num_experts, hidden_size / 2] float4_e2m1fn_x2.
        gate_scale: [num_experts, hidden_size / 16] float8_e4m3fn.
        gate_global_scale: the weight's global scale.

    Returns:
        Weights [num_tokens, 10] bf16 and experts [num_tokens, 10] int64, both by descending
        probability, and the logits [num_tokens, num_experts] f32.
    """
    codes, block_scale, global_scale = nvfp4_quantize(hidden_states.float())
    activation = decode_blocks(codes, block_scale)
    logits = project(activation, global_scale, gate_weight_fp4, gate_scale, gate_global_scale)
    largest, experts = torch.softmax(logits, dim=-1).topk(TOP_EXPERTS, dim=-1)
    weights = (largest / largest.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
    return weights, experts, logits


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, and a normal weight times 0.02, quantised."""
    num_tokens, hidden = axes_and_scalars["num_tokens"], axes_and_scalars["hidden_size"]
    weight = torch.randn(axes_and_scalars["num_experts"], hidden, device=device) * 0.02
    codes, block_scale, global_scale = nvfp4_quantize(weight)
    return {
        "hidden_states": torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=device),
        "gate_weight_fp4": pack(codes),
        "gate_scale": block_scale,
        "gate_global_scale": global_scale.item(),
    }

"""Router: NVFP4 logits, sigmoid, correction bias, top-6 with normalised and scaled weights."""

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOP_EXPERTS = 6
SCALING_FACTOR = 2.5


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


def top_k_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row, in the order an unsorted selection leaves them.

    First those larger than the k-th largest, then those equal to it, each by ascending index. Of
    equal values the lowest indices are taken.
    """
    order = values.sort(dim=-1, descending=True, stable=True)
    indices, largest = order.indices[..., :k], order.values[..., :k]
    # Ties with the k-th go behind all others.
    width = values.shape[-1]
    rank = indices + width * (largest == largest[..., -1:])
    return rank.sort(dim=-1).values % width


def run(
    hidden_states: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: float,
    e_score_correction_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts form one group, so nothing is masked before the selection.

    Args:
        hidden_states: [num_tokens, hidden_size] f32.
        weight_fp4: [num_experts, hidden_size / 2] float4_e2m1fn_x2.
        weight_scale: [num_experts, hidden_size / 16] float8_e4m3fn.
        weight_global_scale: the weight's global scale.
        e_score_correction_bias: [num_experts] f32.

    Returns:
        Experts [num_tokens, 6] int64 and their weights [num_tokens, 6] f32.
    """
    codes, block_scale, global_scale = nvfp4_quantize(hidden_states)
    activation = decode_blocks(codes, block_scale)
    logits = project(activation, global_scale, weight_fp4, weight_scale, weight_global_scale)
    choice = torch.sigmoid(logits) + e_score_correction_bias
    topk_indices = top_k_indices(choice, TOP_EXPERTS)
    topk_weights = choice.gather(1, topk_indices)
    topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_indices, topk_weights * SCALING_FACTOR


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, a normal weight, not scaled by its width, quantised, a bias of zeros."""
    num_tokens, hidden = axes_and_scalars["num_tokens"], axes_and_scalars["hidden_size"]
    num_experts = axes_and_scalars["n_routed_experts"]
    weight = torch.randn(num_experts, hidden, device=device)
    codes, block_scale, global_scale = nvfp4_quantize(weight)
    return {
        "hidden_states": torch.randn(num_tokens, hidden, device=device),
        "weight_fp4": pack(codes),
        "weight_scale": block_scale,
        "weight_global_scale": global_scale.item(),
        "e_score_correction_bias": torch.zeros(num_experts, device=device),
    }

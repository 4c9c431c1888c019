"""RMSNorm, NVFP4 projections, RMSNorm of heads, rotary embedding, masked attention, projection."""

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


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K] rounded to NVFP4: decoded but for the global scale, float32, and that scale."""
    codes, block_scale, global_scale = nvfp4_quantize(x.float())
    return decode_blocks(codes, block_scale), global_scale


def project(
    activation: torch.Tensor,
    activation_global_scale: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: float,
) -> torch.Tensor:
    """activation [.., K] times weight [N, K]^T, bf16 [.., N].

    The float32 contraction is rounded to bf16 before the global scales are applied, and their
    product is rounded to bf16 as well.
    """
    weight = decode_blocks(unpack(weight_fp4), weight_scale)
    raw = (activation @ weight.T).to(torch.bfloat16)
    return raw * (activation_global_scale * weight_global_scale).to(torch.bfloat16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis; the normalised value is rounded before the weight."""
    value = x.float()
    normalized = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of x [batch_size, num_heads, seq_len, head_dim], all bf16.

    Both products and their sum are rounded. cos and sin are [batch_size, seq_len, head_dim].
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    q_weight_fp4: torch.Tensor,
    q_scale: torch.Tensor,
    q_global_scale: float,
    k_weight_fp4: torch.Tensor,
    k_scale: torch.Tensor,
    k_global_scale: float,
    v_weight_fp4: torch.Tensor,
    v_scale: torch.Tensor,
    v_global_scale: float,
    o_weight_fp4: torch.Tensor,
    o_scale: torch.Tensor,
    o_global_scale: float,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Every intermediate result is bf16; activations are quantised from float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scores.
        input_layernorm_weight: [hidden_size] bf16.
        *_weight_fp4: [out, in / 2] float4_e2m1fn_x2; out is num_heads * head_dim for q,
            num_kv_heads * head_dim for k and v, hidden_size for o.
        *_scale: [out, in / 16] float8_e4m3fn.
        *_global_scale: the weights' global scales.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        rms_norm_eps: added to the mean squares.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    seq_len, head_dim = cos.shape[1:]
    activation = quantized(rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps))

    def heads(weight_fp4: torch.Tensor, scale: torch.Tensor, global_scale: float) -> torch.Tensor:
        projected = project(*activation, weight_fp4, scale, global_scale)
        return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    query = rms_norm(heads(q_weight_fp4, q_scale, q_global_scale), q_norm_weight, rms_norm_eps)
    key = rms_norm(heads(k_weight_fp4, k_scale, k_global_scale), k_norm_weight, rms_norm_eps)
    query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
    value = heads(v_weight_fp4, v_scale, v_global_scale)

    # Consecutive query heads share a kv head: [batch, kv, group * seq, head_dim].
    num_kv_heads = key.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    scores = (grouped @ key.transpose(-1, -2)) * head_dim**-0.5
    scores = scores.unflatten(2, (-1, seq_len)) + attention_mask.unsqueeze(2)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = probabilities.flatten(2, 3) @ value
    attended = attended.unflatten(2, (-1, seq_len)).flatten(1, 2).transpose(1, 2).flatten(2)
    return project(*quantized(attended), o_weight_fp4, o_scale, o_global_scale)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Standard normals, cos and sin too; weights times 1 / sqrt(in) quantised; a mask of zeros."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden, head_dim = axes_and_scalars["hidden_size"], axes_and_scalars["head_dim"]
    q_out, kv_out = axes_and_scalars["q_out_features"], axes_and_scalars["kv_out_features"]
    bf16 = {"dtype": torch.bfloat16, "device": device}
    inputs = {
        "hidden_states": torch.randn(batch_size, seq_len, hidden, **bf16),
        "cos": torch.randn(batch_size, seq_len, head_dim, **bf16),
        "sin": torch.randn(batch_size, seq_len, head_dim, **bf16),
        "attention_mask": torch.zeros(batch_size, 1, seq_len, seq_len, **bf16),
        "input_layernorm_weight": torch.ones(hidden, **bf16),
        "q_norm_weight": torch.ones(head_dim, **bf16),
        "k_norm_weight": torch.ones(head_dim, **bf16),
        "rms_norm_eps": 1e-6,
    }
    for name, n, k in (
        ("q", q_out, hidden),
        ("k", kv_out, hidden),
        ("v", kv_out, hidden),
        ("o", hidden, q_out),
    ):
        weight = torch.randn(n, k, device=device) * k**-0.5
        codes, block_scale, global_scale = nvfp4_quantize(weight)
        inputs[f"{name}_weight_fp4"] = pack(codes)
        inputs[f"{name}_scale"] = block_scale
        inputs[f"{name}_global_scale"] = global_scale.item()
    return inputs

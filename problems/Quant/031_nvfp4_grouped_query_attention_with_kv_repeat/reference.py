"""Grouped-query attention whose two matrix products run in NVFP4."""

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
    """Quantise with scales derived from the data, one block along 16 values of the last axis.

    Args:
        t: [.., K] bf16, K a multiple of 16.

    Returns:
        Codes [.., K] uint8 (one a byte), block scales [.., K / 16] float8_e4m3fn and the global
        decode scale, a 0-d float32 tensor. A value decodes to value(code) * block * global.
    """
    largest_float = torch.finfo(torch.float32).max
    blocks = t.unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(dim=-1)
    amax = block_amax.amax().float()
    # A tensor over a tensor: the last bit of this quotient decides ties of the block scales.
    encode = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=largest_float)
    encode = torch.where(encode == 0, 1.0, encode)
    decode = encode.reciprocal()
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device. The quotient
    # is rounded to the dtype of t.
    per_block = (block_amax.float() * (1.0 / E2M1_MAX)).to(t.dtype).float()
    block_scale = (per_block * encode).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (block_scale.float() * decode).reciprocal().clamp(max=largest_float)
    y = (blocks * factor.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return e2m1_codes(y).flatten(-2), block_scale, decode


def decode_blocks(codes: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """value(code) * block scale, [.., K] float32; the global scale is left out."""
    values = e2m1_values(codes).unflatten(-1, (-1, BLOCK))
    return (values * block_scale.float().unsqueeze(-1)).flatten(-2)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K] rounded to NVFP4: decoded but for the global scale, float32, and that scale."""
    codes, block_scale, global_scale = nvfp4_quantize(x)
    return decode_blocks(codes, block_scale), global_scale


def run(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every intermediate result is bf16, and all four operands are quantised from bf16.

    Args:
        query_states: [batch_size, num_heads, seq_len, head_dim] bf16.
        key_states, value_states: [batch_size, num_kv_heads, seq_len, head_dim] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scores.

    Returns:
        Attention result [batch_size, num_heads, seq_len, head_dim] and attention weights, not
        quantised, [batch_size, num_heads, seq_len, seq_len], bf16.
    """
    seq_len, head_dim = query_states.shape[2:]
    num_kv_heads = key_states.shape[1]
    dtype = query_states.dtype

    # Consecutive query heads share a kv head: [batch, kv, group * seq, head_dim].
    # Repeating keys and values instead would change neither codes nor scales.
    query, query_scale = quantized(query_states.unflatten(1, (num_kv_heads, -1)).flatten(2, 3))
    key, key_scale = quantized(key_states)
    scores = (query @ key.transpose(-1, -2)).to(dtype)
    scores = scores * (query_scale * key_scale).to(dtype)
    scores = scores * head_dim**-0.5
    scores = scores.unflatten(2, (-1, seq_len)) + attention_mask.unsqueeze(2)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)

    probability, probability_scale = quantized(weights.flatten(2, 3))
    value, value_scale = quantized(value_states.transpose(-1, -2).contiguous())
    output = (probability @ value.transpose(-1, -2)).to(dtype)
    output = output * (probability_scale * value_scale).to(dtype)
    return output.unflatten(2, (-1, seq_len)).flatten(1, 2), weights.flatten(1, 2)

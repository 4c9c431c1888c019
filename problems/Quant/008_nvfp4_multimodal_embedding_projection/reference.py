"""Token embeddings into which projected vision features are merged; the projection is NVFP4."""

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


def run(
    text_input_ids: torch.Tensor,
    text_embedding_weight: torch.Tensor,
    vision_features: torch.Tensor,
    vision_proj_weight_fp4: torch.Tensor,
    vision_proj_weight_scale: torch.Tensor,
    vision_proj_weight_global_scale: float,
    vision_proj_bias: torch.Tensor,
    vision_token_mask: torch.Tensor,
) -> torch.Tensor:
    """Look up every token, then put the i-th vision row at the i-th true position of the mask.

    Args:
        text_input_ids: [batch_size, seq_len] int64.
        text_embedding_weight: [vocab_size, hidden_size] bf16.
        vision_features: [batch_size, num_vision_tokens, vision_hidden_size] f32.
        vision_proj_weight_fp4: [1, hidden_size, vision_hidden_size / 2] float4_e2m1fn_x2.
        vision_proj_weight_scale: [1, hidden_size, vision_hidden_size / 16] float8_e4m3fn.
        vision_proj_weight_global_scale: the weight's global scale.
        vision_proj_bias: [hidden_size] bf16.
        vision_token_mask: [batch_size, seq_len] bool.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    vision = project(
        *quantized(vision_features),
        vision_proj_weight_fp4[0],
        vision_proj_weight_scale[0],
        vision_proj_weight_global_scale,
    )
    vision = vision + vision_proj_bias

    rank = vision_token_mask.cumsum(dim=1) - 1
    replaced = vision_token_mask & (rank < vision.shape[1])
    row = rank.clamp(0, vision.shape[1] - 1)
    batch = torch.arange(vision.shape[0], device=vision.device).unsqueeze(1)
    text = text_embedding_weight[text_input_ids]
    return torch.where(replaced.unsqueeze(-1), vision[batch, row], text)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Standard normals; as many vision positions, chosen at random, as there are vision rows."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    num_vision_tokens = axes_and_scalars["num_vision_tokens"]
    hidden, vision_hidden = axes_and_scalars["hidden_size"], axes_and_scalars["vision_hidden_size"]
    vocab_size = axes_and_scalars["vocab_size"]
    codes, block_scale, global_scale = nvfp4_quantize(
        torch.randn(1, hidden, vision_hidden, device=device)
    )
    table = torch.randn(vocab_size, hidden, dtype=torch.bfloat16, device=device)
    features = torch.randn(batch_size, num_vision_tokens, vision_hidden, device=device)
    chosen = torch.rand(batch_size, seq_len, device=device).argsort(dim=1)
    mask = torch.zeros(batch_size, seq_len, dtype=torch.bool, device=device)
    mask.scatter_(1, chosen[:, : min(num_vision_tokens, seq_len)], True)
    return {
        "text_input_ids": torch.randint(vocab_size, (batch_size, seq_len), device=device),
        "text_embedding_weight": table,
        "vision_features": features,
        "vision_proj_weight_fp4": pack(codes),
        "vision_proj_weight_scale": block_scale,
        "vision_proj_weight_global_scale": global_scale.item(),
        "vision_proj_bias": torch.randn(hidden, dtype=torch.bfloat16, device=device),
        "vision_token_mask": mask,
    }

"""L2/004_fused_residual_rms_mlp: Triton norm and activation around cuBLAS products."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, output_ptr, hidden_size, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * hidden_size
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    hidden = tl.load(hidden_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = (residual + hidden).to(tl.bfloat16).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    tl.store(output_ptr + row + column, (weight * (x * rstd)).to(tl.bfloat16), mask=inside)


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, numel, BLOCK: tl.constexpr):
    """gate <- silu(gate) * up, with the rounding between the two."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(gate_ptr + index, (activated * up).to(tl.bfloat16), mask=inside)


def run(
    hidden_states, residual, norm_weight, gate_proj_weight, up_proj_weight, down_proj_weight, eps
):
    hidden_size = hidden_states.shape[-1]
    tokens = hidden_states.numel() // hidden_size
    normalized = torch.empty_like(hidden_states).view(tokens, hidden_size)
    add_rms_norm_kernel[(tokens,)](
        hidden_states,
        residual,
        norm_weight,
        normalized,
        hidden_size,
        eps,
        BLOCK=triton.next_power_of_2(hidden_size),
        num_warps=16,
    )
    gate = normalized @ gate_proj_weight.T
    up = normalized @ up_proj_weight.T
    block = 2048
    silu_mul_kernel[(triton.cdiv(gate.numel(), block),)](
        gate, up, gate.numel(), BLOCK=block, num_warps=8
    )
    return (gate @ down_proj_weight.T).view_as(hidden_states)

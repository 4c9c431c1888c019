"""L1/015_grouped_query_attention_with_rope_and_qk_norm: cuBLAS products, fused attention of torch.

Norm and rotary embedding of queries and keys are one Triton kernel that also moves the heads before
the sequence. The mask is handed to the attention as it comes; nothing assumes that it is causal.
"""

import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def scale_and_weigh(x, rstd, weight):
    """x * rstd * weight in float32 with the two roundings of the norm."""
    normalized = (x * rstd).to(tl.bfloat16).to(tl.float32)
    return (normalized * weight).to(tl.bfloat16).to(tl.float32)


@triton.jit
def norm_rope_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    output_ptr,
    seq_len,
    eps,
    HALF: tl.constexpr,
):
    """[batch, seq, heads, 2 * HALF] to normalised, rotated [batch, heads, seq, 2 * HALF]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    half = tl.arange(0, HALF)
    x_ptr += (token * num_heads + head) * (2 * HALF)
    first = tl.load(x_ptr + half).to(tl.float32)
    second = tl.load(x_ptr + HALF + half).to(tl.float32)
    square_sum = tl.sum(first * first + second * second, axis=0)
    rstd = tl.rsqrt(square_sum / (2 * HALF) + eps)
    first = scale_and_weigh(first, rstd, tl.load(weight_ptr + half).to(tl.float32))
    second = scale_and_weigh(second, rstd, tl.load(weight_ptr + HALF + half).to(tl.float32))

    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    cos_first = tl.load(cos_ptr + half).to(tl.float32)
    cos_second = tl.load(cos_ptr + HALF + half).to(tl.float32)
    sin_first = tl.load(sin_ptr + half).to(tl.float32)
    sin_second = tl.load(sin_ptr + HALF + half).to(tl.float32)
    rotated_first = (first * cos_first).to(tl.bfloat16).to(tl.float32)
    rotated_first -= (second * sin_first).to(tl.bfloat16).to(tl.float32)
    rotated_second = (second * cos_second).to(tl.bfloat16).to(tl.float32)
    rotated_second += (first * sin_second).to(tl.bfloat16).to(tl.float32)

    batch, position = token // seq_len, token % seq_len
    output_ptr += ((batch * num_heads + head) * seq_len + position) * (2 * HALF)
    tl.store(output_ptr + half, rotated_first.to(tl.bfloat16))
    tl.store(output_ptr + HALF + half, rotated_second.to(tl.bfloat16))


def norm_and_rotate(x, weight, cos, sin, eps):
    batch_size, seq_len, width = x.shape
    head_dim = weight.shape[0]
    num_heads = width // head_dim
    output = x.new_empty(batch_size, num_heads, seq_len, head_dim)
    norm_rope_kernel[(batch_size * seq_len, num_heads)](
        x, weight, cos, sin, output, seq_len, eps, HALF=head_dim // 2, num_warps=1
    )
    return output


def run(
    hidden_states,
    cos,
    sin,
    attention_mask,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    q_norm_weight,
    k_norm_weight,
    rms_norm_eps,
    scaling,
):
    head_dim = q_norm_weight.shape[0]
    q = F.linear(hidden_states, q_proj_weight)
    k = F.linear(hidden_states, k_proj_weight)
    v = F.linear(hidden_states, v_proj_weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)
    q = norm_and_rotate(q, q_norm_weight, cos, sin, rms_norm_eps)
    k = norm_and_rotate(k, k_norm_weight, cos, sin, rms_norm_eps)
    group = q.shape[1] // k.shape[1]
    attended = F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(group, dim=1),
        v.repeat_interleave(group, dim=1),
        attn_mask=attention_mask,
        scale=scaling,
    )
    return F.linear(attended.transpose(1, 2).flatten(2), o_proj_weight)

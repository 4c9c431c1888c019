"""FIB/012_gqa_paged_decode_h32_kv4_d128_ps1 in Triton: tokens split over programs, then merged.

The number of splits follows from the shapes alone, so nothing waits for a length on the host.
"""

import torch
import triton
import triton.language as tl

MULTIPROCESSORS = 132
BLOCK_TOKENS = 64
MAX_SPLITS = 64
LOG2_E = 1.4426950408889634


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indptr_ptr,
    indices_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One share of a sequence's tokens for the query heads of one kv head.

    Leaves the share's attention output and the base-2 log-sum-exp of its logits.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    start = tl.load(indptr_ptr + sequence)
    length = tl.load(indptr_ptr + sequence + 1) - start
    # Shares are whole blocks of tokens; the last ones of a short sequence are empty.
    share = tl.cdiv(tl.cdiv(length, BLOCK_TOKENS), num_splits) * BLOCK_TOKENS
    first = tl.minimum(split * share, length)
    last = tl.minimum(first + share, length)

    head = tl.arange(0, BLOCK_HEADS)
    valid_head = head < GROUP
    dim = tl.arange(0, HEAD_DIM)
    row = (sequence * NUM_KV_HEADS + kv_head) * GROUP + head
    q = tl.load(q_ptr + row[:, None] * HEAD_DIM + dim[None, :], mask=valid_head[:, None], other=0.0)
    peak = tl.full((BLOCK_HEADS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    output = tl.zeros((BLOCK_HEADS, HEAD_DIM), dtype=tl.float32)
    for block in range(first, last, BLOCK_TOKENS):
        token = block + tl.arange(0, BLOCK_TOKENS)
        valid = token < last
        page = tl.load(indices_ptr + start + token, mask=valid, other=0).to(tl.int64)
        offset = (page * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(k_ptr + offset, mask=valid[:, None], other=0.0)
        v = tl.load(v_ptr + offset, mask=valid[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(k)) * scale_log2
        logits = tl.where(valid[None, :], logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        p = tl.exp2(logits - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(p, axis=1)
        # The probabilities in two bfloat16 parts: float32 accuracy on bfloat16 tensor cores.
        p_high = p.to(tl.bfloat16)
        p_low = (p - p_high.to(tl.float32)).to(tl.bfloat16)
        output = output * rescale[:, None] + tl.dot(p_high, v)
        output += tl.dot(p_low, v)
        peak = new_peak
    empty = first >= last
    output = tl.where(empty, 0.0, output / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, -float("inf"), peak + tl.log2(total))
    slot = row * num_splits + split
    tl.store(
        partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :], output, mask=valid_head[:, None]
    )
    tl.store(partial_lse_ptr + slot, lse, mask=valid_head)


@triton.jit
def merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    output_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Shares of one query head, weighted by their part of the softmax's denominator."""
    row = tl.program_id(0)
    dim = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, BLOCK_SPLITS)
    inside = split < num_splits
    lse = tl.load(partial_lse_ptr + row * num_splits + split, mask=inside, other=-float("inf"))
    peak = tl.max(lse, axis=0)
    empty = peak == -float("inf")
    weight = tl.exp2(lse - tl.where(empty, 0.0, peak))
    total = tl.sum(weight, axis=0)
    offset = (row * num_splits + split)[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(partial_ptr + offset, mask=inside[:, None], other=0.0)
    output = tl.sum(partial * weight[:, None], axis=0) / tl.where(empty, 1.0, total)
    tl.store(output_ptr + row * HEAD_DIM + dim, output.to(tl.bfloat16))
    merged_lse = tl.where(empty, -float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + row, merged_lse)


def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_qo_heads // num_kv_heads
    # Enough programs for four on each multiprocessor, while each has a block of tokens to do.
    splits = triton.cdiv(4 * MULTIPROCESSORS, batch_size * num_kv_heads)
    mean_blocks = triton.cdiv(kv_indices.shape[0], batch_size * BLOCK_TOKENS)
    splits = max(1, min(splits, mean_blocks, MAX_SPLITS))
    options = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty(batch_size, num_qo_heads, splits, head_dim, **options)
    partial_lse = torch.empty(batch_size, num_qo_heads, splits, **options)
    output = torch.empty_like(q)
    lse = torch.empty(batch_size, num_qo_heads, **options)
    attend_kernel[(batch_size, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        partial,
        partial_lse,
        sm_scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=max(16, triton.next_power_of_2(group)),
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=4,
        num_stages=2,
    )
    merge_kernel[(batch_size * num_qo_heads,)](
        partial,
        partial_lse,
        output,
        lse,
        splits,
        HEAD_DIM=head_dim,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        num_warps=1,
    )
    return output, lse

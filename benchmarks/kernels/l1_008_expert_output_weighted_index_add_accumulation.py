"""L1/008_expert_output_weighted_index_add_accumulation in Triton: a gather instead of a scatter.

An inverse index (count, prefix sum, fill) lists the rows of each token; then every token is summed
in float32 and rounded once. Nothing depends on a value on the host, so the call can be captured.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def count_kernel(token_ptr, count_ptr, rank_ptr, num_rows, BLOCK: tl.constexpr):
    """Rows a token receives, and each row's rank among the rows of its token."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.load(token_ptr + row, mask=inside, other=0)
    rank = tl.atomic_add(count_ptr + token, 1, mask=inside)
    tl.store(rank_ptr + row, rank, mask=inside)


@triton.jit
def fill_kernel(token_ptr, rank_ptr, count_ptr, end_ptr, slot_ptr, num_rows, BLOCK: tl.constexpr):
    """Row numbers grouped by token."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.load(token_ptr + row, mask=inside, other=0)
    rank = tl.load(rank_ptr + row, mask=inside, other=0)
    start = tl.load(end_ptr + token, mask=inside, other=0) - tl.load(
        count_ptr + token, mask=inside, other=0
    )
    tl.store(slot_ptr + start + rank, row, mask=inside)


@triton.jit
def gather_kernel(
    initial_ptr,
    expert_ptr,
    count_ptr,
    end_ptr,
    slot_ptr,
    output_ptr,
    hidden_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden_size
    offset = token.to(tl.int64) * hidden_size + column
    total = tl.load(initial_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    end = tl.load(end_ptr + token)
    start = end - tl.load(count_ptr + token)
    for slot in range(start, end):
        row = tl.load(slot_ptr + slot).to(tl.int64)
        values = tl.load(expert_ptr + row * hidden_size + column, mask=inside, other=0.0)
        total += values.to(tl.float32)
    tl.store(output_ptr + offset, total.to(tl.bfloat16), mask=inside)


def run(final_hidden_states, expert_outputs, token_indices):
    tokens, hidden_size = final_hidden_states.shape
    rows = token_indices.shape[0]
    options = {"dtype": torch.int32, "device": token_indices.device}
    count = torch.zeros(tokens, **options)
    rank, slot = torch.empty(rows, **options), torch.empty(rows, **options)
    block = 256
    grid = (triton.cdiv(rows, block),)
    count_kernel[grid](token_indices, count, rank, rows, BLOCK=block)
    end = torch.cumsum(count, dim=0, dtype=torch.int32)
    fill_kernel[grid](token_indices, rank, count, end, slot, rows, BLOCK=block)
    output = torch.empty_like(final_hidden_states)
    block = 1024
    gather_kernel[(tokens, triton.cdiv(hidden_size, block))](
        final_hidden_states,
        expert_outputs,
        count,
        end,
        slot,
        output,
        hidden_size,
        BLOCK=block,
        num_warps=4,
    )
    return output

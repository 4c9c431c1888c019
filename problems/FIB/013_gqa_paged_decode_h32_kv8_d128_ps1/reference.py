"""Grouped-query decode attention over a paged key/value cache of one token a page."""

import math

import torch


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token a sequence against all its cached tokens, in float32.

    Args:
        q: [batch_size, num_qo_heads, head_dim] bf16.
        k_cache, v_cache: [num_pages, 1, num_kv_heads, head_dim] bf16.
        kv_indptr: [batch_size + 1] int32; sequence b owns kv_indices[kv_indptr[b]:kv_indptr[b+1]].
        kv_indices: [num_kv_indices] int32, page numbers.
        sm_scale: factor on the dot products.

    Returns:
        Attention output [batch_size, num_qo_heads, head_dim] bf16, zero for an empty sequence, and
        the base-2 log-sum-exp of the scaled logits [batch_size, num_qo_heads] f32, -infinity there.
    """
    num_kv_heads = k_cache.shape[2]
    starts, lengths = kv_indptr[:-1].long(), kv_indptr.diff().long()
    max_length = int(lengths.max())

    # Sequences side by side, padded to the longest with repeats of their own last token.
    step = torch.arange(max_length, device=q.device)
    inside = step < lengths.unsqueeze(1)
    position = starts.unsqueeze(1) + torch.minimum(step, lengths.unsqueeze(1) - 1)
    pages = kv_indices[position.clamp(min=0)].long()
    k, v = k_cache[pages, 0].float(), v_cache[pages, 0].float()

    # Query head h reads kv head h // group_size: b batch, l token, k kv head, g group, d head_dim.
    grouped_q = q.float().unflatten(1, (num_kv_heads, -1))
    logits = torch.einsum("bkgd,blkd->bkgl", grouped_q, k) * sm_scale
    logits = logits.masked_fill(~inside[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2.0)
    # A row of -infinity alone has no softmax; its output is zero.
    probabilities = torch.softmax(logits, dim=-1).masked_fill(~inside[:, None, None, :], 0.0)
    output = torch.einsum("bkgl,blkd->bkgd", probabilities, v)
    return output.flatten(1, 2).to(q.dtype), lse.flatten(1)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A page table as a serving engine leaves it.

    Sequences are of roughly equal length (each 2/3 to 4/3 of the mean, at least one token while
    there are tokens enough). Pages come in ascending runs of a few, the runs in random order, and
    no page twice while there are pages enough.
    """
    batch_size = axes_and_scalars["batch_size"]
    num_pages = axes_and_scalars["num_pages"]
    num_kv_indices = axes_and_scalars["num_kv_indices"]

    shortest = 1 if num_kv_indices >= batch_size else 0
    share = torch.rand(batch_size, dtype=torch.float64, device=device) + 1.0
    ends = share.cumsum(0) / share.sum() * (num_kv_indices - shortest * batch_size)
    ends = ends.round().long() + shortest * torch.arange(1, batch_size + 1, device=device)
    kv_indptr = torch.cat((ends.new_zeros(1), ends))

    run_of_page = (torch.rand(num_pages, device=device) < 0.25).cumsum(0)
    rank_of_run = torch.randperm(num_pages + 1, device=device)
    order = rank_of_run[run_of_page].argsort(stable=True)
    kv_indices = order[torch.arange(num_kv_indices, device=device) % num_pages]
    return {"kv_indptr": kv_indptr.int(), "kv_indices": kv_indices.int()}

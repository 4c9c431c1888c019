"""Causal grouped-query prefill attention over a paged cache of one token a page."""

import math

import torch

ROWS = 1024  # query rows at a time, which bounds the memory of the logits


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence in float32.

    Args:
        q: [rows, num_qo_heads, head_dim].
        k, v: [tokens, num_kv_heads, head_dim].
        visible: [rows], at least 1; how many of the first tokens each row sees.
        sm_scale: factor on the dot products.

    Returns:
        Output [rows, num_qo_heads, head_dim] and base-2 log-sum-exp [rows, num_qo_heads].
    """
    # Query head h reads kv head h // group_size: q row, l token, k kv head, g group, d head_dim.
    grouped_q = q.float().unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("qkgd,lkd->kgql", grouped_q, k) * sm_scale
    hidden = torch.arange(k.shape[0], device=q.device) >= visible.unsqueeze(1)
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2.0)
    output = torch.einsum("kgql,lkd->qkgd", torch.softmax(logits, dim=-1), v)
    return output.flatten(1, 2), lse.flatten(0, 1).T


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and tokens of a sequence are aligned at their ends.

    Args:
        q: [total_q, num_qo_heads, head_dim] bf16.
        k_cache, v_cache: [num_pages, 1, num_kv_heads, head_dim] bf16.
        qo_indptr: [num_sequences + 1] int32; sequence b owns q[qo_indptr[b]:qo_indptr[b + 1]].
        kv_indptr: likewise, into kv_indices.
        kv_indices: [num_kv_indices] int32, page numbers.
        sm_scale: factor on the dot products.

    Returns:
        Attention output [total_q, num_qo_heads, head_dim] bf16, zero for a query that sees no
        token, and the base-2 log-sum-exp of the scaled logits [total_q, num_qo_heads] f32,
        -infinity there.
    """
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    bounds = torch.stack((qo_indptr, kv_indptr), dim=1).tolist()
    for (q_start, kv_start), (q_end, kv_end) in zip(bounds, bounds[1:]):
        num_kv = kv_end - kv_start
        pages = kv_indices[kv_start:kv_end].long()
        k, v = k_cache[pages, 0].float(), v_cache[pages, 0].float()
        # Of more queries than tokens, the first ones see nothing.
        first = max(q_start, q_end - num_kv)
        for start in range(first, q_end, ROWS):
            stop = min(start + ROWS, q_end)
            visible = num_kv - q_end + 1 + torch.arange(start, stop, device=q.device)
            seen = num_kv - (q_end - stop)
            rows = slice(start, stop)
            output[rows], lse[rows] = attend(q[rows], k[:seen], v[:seen], visible, sm_scale)
    return output, lse


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Incremental prefills of which the cache holds the prefix alone.

    Queries are split at random into lengths that differ widely. A sequence has one to four cached
    tokens (some have none where there are fewer tokens than sequences), and one has what is left.
    Pages are distinct within a sequence; half of the sequences share a prefix.
    """
    num_sequences = axes_and_scalars["len_indptr"] - 1
    total_q, num_pages = axes_and_scalars["total_q"], axes_and_scalars["num_pages"]
    num_kv_indices = axes_and_scalars["num_kv_indices"]

    share = torch.randn(num_sequences, dtype=torch.float64, device=device).exp()
    q_ends = (share.cumsum(0) / share.sum() * (total_q - num_sequences)).round().long()
    q_ends += torch.arange(1, num_sequences + 1, device=device)

    not_empty = min(num_sequences, num_kv_indices)
    kv_lengths = torch.zeros(num_sequences, dtype=torch.long, device=device)
    kv_lengths[torch.randperm(num_sequences, device=device)[:not_empty]] = 1
    surplus = num_kv_indices - not_empty
    more = torch.randint(4, (num_sequences,), device=device).cumsum(0).clamp(max=surplus)
    kv_lengths += more.diff(prepend=more.new_zeros(1))
    kv_lengths[torch.randint(num_sequences, (1,), device=device)] += surplus - more[-1]
    kv_ends = kv_lengths.cumsum(0)

    # A sequence's pages follow each other in a random order of all pages.
    order = torch.randperm(num_pages, device=device)
    alone = torch.rand(num_sequences, device=device) < 0.5
    first = torch.randint(num_pages, (num_sequences,), device=device) * alone
    first = (first - kv_ends + kv_lengths).repeat_interleave(kv_lengths)
    place = first + torch.arange(num_kv_indices, device=device)
    return {
        "qo_indptr": torch.cat((q_ends.new_zeros(1), q_ends)).int(),
        "kv_indptr": torch.cat((kv_ends.new_zeros(1), kv_ends)).int(),
        "kv_indices": order[place % num_pages].int(),
    }

"""Causal grouped-query prefill attention on concatenated sequences."""

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
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a sequence are aligned at their ends; there are no fewer keys.

    Args:
        q: [total_q, num_qo_heads, head_dim] bf16.
        k, v: [total_kv, num_kv_heads, head_dim] bf16.
        qo_indptr: [num_sequences + 1] int32; sequence b owns q[qo_indptr[b]:qo_indptr[b + 1]].
        kv_indptr: likewise, into k and v.
        sm_scale: factor on the dot products.

    Returns:
        Attention output [total_q, num_qo_heads, head_dim] bf16 and the base-2 log-sum-exp of the
        scaled logits [total_q, num_qo_heads] f32.
    """
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    bounds = torch.stack((qo_indptr, kv_indptr), dim=1).tolist()
    for (q_start, kv_start), (q_end, kv_end) in zip(bounds, bounds[1:]):
        num_kv = kv_end - kv_start
        keys, values = k[kv_start:kv_end].float(), v[kv_start:kv_end].float()
        first = max(q_start, q_end - num_kv)
        for start in range(first, q_end, ROWS):
            stop = min(start + ROWS, q_end)
            visible = num_kv - q_end + 1 + torch.arange(start, stop, device=q.device)
            seen = num_kv - (q_end - stop)
            rows = slice(start, stop)
            output[rows], lse[rows] = attend(q[rows], keys[:seen], values[:seen], visible, sm_scale)
    return output, lse


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Fresh prefills: queries and keys have the same random lengths, which differ widely."""
    num_sequences = axes_and_scalars["len_indptr"] - 1
    total = axes_and_scalars["total_q"]
    share = torch.randn(num_sequences, dtype=torch.float64, device=device).exp()
    ends = (share.cumsum(0) / share.sum() * (total - num_sequences)).round().long()
    ends += torch.arange(1, num_sequences + 1, device=device)
    indptr = torch.cat((ends.new_zeros(1), ends)).int()
    return {"qo_indptr": indptr, "kv_indptr": indptr.clone()}

"""Causal prefill attention on latents, in absorbed form, over a cache of one token a page."""

import math

import torch

ROWS = 1024  # query rows at a time, which bounds the memory of the logits


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence in float32.

    Args:
        q_nope: [rows, num_heads, head_dim_ckv]; q_pe: [rows, num_heads, head_dim_kpe].
        latent: [tokens, head_dim_ckv]; rotary: [tokens, head_dim_kpe].
        visible: [rows], at least 1; how many of the first tokens each row sees.
        sm_scale: factor on the dot products.

    Returns:
        Output [rows, num_heads, head_dim_ckv] and base-2 log-sum-exp [rows, num_heads].
    """
    # q row, h head, l token, c latent channel, r rotary channel.
    logits = torch.einsum("qhc,lc->hql", q_nope.float(), latent)
    logits = (logits + torch.einsum("qhr,lr->hql", q_pe.float(), rotary)) * sm_scale
    hidden = torch.arange(latent.shape[0], device=latent.device) >= visible.unsqueeze(1)
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2.0)
    return torch.einsum("hql,lc->qhc", torch.softmax(logits, dim=-1), latent), lse.T


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and tokens of a sequence are aligned at their ends; there are no fewer tokens.

    Args:
        q_nope: [total_q, num_heads, head_dim_ckv] bf16.
        q_pe: [total_q, num_heads, head_dim_kpe] bf16.
        ckv_cache: [num_pages, 1, head_dim_ckv] bf16, latents that are key and value of all heads.
        kpe_cache: [num_pages, 1, head_dim_kpe] bf16, rotary part of the key of all heads.
        qo_indptr: [num_sequences + 1] int32; sequence b owns queries qo_indptr[b]:qo_indptr[b + 1].
        kv_indptr: likewise, into kv_indices.
        kv_indices: [num_kv_indices] int32, page numbers.
        sm_scale: factor on the dot products.

    Returns:
        Attention output [total_q, num_heads, head_dim_ckv] bf16 and the base-2 log-sum-exp of the
        scaled logits [total_q, num_heads] f32.
    """
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -torch.inf, device=q_nope.device)
    bounds = torch.stack((qo_indptr, kv_indptr), dim=1).tolist()
    for (q_start, kv_start), (q_end, kv_end) in zip(bounds, bounds[1:]):
        num_kv = kv_end - kv_start
        pages = kv_indices[kv_start:kv_end].long()
        latent, rotary = ckv_cache[pages, 0].float(), kpe_cache[pages, 0].float()
        first = max(q_start, q_end - num_kv)
        for start in range(first, q_end, ROWS):
            stop = min(start + ROWS, q_end)
            visible = num_kv - q_end + 1 + torch.arange(start, stop, device=latent.device)
            seen = num_kv - (q_end - stop)
            rows = slice(start, stop)
            output[rows], lse[rows] = attend(
                q_nope[rows], q_pe[rows], latent[:seen], rotary[:seen], visible, sm_scale
            )
    return output, lse


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Prefills behind cached prefixes.

    Queries and prefix tokens are split at random, the queries into positive lengths. Pages come in
    ascending runs of a few, the runs in random order, and no page twice while there are enough.
    """
    num_sequences = axes_and_scalars["len_indptr"] - 1
    total_q, num_pages = axes_and_scalars["total_q"], axes_and_scalars["num_pages"]
    num_kv_indices = axes_and_scalars["num_kv_indices"]

    def split(total: int) -> torch.Tensor:
        """Ends of num_sequences random parts, some of which may be empty."""
        share = torch.randn(num_sequences, dtype=torch.float64, device=device).exp()
        return (share.cumsum(0) / share.sum() * total).round().long()

    one_each = torch.arange(1, num_sequences + 1, device=device)
    q_ends = split(total_q - num_sequences) + one_each
    kv_ends = q_ends + split(num_kv_indices - total_q)

    run_of_page = (torch.rand(num_pages, device=device) < 0.25).cumsum(0)
    rank_of_run = torch.randperm(num_pages + 1, device=device)
    order = rank_of_run[run_of_page].argsort(stable=True)
    kv_indices = order[torch.arange(num_kv_indices, device=device) % num_pages]
    return {
        "qo_indptr": torch.cat((q_ends.new_zeros(1), q_ends)).int(),
        "kv_indptr": torch.cat((kv_ends.new_zeros(1), kv_ends)).int(),
        "kv_indices": kv_indices.int(),
    }

"""Mamba-2 discretisation: decay matrices, C B^T products and decay vectors of every chunk."""

import torch
import torch.nn.functional as F


def segment_sum(a: torch.Tensor) -> torch.Tensor:
    """s[..., i, j] = a[..., j + 1] + ... + a[..., i] for i >= j, and -infinity above the diagonal.

    Each sum is accumulated on its own; a difference of two cumulative sums would lose digits.
    """
    length = a.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(-1)
    columns = a.unsqueeze(-1).expand(*a.shape, length).masked_fill(~below, 0)
    not_above = torch.ones_like(below).tril()
    return columns.cumsum(dim=-2).masked_fill(~not_above, -torch.inf)


def run(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All arithmetic in float32; L, G and M are rounded at the end.

    b batch_size, c num_chunks, q chunk_size, h num_heads, g n_groups, n d_state.

    Args:
        hidden_states: [b, c, q, h, head_dim] bf16; not needed.
        dt: [b, c, q, h] bf16, time step before softplus.
        A_log: [h] bf16.
        B, C: [b, c, q, g, n] bf16, shared by the heads of a group.

    Returns:
        L: [b, h, c, q, q] bf16, decay from step j to step i, zero for j > i.
        G: [b, c, q, q, h] bf16, C_i . B_j, without a mask.
        M: [b, c, q, q, h] bf16, G times L.
        A_cumsum: [b, h, c, q] f32, running sum of A dt within the chunk.
        decay_states: [b, h, c, q] f32, decay from each step to the chunk's end.
    """
    num_heads, n_groups = dt.shape[-1], B.shape[-2]
    step = F.softplus(dt.float()).permute(0, 3, 1, 2)
    a = -torch.exp(A_log.float()).view(-1, 1, 1) * step
    a_cumsum = a.cumsum(dim=-1)
    decay_states = torch.exp(a_cumsum[..., -1:] - a_cumsum)
    decay = torch.exp(segment_sum(a))

    gram = torch.einsum("bcign,bcjgn->bcijg", C.float(), B.float())
    gram = gram.repeat_interleave(num_heads // n_groups, dim=-1)
    product = gram * decay.permute(0, 2, 3, 4, 1)
    return decay.to(B.dtype), gram.to(B.dtype), product.to(B.dtype), a_cumsum, decay_states

"""Mamba-2 output within chunks: decayed scores between a chunk's steps, applied to its states."""

import torch


def segment_sum(a: torch.Tensor) -> torch.Tensor:
    """s[..., i, j] = a[..., j + 1] + ... + a[..., i] for i >= j, and -infinity for i < j."""
    length = a.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(-1)
    columns = a.unsqueeze(-1).expand(*a.shape, length).masked_fill(~below, 0.0)
    not_above = torch.ones_like(below).tril()
    return columns.cumsum(dim=-2).masked_fill(~not_above, -torch.inf)


def run(
    hidden_states: torch.Tensor, A_cumsum: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """Y_i = sum over j <= i of (C_i . B_j) exp(A_{j+1} + ... + A_i) X_j, in float32, rounded once.

    Args:
        hidden_states: X, [batch_size, num_chunks, chunk_size, num_heads, head_dim] bf16.
        A_cumsum: A, [batch_size, num_heads, num_chunks, chunk_size] bf16; summed as it is, whatever
            its name says.
        B, C: [batch_size, num_chunks, chunk_size, n_groups, state_size] bf16, shared by the
            num_heads / n_groups heads of a group.

    Returns:
        Shaped like hidden_states, bf16.
    """
    n_groups = B.shape[3]
    # Axes: b batch, k chunk, i and j steps, g group, r head of the group, p head_dim, n state_size.
    x = hidden_states.float().unflatten(3, (n_groups, -1))
    decay = segment_sum(A_cumsum.float()).exp().unflatten(1, (n_groups, -1))
    products = torch.einsum("bkign,bkjgn->bkgij", C.float(), B.float())
    scores = products.unsqueeze(3) * decay.permute(0, 3, 1, 2, 4, 5)
    y = torch.einsum("bkgrij,bkjgrp->bkigrp", scores, x)
    return y.flatten(3, 4).to(hidden_states.dtype)

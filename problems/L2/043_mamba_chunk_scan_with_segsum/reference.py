"""Mamba-2 state-space scan in its chunked (SSD) form, from an initial to a final state."""

import torch
import torch.nn.functional as F

CHUNK_SIZE = 256


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
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """state_t = exp(A_t) state_{t-1} + X_t B_t^T and y_t = state_t C_t + D X_t, chunk by chunk.

    Everything is float32 between the inputs and the two results.

    Args:
        hidden_states: X, [batch_size, seq_len, num_heads, head_dim] bf16.
        A: [batch_size, num_heads, seq_len] bf16, logarithm of the decay.
        B, C: [batch_size, seq_len, n_groups, state_size] bf16, shared by the heads of a group.
        D: [num_heads] bf16.
        initial_states: [batch_size, num_heads, head_dim, state_size] bf16.

    Returns:
        y as [batch_size, seq_len, num_heads * head_dim] bf16, and the last state, shaped like
        initial_states, bf16.
    """
    batch_size, seq_len, num_heads, head_dim = hidden_states.shape
    n_groups, state_size = B.shape[2:]
    heads_per_group = num_heads // n_groups
    dtype = hidden_states.dtype
    # Steps of the padding neither decay the state (A = 0) nor add to it (B = 0).
    padding = -seq_len % CHUNK_SIZE

    # Axes: b batch, c chunk, l and s steps within a chunk, g group, r head of the group,
    # p head_dim, n state_size.
    x = F.pad(hidden_states.float(), (0, 0, 0, 0, 0, padding))
    x = x.view(batch_size, -1, CHUNK_SIZE, n_groups, heads_per_group, head_dim)
    a = F.pad(A.float(), (0, padding))
    a = a.view(batch_size, n_groups, heads_per_group, -1, CHUNK_SIZE)
    b = F.pad(B.float(), (0, 0, 0, 0, 0, padding))
    b = b.view(batch_size, -1, CHUNK_SIZE, n_groups, state_size)
    c = F.pad(C.float(), (0, 0, 0, 0, 0, padding)).view_as(b)

    # Within a chunk: an attention-like product with the decay between two steps as its mask.
    decay = segment_sum(a).exp()
    gram = torch.einsum("bclgn,bcsgn->bgcls", c, b)
    y = torch.einsum("bgrcls,bcsgrp->bclgrp", gram.unsqueeze(2) * decay, x)

    # What each chunk adds to the state by its end.
    a_cumulative = a.cumsum(dim=-1)
    decay_to_end = (a_cumulative[..., -1:] - a_cumulative).exp()
    decayed_x = torch.einsum("bgrcs,bcsgrp->bcsgrp", decay_to_end, x)
    added = torch.einsum("bcsgrp,bcsgn->bcgrpn", decayed_x, b)

    # Across chunks: the state before each one and after the last, the initial state first in line.
    initial = initial_states.float().view(
        batch_size, 1, n_groups, heads_per_group, head_dim, state_size
    )
    contributions = torch.cat((initial, added), dim=1)
    chunk_decay = segment_sum(F.pad(a_cumulative[..., -1], (1, 0))).exp()
    states = torch.einsum("bgrzc,bcgrpn->bzgrpn", chunk_decay, contributions)
    before, final_state = states[:, :-1], states[:, -1]

    # What the state before the chunk contributes to its steps.
    carried = torch.einsum("bclgn,bcgrpn->bclgrp", c, before)
    y = y + torch.einsum("bgrcl,bclgrp->bclgrp", a_cumulative.exp(), carried)
    y = y + D.float().view(n_groups, heads_per_group, 1) * x

    output = y.reshape(batch_size, -1, num_heads * head_dim)[:, :seq_len]
    return output.to(dtype), final_state.reshape_as(initial_states).to(dtype)

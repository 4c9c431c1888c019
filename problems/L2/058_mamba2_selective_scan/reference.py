"""Mamba-2 mixer: projection, short convolution, state-space scan, gated group norm, projection."""

import torch
import torch.nn.functional as F

CHUNK_SIZE = 128
NUM_GROUPS = 8


def segment_sum(a: torch.Tensor) -> torch.Tensor:
    """s[..., i, j] = a[..., j + 1] + ... + a[..., i] for i >= j, and -infinity above the diagonal.

    Each sum is accumulated on its own; a difference of two cumulative sums would lose digits.
    """
    length = a.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(-1)
    columns = a.unsqueeze(-1).expand(*a.shape, length).masked_fill(~below, 0)
    not_above = torch.ones_like(below).tril()
    return columns.cumsum(dim=-2).masked_fill(~not_above, -torch.inf)


def state_space_scan(
    x: torch.Tensor, dt: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """y_t = state_t C_t with state_t = exp(A dt_t) state_{t-1} + dt_t x_t B_t^T, from zero.

    Chunk by chunk, in float32. Head h of the heads uses group h % groups.

    Args:
        x: [batch, seq_len, heads, head_dim].
        dt: [batch, seq_len, heads].
        a_log: [heads], A = -exp(a_log).
        b, c: [batch, seq_len, groups, state_size].

    Returns:
        [batch, seq_len, heads, head_dim].
    """
    seq_len, groups = x.shape[1], b.shape[2]
    # Steps of the padding neither decay the state (A dt = 0) nor add to it (x = 0).
    padding = -seq_len % CHUNK_SIZE

    def split(t: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, ...] to [batch, chunks, CHUNK_SIZE, ...]."""
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, padding))
        return t.unflatten(1, (-1, CHUNK_SIZE))

    # Axes: b batch, c chunk, l and s steps within a chunk, r head within its group, g group,
    # p head_dim, n state_size.
    steps = split(x * dt.unsqueeze(-1)).unflatten(3, (-1, groups))
    a = split(-torch.exp(a_log) * dt).unflatten(3, (-1, groups)).permute(0, 3, 4, 1, 2)
    b, c = split(b), split(c)

    # Within a chunk: an attention-like product with the decay between two steps as its mask.
    gram = torch.einsum("bclgn,bcsgn->bgcls", c, b)
    decay = segment_sum(a).exp()
    y = torch.einsum("brgcls,bcsrgp->bclrgp", gram.unsqueeze(1) * decay, steps)

    # What each chunk adds to the state by its end, and the state before each chunk.
    a_cumulative = a.cumsum(dim=-1)
    decay_to_end = (a_cumulative[..., -1:] - a_cumulative).exp().permute(0, 3, 4, 1, 2)
    added = torch.einsum("bcsrgp,bcsgn->bcrgpn", steps * decay_to_end.unsqueeze(-1), b)
    # Entry [z, c] is the decay from the end of chunk c - 1 to the end of chunk z - 1, so that
    # the additions stand one place later than their chunks, behind the zero initial state.
    between = segment_sum(F.pad(a_cumulative[..., -1], (1, 0))).exp()[..., :-1, 1:]
    before = torch.einsum("brgzc,bcrgpn->bzrgpn", between, added)

    carried = torch.einsum("bclgn,bcrgpn->bclrgp", c, before)
    y = y + carried * a_cumulative.exp().permute(0, 3, 4, 1, 2).unsqueeze(-1)
    return y.flatten(3, 4).flatten(1, 2)[:, :seq_len]


def run(
    hidden_states: torch.Tensor,
    in_proj_weight: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    time_step_limit_min: float,
    time_step_limit_max: float,
    layer_norm_epsilon: float,
) -> torch.Tensor:
    """Everything rounds to bfloat16 but the scan, which is float32. There are 8 groups.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        in_proj_weight: [intermediate + conv_dim + num_heads, hidden_size]: gate, convolved part
            (x, B, C) and time step.
        conv1d_weight: [conv_dim, 1, kernel_size]; conv1d_bias: [conv_dim].
        dt_bias, A_log, D: [num_heads].
        norm_weight: [intermediate].
        out_proj_weight: [hidden_size, intermediate].
        time_step_limit_min, time_step_limit_max: bounds of the time step.
        layer_norm_epsilon: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    dtype = hidden_states.dtype
    intermediate, conv_dim, num_heads = norm_weight.shape[0], conv1d_bias.shape[0], D.shape[0]
    taps = conv1d_weight.shape[-1]

    projected = F.linear(hidden_states, in_proj_weight)
    gate, xbc, dt = projected.split((intermediate, conv_dim, num_heads), dim=-1)

    # Causal convolution of each channel on its own, accumulated in float32 and rounded once.
    xbc = F.pad(xbc.float().transpose(1, 2), (taps - 1, 0))
    xbc = F.conv1d(xbc, conv1d_weight.float(), conv1d_bias.float(), groups=conv_dim)
    xbc = xbc.transpose(1, 2).to(dtype)
    xbc = xbc * torch.sigmoid(xbc)
    group_width = (conv_dim - intermediate) // 2
    x, b, c = xbc.float().split((intermediate, group_width, group_width), dim=-1)
    x = x.unflatten(-1, (num_heads, -1))
    b, c = b.unflatten(-1, (NUM_GROUPS, -1)), c.unflatten(-1, (NUM_GROUPS, -1))
    dt = F.softplus(dt + dt_bias).clamp(time_step_limit_min, time_step_limit_max)

    y = state_space_scan(x, dt.float(), A_log.float(), b, c)
    y = (y + D.float().unsqueeze(-1) * x).flatten(2).to(dtype)

    # RMSNorm of each group of channels, gated afterwards.
    grouped = y.float().unflatten(-1, (NUM_GROUPS, -1))
    inverse_rms = torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + layer_norm_epsilon)
    normalized = (grouped * inverse_rms).flatten(-2).to(dtype)
    y = normalized * norm_weight * (gate * torch.sigmoid(gate))
    return F.linear(y, out_proj_weight)

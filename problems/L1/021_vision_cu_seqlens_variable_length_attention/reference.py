"""Vision attention layer over packed sequences of different lengths."""

import torch
import torch.nn.functional as F


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of [num_heads, length, head_dim] tensors, every token to every token."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def run(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> torch.Tensor:
    """Projection, rotary embedding, attention within each sequence, projection; all in float32.

    Args:
        hidden_states: [total_seq_len, hidden_size] f32, the sequences one after another.
        cu_seqlens: [number of sequences + 1] int64; sequence i is cu_seqlens[i]:cu_seqlens[i + 1].
        cos, sin: [total_seq_len, head_dim] f32.
        qkv_weight, qkv_bias: [3 * hidden_size, hidden_size] and [3 * hidden_size] f32.
        proj_weight, proj_bias: [hidden_size, hidden_size] and [hidden_size] f32.

    Returns:
        [total_seq_len, hidden_size] f32.
    """
    head_dim = cos.shape[-1]
    qkv = F.linear(hidden_states, qkv_weight, qkv_bias).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(1, 2, 0, 3)  # each [num_heads, total_seq_len, head_dim]
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    # One product per sequence and head; the lengths are needed on the host.
    lengths = cu_seqlens.diff().tolist()
    sequences = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
    heads = torch.cat([attend(*sequence) for sequence in sequences], dim=1)
    return F.linear(heads.transpose(0, 1).flatten(1), proj_weight, proj_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Sequences cut at random, hence of very different lengths; tables of no real angle."""
    total_seq_len, num_boundaries = axes_and_scalars["total_seq_len"], axes_and_scalars["num_seqs"]
    hidden_size, head_dim = axes_and_scalars["hidden_size"], axes_and_scalars["head_dim"]

    cuts = torch.randint(1, total_seq_len, (num_boundaries - 2,), device=device)
    boundaries = [0, *cuts.unique(sorted=True).tolist(), total_seq_len]
    while len(boundaries) < num_boundaries:  # two cuts fell on one place: halve the last sequence
        boundaries.insert(-1, (boundaries[-2] + boundaries[-1]) // 2)
    return {
        "hidden_states": torch.randn(total_seq_len, hidden_size, device=device),
        "cu_seqlens": torch.tensor(boundaries, device=device),
        "cos": torch.randn(total_seq_len, head_dim, device=device),
        "sin": torch.randn(total_seq_len, head_dim, device=device),
        "qkv_weight": torch.randn(3 * hidden_size, hidden_size, device=device) * 0.02,
        "qkv_bias": torch.zeros(3 * hidden_size, device=device),
        "proj_weight": torch.randn(hidden_size, hidden_size, device=device) * 0.02,
        "proj_bias": torch.zeros(hidden_size, device=device),
    }

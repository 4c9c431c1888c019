"""Self-attention over all patches of all frames of a clip, with a 3-D rotary embedding."""

import math

import torch
import torch.nn.functional as F


def rotate_pairs(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent columns (2i, 2i + 1) by the i-th angle; an odd last column stays as it is.

    Args:
        x: [..., seq_len, columns].
        angles: [seq_len, columns // 2].
    """
    paired, rest = x.split((2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]), dim=-1)
    even, odd = paired.unflatten(-1, (-1, 2)).unbind(dim=-1)
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((rotated.flatten(-2), rest), dim=-1)


def apply_rope_3d(x: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rotate the first, second and third third of the head by frame, row and column angles."""
    third = x.shape[-1] // 3
    frame, row, column, rest = x.split((third, third, third, x.shape[-1] - 3 * third), dim=-1)
    parts = [rotate_pairs(part, a) for part, a in zip((frame, row, column), angles, strict=True)]
    return torch.cat((*parts, rest), dim=-1)


def run(
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    temporal_freqs: torch.Tensor,
    spatial_freqs: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Every token attends to every token of its clip; all in float32.

    Args:
        hidden_states: [batch_size, num_frames, num_patches_per_frame, hidden_size] f32.
        qkv_weight, qkv_bias: [3 * hidden_size, hidden_size] and [3 * hidden_size] f32.
        out_weight, out_bias: [hidden_size, hidden_size] and [hidden_size] f32.
        temporal_freqs, spatial_freqs: [head_dim / 2] f32; only the first head_dim // 3 // 2 count.
        scale: factor on the scores.

    Returns:
        Shaped like hidden_states, f32.
    """
    _, num_frames, patches_per_frame, _ = hidden_states.shape
    head_dim = 2 * temporal_freqs.shape[0]
    x = hidden_states.flatten(1, 2)
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch_size, num_heads, tokens, head_dim]

    side = math.isqrt(patches_per_frame - 1) + 1  # square root, rounded up
    token = torch.arange(num_frames * patches_per_frame, device=x.device)
    patch = token % patches_per_frame
    frame, row, column = token // patches_per_frame, patch // side, patch % side
    pairs = head_dim // 3 // 2
    angles = (
        frame.float().unsqueeze(-1) * temporal_freqs[:pairs],
        row.float().unsqueeze(-1) * spatial_freqs[:pairs],
        column.float().unsqueeze(-1) * spatial_freqs[:pairs],
    )
    q, k = apply_rope_3d(q, angles), apply_rope_3d(k, angles)

    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    heads = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2).flatten(2)
    return F.linear(heads, out_weight, out_bias).view(hidden_states.shape)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal tokens, small weights, biases of zero and the usual ladder of frequencies."""
    hidden_size, head_dim = axes_and_scalars["hidden_size"], axes_and_scalars["head_dim"]
    freqs = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    return {
        "hidden_states": torch.randn(
            axes_and_scalars["batch_size"],
            axes_and_scalars["num_frames"],
            axes_and_scalars["num_patches_per_frame"],
            hidden_size,
            device=device,
        ),
        "qkv_weight": torch.randn(3 * hidden_size, hidden_size, device=device) * 0.02,
        "qkv_bias": torch.zeros(3 * hidden_size, device=device),
        "out_weight": torch.randn(hidden_size, hidden_size, device=device) * 0.02,
        "out_bias": torch.zeros(hidden_size, device=device),
        "temporal_freqs": freqs,
        "spatial_freqs": freqs.clone(),
        "scale": 0.125,
    }

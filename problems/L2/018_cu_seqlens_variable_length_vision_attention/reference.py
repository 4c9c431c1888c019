"""Packed vision attention block whose rotary tables differ from head to head."""

import torch
import torch.nn.functional as F


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one sequence, [num_heads, length, head_dim]."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(probabilities, v)


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
    """Joint projection, rotary embedding, attention within each sequence, output projection.

    Args:
        hidden_states: [total_seq_len, embed_dim] bf16.
        cu_seqlens: [num_sequences] int64, the row after each sequence's last; there is no leading
            zero, and empty sequences are allowed.
        cos, sin: [total_seq_len, num_heads, head_dim] bf16.
        qkv_weight: [3 * embed_dim, embed_dim] bf16, rows in the order q, k, v; qkv_bias.
        proj_weight: [embed_dim, embed_dim] bf16; proj_bias: [embed_dim] bf16.

    Returns:
        [total_seq_len, embed_dim] bf16; zeros if no sequence has rows.
    """
    num_heads, head_dim = cos.shape[1:]
    qkv = F.linear(hidden_states, qkv_weight, qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, num_heads, head_dim)).unbind(dim=1)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    ends = cu_seqlens.tolist()
    sequences = [
        attention(q[:, begin:end], k[:, begin:end], v[:, begin:end])
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > begin
    ]
    if not sequences:
        return torch.zeros_like(hidden_states)
    context = torch.cat(sequences, dim=1).transpose(0, 1).flatten(1)
    return F.linear(context, proj_weight, proj_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations, small weights, zero biases, sequences of equal length but for one row.

    cos and sin are plain normal noise, not the cosine and sine of anything.
    """
    axes = axes_and_scalars
    total, num_sequences = axes["total_seq_len"], axes["num_sequences"]
    embed_dim, qkv_dim = axes["embed_dim"], axes["qkv_dim"]
    table_shape = (total, axes["num_heads"], axes["head_dim"])

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=device)

    sequence = torch.arange(1, num_sequences + 1, device=device)
    return {
        "hidden_states": normal(total, embed_dim),
        # The first (total mod num_sequences) sequences are one row longer.
        "cu_seqlens": sequence * (total // num_sequences)
        + sequence.clamp(max=total % num_sequences),
        "cos": normal(*table_shape),
        "sin": normal(*table_shape),
        "qkv_weight": normal(qkv_dim, embed_dim, std=0.02),
        "qkv_bias": zeros(qkv_dim),
        "proj_weight": normal(embed_dim, embed_dim, std=0.02),
        "proj_bias": zeros(embed_dim),
    }

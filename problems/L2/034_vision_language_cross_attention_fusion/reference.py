"""Grouped-query cross-attention from language to vision tokens, each with its rotary embedding."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128
VISION_SECTIONS = (42, 42, 44)
"""Columns of a key that turn with time, height and width."""
ROPE_THETA = 10000.0
PATCHES_PER_SIDE = 14


def apply_rope(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form, over all columns.

    Angles are float32; cosine and sine, both products and the sum round to x's dtype.

    Args:
        x: [batch, heads, tokens, columns].
        position: [batch, tokens] int64.
    """
    columns = x.shape[-1]
    exponent = torch.arange(0, columns, 2, dtype=torch.float32, device=x.device) / columns
    angle = position.float().unsqueeze(-1) * ROPE_THETA**-exponent
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)


def run(
    language_hidden_states: torch.Tensor,
    vision_hidden_states: torch.Tensor,
    language_position_ids: torch.Tensor,
    vision_grid_thw: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    k_proj_bias: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    o_proj_weight: torch.Tensor,
) -> torch.Tensor:
    """Every language token attends to all vision tokens; no mask.

    Args:
        language_hidden_states: [batch_size, lang_seq_len, hidden_size] bf16.
        vision_hidden_states: [batch_size, vision_seq_len, hidden_size] bf16.
        language_position_ids: [batch_size, lang_seq_len] int64.
        vision_grid_thw: [batch_size, vision_seq_len, 3] int64, time, height and width.
        q_proj_weight: [num_attention_heads * 128, hidden_size] bf16, and its bias.
        k_proj_weight, v_proj_weight: [num_key_value_heads * 128, hidden_size] bf16, and their
            biases.
        o_proj_weight: [hidden_size, num_attention_heads * 128] bf16.

    Returns:
        [batch_size, lang_seq_len, hidden_size] bf16.
    """

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    q = apply_rope(heads(language_hidden_states, q_proj_weight, q_proj_bias), language_position_ids)
    k = heads(vision_hidden_states, k_proj_weight, k_proj_bias)
    parts = zip(k.split(VISION_SECTIONS, dim=-1), vision_grid_thw.unbind(dim=-1), strict=True)
    k = torch.cat([apply_rope(part, position) for part, position in parts], dim=-1)
    v = heads(vision_hidden_states, v_proj_weight, v_proj_bias)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) / HEAD_DIM**0.5
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    context = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(context, o_proj_weight)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations, small weights and biases, text in order, frames of 14 by 14 patches."""
    axes = axes_and_scalars
    batch_size, hidden_size = axes["batch_size"], axes["hidden_size"]
    lang_seq_len, vision_seq_len = axes["lang_seq_len"], axes["vision_seq_len"]
    q_dim, kv_dim = axes["q_proj_dim"], axes["kv_proj_dim"]

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    patch = torch.arange(vision_seq_len, device=device)
    row = patch // PATCHES_PER_SIDE
    thw = (row // PATCHES_PER_SIDE, row % PATCHES_PER_SIDE, patch % PATCHES_PER_SIDE)
    return {
        "language_hidden_states": normal(batch_size, lang_seq_len, hidden_size, std=1.0),
        "vision_hidden_states": normal(batch_size, vision_seq_len, hidden_size, std=1.0),
        "language_position_ids": torch.arange(lang_seq_len, device=device).expand(batch_size, -1),
        "vision_grid_thw": torch.stack(thw, dim=-1).expand(batch_size, -1, -1),
        "q_proj_weight": normal(q_dim, hidden_size),
        "q_proj_bias": normal(q_dim),
        "k_proj_weight": normal(kv_dim, hidden_size),
        "k_proj_bias": normal(kv_dim),
        "v_proj_weight": normal(kv_dim, hidden_size),
        "v_proj_bias": normal(kv_dim),
        "o_proj_weight": normal(hidden_size, q_dim),
    }
